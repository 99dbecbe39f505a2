"""What is trained on the hosts that are there: a function of the plan and of the lost places, so that losing a host and
getting it back are one operation.

    all there                the plan
    else fewer pipelines     as many as the hosts can hold; the same global batch, so more microbatches in each
    else replan              what the planner finds on the remaining hosts
    else without             the datacenters that lost a host

Knows jobs and the planner. Does not know launchers or the user.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby

from atlas.cost.arrange import arrange
from atlas.errors import AtlasError
from atlas.launch.prepared_job import PreparedJob, prepare_job
from atlas.launch.replan import replan
from atlas.launch.train_options import TrainOptions
from atlas.spec import Job
from atlas.spec.job import Place as PlacedStages

HostPlace = tuple[str, int]
"""Datacenter and number of a host."""


@dataclass(frozen=True)
class RemainingPlan:
    """What is trained without some hosts."""

    prepared: PreparedJob
    lost: frozenset[HostPlace]
    """Places that the run does without: of whole datacenters, where one is left out."""
    what: str
    """One clause for the user."""
    asks: bool
    """Whether the user must agree: the plan is another one."""


def trained_on(
    full: PreparedJob, num_hosts: Mapping[str, int], lost: frozenset[HostPlace], options: TrainOptions
) -> RemainingPlan:
    """`num_hosts`: by datacenter, lost ones included. Raises AtlasError if the remaining hosts cannot train it."""
    left = {dc: count - sum(place[0] == dc for place in lost) for dc, count in num_hosts.items()}
    if not lost:
        return RemainingPlan(full, lost, "all hosts are connected", False)
    fewer = None if full.groups else _fewer_pipelines(full, num_hosts, left, options)
    if fewer is not None:
        return RemainingPlan(fewer, lost, _pipelines_in_words(full, fewer), False)
    gone = {dc for dc, count in left.items() if count == 0}
    affected = {dc for dc, _ in lost}
    if affected > gone:
        nodes = {
            dc.name: dc.nodes * left[dc.name] // num_hosts[dc.name]
            for dc in full.job.cluster.datacenters
            if dc.name in affected - gone
        }
        try:
            job = replan(full.job, gone, options.schedule, nodes, full.global_batch)
            return _replanned(full, job, lost, "On the remaining hosts", options)
        except AtlasError:
            pass  # without all hosts of these datacenters, then
    everything = frozenset((dc, part) for dc in affected for part in range(num_hosts[dc]))
    job = replan(full.job, sorted(affected), options.schedule, batch=full.global_batch)
    return _replanned(full, job, lost | everything, "On the remaining datacenters", options)


def _replanned(
    full: PreparedJob, job: Job, lost: frozenset[HostPlace], where: str, options: TrainOptions
) -> RemainingPlan:
    new = prepare_job(job, options, full)
    counts = ", ".join(f"{new.program.rank_dc.count(dc)} in {dc}" for dc in new.datacenters)
    return RemainingPlan(new, lost, f"{where}: {new.program.num_ranks} stages ({counts})", True)


def _fewer_pipelines(
    full: PreparedJob, num_hosts: Mapping[str, int], left: Mapping[str, int], options: TrainOptions
) -> PreparedJob | None:
    """The same stages in fewer pipelines, or the plan itself if it fits; None if not one pipeline fits. A host holds as
    many workers as the plan gives it."""
    found, job = arrange(full.job), full.job
    num_pipelines = found.num_pipelines * job.cells
    room = num_pipelines
    for dc in full.datacenters:
        per_pipeline = found.rank_dc.count(dc)
        per_host = -(-per_pipeline * num_pipelines // num_hosts[dc])
        room = min(room, per_host * left[dc] // per_pipeline)
    if room >= num_pipelines:
        return full
    runs = [(dc, len(list(group))) for dc, group in groupby(found.rank_dc)]
    fixed = {
        "placement": tuple(PlacedStages(dc=dc, stages=stages) for dc, stages in runs),
        "layers_per_stage": found.layers_per_stage,
    }
    total = num_pipelines * job.num_microbatches
    for cells, per_cell in _counts(job.cells, found.num_pipelines, room, total):
        counts = {"cells": cells, "pipelines_per_cell": per_cell, "num_microbatches": total // (cells * per_cell)}
        try:
            return prepare_job(job.model_copy(update={**fixed, **counts}), options, full)
        except AtlasError:
            continue  # more microbatches in flight than memory holds
    return None


def _counts(cells: int, per_cell: int, room: int, total: int) -> Iterator[tuple[int, int]]:
    """Cells and pipelines of each, that divide the microbatches: most pipelines first, then the largest cells."""
    shapes = [(d, c) for d in range(1, cells + 1) for c in range(1, per_cell + 1) if d * c <= room]
    fitting = [(d, c) for d, c in shapes if total % (d * c) == 0]
    return iter(sorted(fitting, key=lambda shape: (-shape[0] * shape[1], -shape[1])))


def _pipelines_in_words(full: PreparedJob, fewer: PreparedJob) -> str:
    before, now = (job.job.cells * job.program.num_pipelines for job in (full, fewer))
    if now == before:
        return "The other hosts have room for its workers"
    each = f"{now} of {before} pipelines continue" if now > 1 else f"1 of {before} pipelines continues"
    return f"{each}, with {fewer.program.num_microbatches} microbatches in place of {full.program.num_microbatches}"
