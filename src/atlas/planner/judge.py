"""A candidate simulated event by event: the figure that is reported, and where its time and money go.

Each group of pipelines is simulated as one DP-cell under `schedules.eager`, by the reference engine (no compilation).
Long runs are simulated until they are steady and extrapolated from there: approximately in a search, exactly where
asked. A stage's all-reduce begins when its last pipeline in any group has finished; groups in different regions then
sum gradients over the WAN (`group_sums`). Knows no other candidate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np

from atlas.cost.arrange import Arrangement, arrange
from atlas.cost.cluster_arrays import GIB, ClusterArrays, Floats
from atlas.cost.memory import memory_rule, peak_memory, worker_memory
from atlas.cost.price import can_share, layout_of, price, sync_s
from atlas.cost.table import Costs
from atlas.errors import InfeasibleError
from atlas.ir.analysis import critical_path, path_totals_ns
from atlas.ir.assemble import with_optimizer
from atlas.ir.program import Kind, Layout, Program
from atlas.ir.timeline import Timeline
from atlas.planner.candidate import Candidate
from atlas.planner.group_sums import group_sum_s, group_sum_usd, started_s
from atlas.planner.space import Space
from atlas.schedules.eager import ahead_of, eager
from atlas.sim import simulate
from atlas.sim.extrapolate import extrapolate
from atlas.spec import Job
from atlas.spec.job import MAX_MICROBATCHES

TERA = 1e12
"""Tokens of the price of training that is reported."""
MANY_EVENTS = 25_000
"""Longer runs are simulated up to this many events and extrapolated with their steady period; the winner is simulated
exactly."""

EXACT_EVENTS = 1_000_000
"""If an exact figure is asked for, a run that never becomes periodic is simulated in full up to this many events."""


@dataclass(frozen=True)
class PlanFigures:
    """What a candidate brings and costs. Seconds are simulated."""

    iteration_s: float
    tokens_per_s: float
    usd_per_iteration: float
    """Rent and egress."""
    rent_usd: float
    egress_usd: float
    wan_bytes: float
    num_gpus: int
    tokens: int
    parts_s: dict[str, float]
    """Of the critical path: compute, wan (wire, latency, queues), sync, step, wait."""
    link_bytes: dict[tuple[str, str], float] = field(repr=False)
    """Per iteration, by direction between two datacenters."""
    peak_gib: float
    memory_gib: float

    @property
    def usd_per_hour(self) -> float:
        return self.usd_per_iteration / self.iteration_s * 3600

    @property
    def usd_per_tera_token(self) -> float:
        return self.usd_per_iteration / self.tokens * TERA


@dataclass(frozen=True, eq=False)
class SimulatedCandidate:
    """A candidate with its figures."""

    candidate: Candidate
    figures: PlanFigures


@dataclass(frozen=True, eq=False)
class SimulatedGroup:
    """One group, simulated."""

    job: Job
    arrangement: Arrangement
    costs: Costs
    timeline: Timeline
    done_s: Floats
    """[s]: when the last pipeline has finished its last backward."""
    closing_s: Floats
    """[2, s]: all-reduce inside the datacenter, optimizer."""


def judge(space: Space, cluster: ClusterArrays, candidate: Candidate, *, exact: bool = False) -> SimulatedCandidate:
    """Simulate a candidate; InfeasibleError if it cannot run. `exact`: long runs too, where feasible."""
    require_runnable(space, cluster, candidate)
    groups = [simulate_group(candidate.job(space.job, k), candidate, exact=exact) for k in range(len(candidate.groups))]
    return judged_groups(space, cluster, candidate, groups)


def require_runnable(space: Space, cluster: ClusterArrays, candidate: Candidate) -> None:
    """Raise InfeasibleError without GPUs for every stage, or with more microbatches than a job may have."""
    require_gpus(space.job, cluster, candidate)
    _require_allowed_microbatches(space.job, candidate)


def judged_groups(
    space: Space, cluster: ClusterArrays, candidate: Candidate, groups: Sequence[SimulatedGroup]
) -> SimulatedCandidate:
    """The figures of a candidate whose groups are simulated; InfeasibleError if the groups have no path to each
    other."""
    between_s = group_sum_s(cluster, groups[0].arrangement.model.gradient_bytes, candidate)
    if between_s is None:
        raise InfeasibleError(
            where=space.job.where,
            key="cluster.links",
            value=None,
            rule=f"gradients of {candidate.where()} have no path between two of the groups",
            remedy="Add the link, or keep data parallelism inside a region",
        )
    start_s = started_s(candidate, [group.done_s for group in groups])
    ends = [
        start + group.closing_s.sum(axis=0) + between
        for start, group, between in zip(start_s, groups, between_s, strict=True)
    ]
    k = int(np.argmax([end.max() for end in ends]))
    last = int(np.argmax(ends[k]))
    slowest = max(groups, key=lambda group: float(group.done_s.max()))
    parts_s = _parts(slowest, float(start_s[k][last]))
    parts_s["sync"] = float(groups[k].closing_s[0, last] + between_s[k][last])
    parts_s["step"] = float(groups[k].closing_s[1, last])
    programs = [(group.job, group.timeline.program, worker_memory(group.job, group.arrangement)) for group in groups]
    needs = [need for job, program, workers in programs for need in peak_memory(job, program, workers)]
    worker, need = min(needs, key=lambda one: one[0].cap - one[1])
    figures = figures_of(
        space,
        cluster,
        candidate,
        groups[0].arrangement.model.gradient_bytes,
        iteration_s=float(ends[k][last]),
        parts_s=parts_s,
        peak_gib=need / GIB,
        memory_gib=worker.cap / GIB,
    )
    return SimulatedCandidate(candidate, figures)


def timed(judged: SimulatedCandidate, iteration_s: float) -> SimulatedCandidate:
    """The same plan with another iteration time, such as that of a searched order."""
    old = judged.figures
    ratio = iteration_s / old.iteration_s
    new = replace(
        old,
        iteration_s=iteration_s,
        tokens_per_s=old.tokens / iteration_s,
        rent_usd=ratio * old.rent_usd,
        usd_per_iteration=ratio * old.rent_usd + old.egress_usd,
        parts_s={part: ratio * spent_s for part, spent_s in old.parts_s.items()},
    )
    return SimulatedCandidate(judged.candidate, new)


def simulate_group(job: Job, candidate: Candidate, *, exact: bool = False) -> SimulatedGroup:
    """One group's cell, simulated up to its last backward."""
    arrangement = arrange(job)
    memory = memory_rule(job, arrangement=arrangement)
    layout = layout_of(job, arrangement=arrangement)
    sharing = candidate.sharing and can_share(job, layout)
    costs = price(job, tcp=candidate.tcp, sharing=sharing, arrangement=arrangement)

    def program_of(num_microbatches: int) -> Program:
        part = replace(layout, num_microbatches=num_microbatches)
        return eager(part, costs, memory, recompute=job.recompute, sharing=sharing)

    few = enough(layout, ahead_of(costs, job.recompute)[0])
    left = job.num_microbatches - few
    found = None
    if left and exact:
        found = extrapolate(program_of, costs, job.num_microbatches, in_full=EXACT_EVENTS // _per_microbatch(layout))
    if found is not None:
        timeline, later_s = found.timeline, found.later_ns / 1e9
    else:
        timeline = simulate(program_of(few), costs)
        later_s = left * period_s(timeline) if left else 0.0
    sync = np.array([sync_s(job, arrangement, rank) for rank in range(job.pp)])
    done = done_s(timeline)
    if costs.circuits is not None:  # they change around the gradient sums, which end an iteration
        whole = simulate(with_optimizer(timeline.program), costs)
        done, sync = done_s(whole), sync + circuit_waits_s(whole)
    step = [time.update_s for time in arrangement.stage_times]
    return SimulatedGroup(job, arrangement, costs, timeline, done + later_s, np.array([sync, step]))


def done_s(timeline: Timeline) -> Floats:
    """[s]: when the last pipeline has finished its last backward."""
    program = timeline.program
    work = program.kind <= Kind.W
    done = np.zeros(program.num_ranks, np.int64)
    np.maximum.at(done, program.op_worker[work] % program.num_ranks, timeline.op_end_ns[work])
    return done / 1e9


def circuit_waits_s(timeline: Timeline) -> Floats:
    """[s]: how long the gradient all-reduce of each stage waited for its circuits."""
    program = timeline.program
    sync = program.kind == Kind.SYNC
    start = np.zeros(program.num_ranks, np.int64)
    np.maximum.at(start, program.op_worker[sync] % program.num_ranks, timeline.op_start_ns[sync])
    return np.maximum(0.0, start / 1e9 - done_s(timeline))


def enough(layout: Layout, ahead: int) -> int:
    """Microbatches to simulate: all of them, or in a long run enough to contain the steady period several times."""
    return min(layout.num_microbatches, max(4 * (ahead + 2), MANY_EVENTS // _per_microbatch(layout)))


def _per_microbatch(layout: Layout) -> int:
    """Events."""
    return replace(layout, num_microbatches=1).about_events(split=False)


def period_s(timeline: Timeline) -> float:
    """Seconds from microbatch to microbatch in the steady part: after a third of them, before forwards run out."""
    program = timeline.program
    backward = program.op_index[Kind.B][:, 0, :]
    ends = timeline.op_end_ns[backward].max(axis=0) / 1e9
    last = max(1, program.num_microbatches - program.peak_in_flight - 1)
    first = min(program.num_microbatches // 3, last - 1)
    return float(ends[last] - ends[first]) / (last - first)


def require_gpus(job: Job, cluster: ClusterArrays, candidate: Candidate) -> None:
    """Raise InfeasibleError if a datacenter has too few GPUs for its tensor-parallel groups."""
    workers = dict(zip(cluster.names, cluster.workers(candidate.tp).tolist(), strict=True))
    for name, gpus in candidate.gpus.items():
        if gpus > workers[name] * candidate.tp:
            raise InfeasibleError(
                where=job.where,
                key=f"cluster.datacenters.{name}.nodes",
                value=None,
                rule=f"{candidate.where()} needs {gpus} GPUs there, it has {workers[name] * candidate.tp} in groups of "
                f"{candidate.tp}",
                remedy="Use fewer replicas or stages",
            )


def _require_allowed_microbatches(job: Job, candidate: Candidate) -> None:
    """No pipeline has more microbatches than a job file allows."""
    most = max(group.num_microbatches for group in candidate.groups)
    if most > MAX_MICROBATCHES:
        raise InfeasibleError(
            where=job.where,
            key="num_microbatches",
            value=most,
            rule=f"{candidate.where()} ({candidate.how()}) would have more than {MAX_MICROBATCHES:,} in one iteration",
            remedy="Lower the global batch, or add GPUs",
        )


def _parts(group: SimulatedGroup, until_s: float) -> dict[str, float]:
    """Where the time until the last backward went."""
    totals = path_totals_ns(critical_path(group.timeline))
    if bool((group.timeline.program.kind == Kind.STEP).any()):  # its all-reduce and optimizer are counted apart
        totals["compute"] = max(0, totals["compute"] - round(1e9 * float(group.closing_s.sum(axis=0).max())))
    parts = {"compute": totals["compute"] / 1e9, "wait": totals["wait"] / 1e9}
    parts["wan"] = (totals["wire"] + totals["latency"] + totals["queue"]) / 1e9
    # If only a part was simulated, the rest is extrapolated from it.
    return {part: spent * until_s / max(sum(parts.values()), 1e-12) for part, spent in parts.items()}


def figures_of(
    space: Space,
    cluster: ClusterArrays,
    candidate: Candidate,
    piece_bytes: Floats,
    *,
    iteration_s: float,
    parts_s: dict[str, float],
    peak_gib: float,
    memory_gib: float,
) -> PlanFigures:
    """With dollars and traffic added. `piece_bytes`: the gradient of each piece of the model."""
    rent = iteration_s * rent_usd_per_s(cluster, candidate)
    egress, link_bytes = wan_traffic(space, cluster, piece_bytes, candidate)
    return PlanFigures(
        iteration_s=iteration_s,
        tokens_per_s=space.tokens / iteration_s,
        usd_per_iteration=rent + egress,
        rent_usd=rent,
        egress_usd=egress,
        wan_bytes=sum(link_bytes.values()),
        num_gpus=candidate.num_gpus,
        tokens=space.tokens,
        parts_s=parts_s,
        link_bytes=link_bytes,
        peak_gib=peak_gib,
        memory_gib=memory_gib,
    )


def rent_usd_per_s(cluster: ClusterArrays, candidate: Candidate) -> float:
    """Of all GPUs that a candidate uses."""
    return sum(gpus * float(cluster.usd_per_gpu_s[cluster.index[name]]) for name, gpus in candidate.gpus.items())


def wan_traffic(
    space: Space, cluster: ClusterArrays, piece_bytes: Floats, candidate: Candidate
) -> tuple[float, dict[tuple[str, str], float]]:
    """(dollars, bytes by direction between two datacenters) of one iteration: activations and gradients of every
    microbatch, the sum between groups, and the two ends of a tied embedding."""
    at = cluster.index
    usd, sent = group_sum_usd(cluster, piece_bytes, candidate)
    model, job = space.job.model, space.job
    activation = candidate.microbatch * model.seq_len * model.hidden * job.element_bytes
    total, used = space.total_microbatches(candidate.microbatch), candidate.slots
    for group in candidate.groups:
        own = group.replicas * group.num_microbatches * total / used
        for (a, _), (b, _) in pairwise(group.places):
            for pair in ((a, b), (b, a)):
                n = own * activation + job.tied_bytes
                sent[pair] = sent.get(pair, 0.0) + n
                usd += n * float(cluster.usd_per_byte[at[pair[0]], at[pair[1]]])
    return usd, sent


def as_dict(judged: SimulatedCandidate) -> dict[str, Any]:
    """JSON-able figures."""
    figures = judged.figures
    return {
        "where": judged.candidate.where(),
        "how": judged.candidate.how(),
        "sharing": judged.candidate.sharing,
        "iteration_s": figures.iteration_s,
        "tokens_per_s": figures.tokens_per_s,
        "usd_per_iteration": figures.usd_per_iteration,
        "usd_per_hour": figures.usd_per_hour,
        "usd_per_tera_token": figures.usd_per_tera_token,
        "egress_usd_per_iteration": figures.egress_usd,
        "wan_gb_per_iteration": figures.wan_bytes / 1e9,
        "num_gpus": figures.num_gpus,
        "gpus": dict(judged.candidate.gpus),
        "parts_s": figures.parts_s,
        "peak_gib": figures.peak_gib,
        "memory_gib": figures.memory_gib,
    }
