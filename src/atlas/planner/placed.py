"""A simulated job with the figures of a plan: its dollars, its traffic between datacenters, its place on the map.

For a job that is placed already. Searches nothing and simulates nothing.
"""

from __future__ import annotations

import itertools

from atlas.cost.cluster_arrays import ClusterArrays, cluster_arrays
from atlas.evaluate import Result
from atlas.planner.candidate import Candidate, Group
from atlas.planner.judge import Figures, Judged, wan_traffic
from atlas.planner.space import space_of


def judged_result(result: Result, cluster: ClusterArrays | None = None) -> Judged:
    """The result as the planner would have it."""
    case, row = result.case, result.row()
    job = case.job
    cluster = cluster_arrays(job) if cluster is None else cluster
    places = tuple((name, len(list(run))) for name, run in itertools.groupby(case.layout.rank_dc))
    pipelines = case.layout.num_pipelines
    group = Group(places, case.arrangement.layers_per_stage, job.cells, pipelines, job.num_microbatches)
    candidate = Candidate(job.tp, job.microbatch, (group,), result.single.program.sharing)
    space = space_of(job, global_batch=group.replicas * job.num_microbatches * job.microbatch)
    egress, link_bytes = wan_traffic(space, cluster, case.arrangement.model.gradient_bytes, candidate)
    price_s = dict(zip(cluster.names, cluster.usd_per_gpu_s.tolist(), strict=True))
    rent = row["iteration_s"] * sum(gpus * price_s[name] for name, gpus in candidate.gpus.items())
    path = row["critical_path_s"]
    parts_s = {part: path[part] for part in ("compute", "sync", "wait")}
    parts_s["wan"] = path["wire"] + path["latency"] + path["queue"]
    figures = Figures(
        iteration_s=row["iteration_s"],
        tokens_per_s=row["tokens_per_s"] or 0.0,
        usd_per_iteration=rent + egress,
        rent_usd=rent,
        egress_usd=egress,
        wan_bytes=sum(link_bytes.values()),
        num_gpus=row["num_gpus"],
        tokens=space.tokens,
        parts_s=parts_s,
        link_bytes=link_bytes,
        peak_gib=row["peak_gib"],
        memory_gib=row["memory_gib"],
    )
    return Judged(candidate, figures)
