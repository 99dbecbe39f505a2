"""From what a search found to a Plan file, and back to a candidate.

Knows both shapes; reading and writing the file itself is `spec.plan`.
"""

from __future__ import annotations

import numpy as np

from atlas import __version__
from atlas.cost.model_arrays import model_arrays
from atlas.planner.candidate import Candidate, Group
from atlas.planner.group_sums import group_sum_s
from atlas.planner.run import SearchResult
from atlas.planner.space import Space, space_of
from atlas.spec import Job
from atlas.spec.job import Place
from atlas.spec.plan import (
    VERSION,
    Origin,
    Plan,
    PlanGroup,
    PlanSchedule,
    Predicted,
    group_jobs,
    require_group_shape,
)


def plan_of(planned: SearchResult) -> Plan:
    """The Plan of a search's winner."""
    candidate, figures = planned.winner.candidate, planned.winner.figures
    job = candidate.job(planned.job, 0 if planned.simulation is None else planned.simulation.slowest)
    groups = tuple(_group(group) for group in candidate.groups)
    if len(groups) > 1:
        job._groups = group_jobs(job, groups)
    return Plan(
        plan=VERSION,
        job=job,
        groups=groups,
        schedule=PlanSchedule(
            name=planned.schedule,
            tcp=candidate.tcp,
            sharing=candidate.sharing if planned.simulation is None else planned.simulation.sharing,
            tries=planned.tries,
            seed=planned.seed,
        ),
        predicted=Predicted(
            iteration_s=_short(figures.iteration_s),
            tokens_per_s=_short(figures.tokens_per_s),
            tokens_per_iteration=figures.tokens,
            empty_slots=candidate.slots - planned.space.total_microbatches(candidate.microbatch),
            num_gpus=figures.num_gpus,
            usd_per_iteration=_short(figures.usd_per_iteration),
            usd_per_hour=_short(figures.usd_per_hour),
            usd_per_trillion_tokens=_short(figures.usd_per_tera_token),
            egress_usd_per_iteration=_short(figures.egress_usd),
            wan_gb_per_iteration=_short(figures.wan_bytes / 1e9),
            peak_gib=_short(figures.peak_gib),
            memory_gib=_short(figures.memory_gib),
            between_groups_s=_short(_between_s(planned)),
        ),
        origin=Origin(
            job=planned.job.where,
            strategy=planned.strategy,
            objective=planned.objective.words(),
            estimated=planned.num_estimated,
            simulated=planned.num_simulated,
            interrupted=planned.interrupted,
            atlas=__version__,
        ),
        runnable=_runnable(planned.job),
    )


def _runnable(job: Job) -> str:
    """Whether `atlas train` executes the plan: it does, unless another framework is meant to."""
    return "yes" if job.runtime == "atlas" else f"no, because runtime {job.runtime} executes this job"


def _between_s(planned: SearchResult) -> float:
    candidate = planned.winner.candidate
    model = model_arrays(candidate.job(planned.job), planned.cluster)
    found = group_sum_s(planned.cluster, model.gradient_bytes, candidate)
    return max((float(np.max(one)) for one in found or ()), default=0.0)


def _group(group: Group) -> PlanGroup:
    return PlanGroup(
        placement=tuple(Place(dc=name, stages=stages) for name, stages in group.places),
        layers_per_stage=group.layers_per_stage,
        cells=group.cells,
        pipelines_per_cell=group.pipelines_per_cell,
        num_microbatches=group.num_microbatches,
    )


def _short(value: float) -> float:
    """Ten digits: enough for any comparison, and the same text on every machine."""
    return float(f"{value:.10g}")


def candidate_of(plan: Plan) -> Candidate:
    """The candidate that a Plan file describes."""
    groups = tuple(map(Group.placed, plan.groups))
    return Candidate(plan.job.tp, plan.job.microbatch, groups, plan.schedule.sharing, plan.schedule.tcp)


def space_of_plan(plan: Plan) -> Space:
    """The search space that the plan's own global batch spans."""
    candidate = candidate_of(plan)
    sequences = (candidate.slots - plan.predicted.empty_slots) * candidate.microbatch
    return space_of(plan.job, global_batch=sequences, tcp=plan.schedule.tcp)


def several_groups_of(job: Job, plan: Plan | None) -> Candidate | None:
    """The candidate of a plan with several groups of pipelines, or of the job that such a plan has; None otherwise."""
    if plan is not None:
        return candidate_of(plan) if len(plan.groups) > 1 else None
    if not job.groups:
        return None
    require_group_shape(job)
    return Candidate(job.tp, job.microbatch, tuple(map(Group.placed, job.groups)))
