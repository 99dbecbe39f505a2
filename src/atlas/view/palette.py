"""One set of colours and words for every picture: what an op or a wait looks like, and what it is called.

Hues follow Okabe and Ito, so that they stay apart for every common kind of colour blindness; waits are pale and
hatched, work is solid, so that the two differ without any hue. Knows nothing of Timelines.
"""

from __future__ import annotations

from typing import NamedTuple

from atlas.ir.bubbles import Cause
from atlas.ir.ops import Kind


class Look(NamedTuple):
    light: str
    dark: str
    label: str
    meaning: str


OPS: dict[Kind, Look] = {
    Kind.F: Look("#0072b2", "#3d9bd6", "F forward", "forward of one microbatch through one stage"),
    Kind.R: Look("#7fc4ea", "#8fd0f2", "R recompute", "recompute of activations that the forward threw away"),
    Kind.B: Look("#e08a00", "#f0a53a", "B backward", "backward: gradients of the input and of the weights"),
    Kind.I: Look(
        "#f2b23a", "#f5c46b", "I input gradient", "the half of the backward that the previous stage waits for"
    ),
    Kind.W: Look("#8c6d1f", "#b8963f", "W weight gradient", "the half of the backward that nobody waits for"),
    Kind.SYNC: Look("#9a86c4", "#8d78ba", "SYNC all-reduce", "gradients are summed over all pipelines"),
    Kind.NORM: Look("#b7a8d6", "#75639f", "NORM", "every worker meets for the global gradient norm"),
    Kind.STEP: Look("#3a3f44", "#d5dade", "STEP optimizer", "the weights are updated"),
    Kind.P: Look("#009e73", "#2bbd93", "P prefill", "a slice of somebody's prefill, put into a bubble"),
}

CAUSES: dict[Cause, Look] = {
    Cause.FILL: Look("#e3e6e9", "#343a41", "fill", "the run has begun, this worker's first op has not"),
    Cause.DRAIN: Look("#d3d8dc", "#424a53", "drain", "this worker is done, the run is not"),
    Cause.WAN: Look("#f7b8a4", "#8a3d26", "WAN", "its input exists but is queued or travelling between datacenters"),
    Cause.PEER: Look("#f4edcb", "#4b4629", "peer", "its input is not produced yet, or moves inside the datacenter"),
    Cause.SYNC: Look("#d9cff0", "#453a66", "sync", "all-reduce, and the wait until everybody has come to it"),
}

WIRE: tuple[Look, Look] = (
    Look("#4f9bc9", "#5fa9d6", "activation on the WAN", "output of a forward, on its way to the next stage"),
    Look("#c48a3a", "#c9923f", "gradient on the WAN", "gradient, on its way back to the previous stage"),
)
"""By direction of traffic."""

LOOKS: tuple[Look, ...] = (*OPS.values(), *CAUSES.values(), *WIRE)
"""By the code of a span."""
WAIT, SEND = len(OPS), len(OPS) + len(CAUSES)
"""Codes of spans: a Kind, WAIT + cause, or SEND + direction."""

SERIES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#8c6d1f", "#56b4e9", "#3a3f44", "#e69f00")
"""Lines of a chart, in this order."""
