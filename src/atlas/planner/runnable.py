"""Whether the runtime can execute a plan today. One function, to be edited when the runtime changes.

Knows what `atlas.runtime` and `atlas.launch` can do without importing them.
"""

from __future__ import annotations

from atlas.planner.candidate import Candidate


def runnable(candidate: Candidate) -> str:
    """`yes`, or `no, because ...`: the sentence that `atlas train` refuses with."""
    reasons = []
    if len(candidate.groups) > 1:
        reasons.append(
            "it spreads data parallelism over regions and the runtime reduces gradients among pipelines that are "
            "placed alike"
        )
    return "yes" if not reasons else "no, because " + "; ".join(reasons)
