"""The dispatch rule: how a worker or a WAN queue picks, among what is ready, what goes next.

The whole rule is "the smallest key first, and never idle while something is ready". What both worlds must
agree on is therefore only the key, a plain function of integers: the compiled engine jits it, the reference
engine, the runtime and the WAN queues call it as it is. Knows nothing of time, sockets or tensors.
"""

from __future__ import annotations


def turn_key(microbatch: int, pipeline: int, num_pipelines: int) -> int:
    """A transfer's turn on the WAN of its DP-cell: oldest microbatch first, pipelines in order within it.

    Serving one whole pipeline first would be worse than not sharing at all: the others' stages beyond the
    WAN would start a whole iteration late.
    """
    return microbatch * num_pipelines + pipeline


def before(turn: int, sequence: int) -> tuple[int, int]:
    """The order in which a link serves what is ready: smallest turn first; equal turns first come, first served."""
    return (turn, sequence)


QUANTUM_NS = 5_000_000
"""A link that serves turns changes its mind only at chunk boundaries, and a chunk is at most this long."""


def chunk_bytes(rate_bps: float, smallest: int, largest: int) -> int:
    """How many bytes a link of this rate carries in one quantum, within what the transport can handle well."""
    return max(smallest, min(largest, int(rate_bps * QUANTUM_NS / 8e9)))
