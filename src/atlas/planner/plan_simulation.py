"""A plan simulated in full: every group of pipelines under one schedule, then the sum between groups; and the figures
of a plan for a job that is placed and simulated already.

Both the figure in a Plan file and those of `atlas simulate PLAN` come from here. It does not search plans; the
schedule may be a searched one.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from atlas.cost.cluster_arrays import ClusterArrays, cluster_arrays
from atlas.cost.price import Tcp
from atlas.cost.table import Costs
from atlas.errors import SpecError
from atlas.evaluate import Case, Result, evaluate, find_schedule, prepare
from atlas.ir.program import Kind
from atlas.planner.candidate import Candidate, Group
from atlas.planner.group_sums import group_sum_s, started_s
from atlas.planner.judge import SimulatedCandidate, SimulatedGroup, circuit_waits_s, done_s, figures_of
from atlas.planner.space import space_of
from atlas.spec import Job


@dataclass(frozen=True, eq=False)
class PlanSimulation:
    """All groups of a plan, simulated together."""

    iteration_s: float
    results: tuple[Result, ...]
    """By group."""
    groups: tuple[SimulatedGroup, ...]
    slowest: int
    """The group that is done last: what a Plan calls its job."""

    @property
    def sharing(self) -> bool:
        """Whether any group's pipelines may take turns."""
        return any(result.case.price_turns is not None for result in self.results)

    @property
    def meta(self) -> dict[str, Any]:
        """What a timeline of the slowest group has to say of all groups."""
        return {"all_groups_s": self.iteration_s, "group": self.slowest + 1, "num_groups": len(self.results)}

    def row(self) -> dict[str, Any]:
        """What the row of the slowest group lacks: the time of all groups, and the memory of the tightest one."""
        rows = [result.row() for result in self.results]
        tightest = min(rows, key=lambda row: row["memory_gib"] - row["peak_gib"])
        return {**self.meta, **{key: tightest[key] for key in ("fits", "peak_gib", "memory_gib")}}


def simulate_plan(
    job: Job,
    cluster: ClusterArrays,
    candidate: Candidate,
    schedule: str,
    *,
    sharing: bool = True,
    as_stated: bool = False,
    **options: Any,
) -> PlanSimulation:
    """The candidate under a schedule; InfeasibleError where it is too long to be simulated in full. `as_stated`: it is
    the job itself, and the schedule may choose the stages of a worker where the job leaves them open. `options` are
    those of `evaluate`."""
    if len(candidate.groups) > 1 and find_schedule(schedule).virtual_stages:
        raise SpecError(
            where=job.where,
            key="groups",
            value=len(candidate.groups),
            rule=f"groups of pipelines that are placed differently need one stage on each worker, not {schedule}",
            remedy="Choose a schedule that does not interleave",
        )
    stated = {key: getattr(job, key) for key in ("interleave", "layers_per_stage")} if as_stated else {}
    chosen = find_schedule(schedule)
    results: list[Result] = []
    known: dict[tuple[Any, ...], Result] = {}
    for k in range(len(candidate.groups)):
        one = candidate.job(job, k).model_copy(update=stated)
        key = _priced(prepare(one, chosen, candidate.tcp, sharing=sharing and chosen.shares))
        if key not in known:  # equal groups are simulated once
            known[key] = evaluate(one, schedule, tcp=candidate.tcp, sharing=sharing, **options)
        results.append(known[key])
    return _together(cluster, candidate, tuple(results))


def slowest_group(
    wholes: list[PlanSimulation],
    cluster: ClusterArrays,
    candidate: Candidate,
    job: Job,
    schedule: str,
    *,
    tcp: Tcp,
    known: object = None,
    **options: Any,
) -> Result:
    """Simulate all groups, append them to `wholes`, and return the slowest one. Its timelines have the time of all.
    `known`, the prepared cases of one job, is of no use here."""
    whole = simulate_plan(job, cluster, replace(candidate, tcp=tcp), schedule, **options)
    wholes.append(whole)
    found = whole.results[whole.slowest]
    for timeline in (found.timeline, found.single):
        timeline.meta.update(whole.meta)
    return found


def _priced(case: Case) -> tuple[Any, ...]:
    """All that a simulation depends on; the names of datacenters and links are left out."""
    layout = case.layout
    crosses = tuple(a != b for a, b in zip(layout.rank_dc[:-1], layout.rank_dc[1:], strict=True))
    shape = (layout.num_pipelines, layout.num_stages, layout.num_microbatches, layout.stage_rank, crosses)
    return (shape, _prices(case.apart), case.turns and _prices(case.turns), case.memory, case.job.recompute)


def _prices(costs: Costs) -> tuple[Any, ...]:
    """Every field of the costs, so that a field added later is included."""
    links = tuple(replace(link, name="") for link in costs.links)
    rest = [getattr(costs, field.name) for field in fields(costs) if field.name != "links"]
    return (links, *(value.tobytes() if isinstance(value, np.ndarray) else value for value in rest))


def _together(cluster: ClusterArrays, candidate: Candidate, results: tuple[Result, ...]) -> PlanSimulation:
    """The iteration of all groups, and which of them is last: as `judge` has it, with each group's own order."""
    groups = tuple(_simulated(result) for result in results)
    between = group_sum_s(cluster, groups[0].arrangement.model.gradient_bytes, candidate)
    assert between is not None, "the search let it pass"
    starts = started_s(candidate, [group.done_s for group in groups])
    total = [float((s + g.closing_s.sum(axis=0) + b).max()) for s, g, b in zip(starts, groups, between, strict=True)]
    return PlanSimulation(max(total), results, groups, int(np.argmax([group.done_s.max() for group in groups])))


def _simulated(result: Result) -> SimulatedGroup:
    timeline, case = result.single, result.case
    ranks = slice(case.layout.num_ranks)
    closing_s = case.apart.compute_ns[0, ranks, [Kind.SYNC, Kind.STEP]] / 1e9
    if result.costs.circuits is not None:
        closing_s[0] += circuit_waits_s(timeline)
    return SimulatedGroup(case.job, case.arrangement, result.costs, timeline, done_s(timeline), closing_s)


def judged_result(result: Result, cluster: ClusterArrays | None = None) -> SimulatedCandidate:
    """A simulated job as a candidate, with the figures of a plan: dollars, and traffic between datacenters."""
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
    return SimulatedCandidate(candidate, figures)
