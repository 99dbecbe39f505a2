"""The dispatch rule: how a worker or a WAN queue chooses the next one among what is ready.

The rule is "smallest key first, and never idle while something is ready". So simulator and runtime only have to share
the key, a function of integers: the compiled engine compiles it; the reference engine, the runtime and the WAN queues
call it. Knows nothing of time, sockets or tensors.
"""

from __future__ import annotations


def turn_key(microbatch: int, pipeline: int, num_pipelines: int) -> int:
    """A transfer's turn on the WAN of its DP-cell: oldest microbatch first, pipelines in order within it.

    Serving one whole pipeline first would be worse than not sharing: the other pipelines' stages on the other side of
    the WAN would start a whole iteration late.
    """
    return microbatch * num_pipelines + pipeline


def before(turn: int, sequence: int) -> tuple[int, int]:
    """The order in which a link serves what is ready: smallest turn first; equal turns first come, first served."""
    return (turn, sequence)


QUANTUM_NS = 5_000_000
"""A link that serves turns switches only at chunk boundaries, and a chunk takes at most this long. With longer chunks a
late urgent turn waits behind an early one; with shorter ones the cost per chunk grows."""


def chunk_bytes(rate_bps: float, smallest: int, largest: int) -> int:
    """How many bytes a link of this rate carries in one quantum, within bounds of the transport."""
    return max(smallest, min(largest, int(rate_bps * QUANTUM_NS / 8e9)))
