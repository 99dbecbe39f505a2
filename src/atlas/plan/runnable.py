"""Whether the runtime can execute a plan today. One function, to be edited as the runtime learns.

Knows what `atlas.runtime` and `atlas.launch` can do without importing them.
"""

from __future__ import annotations

from atlas.plan.candidate import Candidate


def runnable(candidate: Candidate) -> str:
    """`yes`, or `no, because ...`: the sentence that `atlas train` refuses with."""
    reasons = []
    if candidate.tp > 1:
        reasons.append(f"it has tensor parallelism (tp {candidate.tp}) and a worker of the runtime is one GPU")
    if len(candidate.groups) > 1:
        reasons.append(
            "it spreads data parallelism over regions and the runtime reduces gradients inside one cell only"
        )
    if any(group.cells > 1 for group in candidate.groups):
        reasons.append(f"it has {sum(group.cells for group in candidate.groups)} DP-cells and the runtime runs one")
    if candidate.sharing:
        reasons.append("its pipelines take turns on the WAN and the runtime does not share paths yet")
    return "yes" if not reasons else "no, because " + "; ".join(reasons)
