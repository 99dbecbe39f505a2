"""Layers to stages, when everything else is decided: the slowest stage as fast as can be, within memory.

Greedy under a limit, and the limit raised to the next value at which some stage could take one layer more: exact,
because a longer run is never faster nor smaller. Knows one placement at a time.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from atlas.plan.sailor.tables import Tables

Kinds = frozenset[tuple[str, int]]
"""(GPU type, tp) of a stage's replicas."""


def balanced(
    tables: Tables, kinds: Sequence[Kinds], comm_s: Sequence[float], at_least_s: float, head_alone: bool
) -> list[int] | None:
    """Where each stage ends (exclusive), or None where memory forbids any split.

    A head whose output is large is alone on the last stage or shares it: two cases, because what it sends differs.
    """
    limit = at_least_s
    while True:
        ends, limit = _under(tables, kinds, comm_s, limit, head_alone)
        if ends is not None or limit == float("inf"):
            return ends


def _under(
    tables: Tables, kinds: Sequence[Kinds], comm_s: Sequence[float], limit_s: float, head_alone: bool
) -> tuple[list[int] | None, float]:
    """The split under a limit, or None and the next limit to try."""
    num_stages, num_layers = len(kinds), tables.num_layers
    tail = 2 if tables.head_is_heavy and num_stages > 1 and not head_alone else 1
    start, ends, following = 0, [], float("inf")
    for i in range(num_stages):
        after = num_stages - i
        most = num_layers - (after - 2 + tail) if after > 1 else num_layers
        if head_alone and after == 1 and start < num_layers - 1:
            return None, following
        end = most
        for kind in kinds[i]:
            time_s = tables.time_s[kind]
            budget = limit_s - comm_s[i] + 1e-12
            reach = bisect_right(time_s, time_s[start] + budget) - 1
            held = tables.furthest_layer(kind, start, after)
            if reach < min(held, most):
                following = min(following, time_s[max(reach, start) + 1] - time_s[start] + comm_s[i])
            end = min(end, reach, held)
        if end <= start:
            return None, following
        ends.append(end)
        start = end
    return (ends, limit_s) if start == num_layers else (None, following)
