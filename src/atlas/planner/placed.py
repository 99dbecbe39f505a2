"""A simulated job with the figures of a plan: its dollars, its traffic between datacenters, its place on the map.

For a job that is placed already. Searches nothing and simulates nothing.
"""

from __future__ import annotations

from atlas.cost.cluster_arrays import ClusterArrays, cluster_arrays
from atlas.evaluate import Result
from atlas.planner.candidate import Candidate, Group
from atlas.planner.judge import Judged, figures_of
from atlas.planner.space import space_of


def judged_result(result: Result, cluster: ClusterArrays | None = None) -> Judged:
    """The result as the planner would have it."""
    case, row = result.case, result.row()
    job = case.job
    cluster = cluster_arrays(job) if cluster is None else cluster
    group = Group.arranged(job, case.arrangement)
    candidate = Candidate(job.tp, job.microbatch, (group,), result.single.program.sharing)
    space = space_of(job, global_batch=group.replicas * job.num_microbatches * job.microbatch)
    path = row["critical_path_s"]
    parts_s = {part: path[part] for part in ("compute", "sync", "wait")}
    parts_s["wan"] = path["wire"] + path["latency"] + path["queue"]
    figures = figures_of(
        space,
        cluster,
        candidate,
        case.arrangement.model.gradient_bytes,
        parts_s=parts_s,
        **{key: row[key] for key in ("iteration_s", "peak_gib", "memory_gib")},
    )
    return Judged(candidate, figures)
