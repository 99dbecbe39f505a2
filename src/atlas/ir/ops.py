"""The kinds of op, and their text form `3F17` (stage, kind, microbatch), like torch's pipelining actions.

Knows no order (Program), no times (Timeline) and no durations (cost).
"""

from __future__ import annotations

import re
from enum import IntEnum
from typing import NamedTuple

from atlas.errors import ProgramError


class Kind(IntEnum):
    """The kinds of op. The engines' arrays hold the integer values."""

    F = 0
    """Forward of one microbatch through one stage."""
    R = 1
    """Recompute of the activations that the forward discarded."""
    B = 2
    """Backward in one piece: input gradient and weight gradient."""
    I = 3  # noqa: E741 - the letter that the zero-bubble papers and torch use
    """The part of the backward that the previous stage waits for: gradient of the stage's input."""
    W = 4
    """The part of the backward that no other worker waits for: gradient of the weights."""
    SYNC = 5
    """All-reduce of the stage's gradients over every pipeline."""
    NORM = 6
    """Global gradient norm over all workers."""
    STEP = 7
    """Optimizer step."""
    P = 8
    """A slice of prefill in a bubble."""


NUM_KINDS = len(Kind)

BACKWARDS = (Kind.B, Kind.I)
"""The kinds that send a gradient to the previous stage."""
PER_MICROBATCH = (Kind.F, Kind.R, Kind.B, Kind.I, Kind.W)
COLLECTIVES = (Kind.SYNC, Kind.NORM)
USEFUL = (Kind.F, Kind.R, Kind.B, Kind.I, Kind.W, Kind.STEP, Kind.P)
"""The kinds that keep the accelerator busy; the others wait for a network."""

_TEXT = re.compile(r"(\d+)(SEND_F|SEND_B|RECV_F|RECV_B|SYNC|NORM|STEP|F|R|B|I|W|P)(\d*)")


class Op(NamedTuple):
    """One op of one worker. For SYNC, NORM and STEP `microbatch` is the number of the iteration."""

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.name}{self.microbatch}"


def parse_action(text: str) -> tuple[int, str, int]:
    """`3F17` -> (3, "F", 17). A missing microbatch is 0, as torch writes REDUCE_GRAD."""
    match = _TEXT.fullmatch(text)
    if match is None:
        raise ProgramError(
            f"{text!r} is not an op: write stage, kind, microbatch, such as 3F17 or 0SEND_F2; "
            f"kinds are {', '.join(k.name for k in Kind)}, SEND_F, RECV_F, SEND_B, RECV_B"
        )
    stage, kind, microbatch = match.groups()
    return int(stage), kind, int(microbatch or 0)
