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
