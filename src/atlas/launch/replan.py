"""The same job on what is left when datacenters are lost: the same model, microbatch and global batch, so that training
goes on as it was, only slower. The planner chooses where; only what the runtime can execute is taken.

Knows jobs and the planner. What is resumed, and who is asked first, others know.
"""

from __future__ import annotations

from collections.abc import Collection

from atlas.cost.arrange import num_workers
from atlas.errors import AtlasError, InfeasibleError
from atlas.evaluate.job import find_schedule, prepare
from atlas.planner.run import make_plan
from atlas.planner.runnable import runnable
from atlas.planner.space import batch_of
from atlas.spec import Job

KEPT = ("tp", "microbatch")
"""What must not change for the state of training to mean the same, or for its workers to be the same."""


def replan(job: Job, lost: Collection[str], schedule: str = "1f1b") -> Job:
    """A job that trains on the same batches without these datacenters; AtlasError where nothing is left that could."""
    left = _without(job, lost)
    batch = batch_of(job)
    try:
        planned = make_plan(left, keep=KEPT, global_batch=batch, tries=0)
    except InfeasibleError as error:
        raise AtlasError(f"without {', '.join(lost)} nothing is left that could train {job.name}: {error}") from None
    for judged in (planned.winner, *planned.rivals):
        candidate = judged.candidate
        is_whole = candidate.slots == planned.space.slots(candidate.microbatch)
        if is_whole and runnable(candidate) == "yes":
            return candidate.job(left, 0)
    return _one_pipeline(left, batch, schedule)


def _without(job: Job, lost: Collection[str]) -> Job:
    """With every choice of place open again."""
    cluster = job.cluster
    datacenters = tuple(dc for dc in cluster.datacenters if dc.name not in lost)
    if not datacenters:
        raise AtlasError(f"without {', '.join(lost)} no datacenter is left. Start again when one is back")
    links = cluster.links
    if links is not None:
        links = tuple(link for link in links if not set(link.between) & set(lost))
    smaller = cluster.model_copy(update={"datacenters": datacenters, "links": links})
    open_choices = dict.fromkeys(("placement", "layers_per_stage"))
    return job.model_copy(update={"cluster": smaller, **open_choices})


def _one_pipeline(job: Job, batch: int, schedule: str) -> Job:
    """What always runs, where the planner's own choices are beyond the runtime: one pipeline, as deep as it may be."""
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
    raise AtlasError(f"the rest of the datacenters cannot train {job.name} in one pipeline: {problem}")
