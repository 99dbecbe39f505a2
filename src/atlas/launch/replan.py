"""Replans a job when datacenters are lost: the same model, microbatch and global batch on the remaining ones, so that
training continues unchanged but slower. The planner chooses; only plans that the runtime can execute count.

Knows jobs and the planner. Does not know checkpoints or the user.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from atlas.cost.arrange import num_workers
from atlas.errors import AtlasError, InfeasibleError
from atlas.evaluate import find_schedule, prepare
from atlas.planner.run import make_plan
from atlas.planner.space import batch_of
from atlas.spec import Job

KEPT = ("tp", "microbatch")
"""Fields that must not change: the training state and its workers depend on them."""


def replan(
    job: Job,
    lost: Collection[str],
    schedule: str = "1f1b",
    nodes: Mapping[str, int] | None = None,
    batch: int | None = None,
) -> Job:
    """A job that trains on the same batches without these datacenters; raises AtlasError if none is possible. `nodes`:
    by datacenter, where some are lost; `batch`: sequences of a step, if not those of the job alone."""
    left = _without(job, lost, nodes or {})
    batch = batch_of(job) if batch is None else batch
    try:
        planned = make_plan(left, keep=KEPT, global_batch=batch, tries=0)
    except InfeasibleError as error:
        raise AtlasError(
            f"without {', '.join(lost)} the remaining datacenters cannot train {job.name}: {error}"
        ) from None
    for judged in (planned.winner, *planned.rivals):
        candidate = judged.candidate
        is_whole = candidate.slots == planned.space.total_microbatches(candidate.microbatch)
        if is_whole and len(candidate.groups) == 1:
            return candidate.job(left, 0)
    return _one_pipeline(left, batch, schedule)


def _without(job: Job, lost: Collection[str], nodes: Mapping[str, int]) -> Job:
    """The job without these datacenters, and without its placement."""
    cluster = job.cluster
    lost = {*lost, *(name for name, count in nodes.items() if count == 0)}
    datacenters = tuple(
        dc.model_copy(update={"nodes": nodes.get(dc.name, dc.nodes)})
        for dc in cluster.datacenters
        if dc.name not in lost
    )
    if not datacenters:
        raise AtlasError(f"without {', '.join(lost)} no datacenter is left. Start again when one is back")
    links = cluster.links
    if links is not None:
        links = tuple(link for link in links if not set(link.between) & set(lost))
    smaller = cluster.model_copy(update={"datacenters": datacenters, "links": links})
    open_choices = dict.fromkeys(("placement", "layers_per_stage"))
    return job.alone(cluster=smaller, **open_choices)


def _one_pipeline(job: Job, batch: int, schedule: str) -> Job:
    """One pipeline, as deep as possible: for when the runtime cannot execute any of the planner's choices."""
    room = sum(num_workers(job, dc) for dc in job.cluster.datacenters)
    counts = {"cells": 1, "pipelines_per_cell": 1, "num_microbatches": batch // job.microbatch, "interleave": 1}
    problem: AtlasError | None = None
    for depth in range(min(job.pp, room, job.model.layers), 0, -1):
        one = job.model_copy(update={**counts, "pp": depth})
        try:
            prepare(one, find_schedule(schedule))
            return one
        except InfeasibleError as error:
            problem = problem or error
    raise AtlasError(f"the remaining datacenters cannot train {job.name} in one pipeline: {problem}")
