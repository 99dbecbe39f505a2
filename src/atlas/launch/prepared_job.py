"""A job made ready to run: its Program, its costs, the training, and which launcher runs which workers.

Prepared once, by the launcher that coordinates, and sent to the others; prepared again when a datacenter is lost.
Starts nothing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from atlas.cost.table import Costs
from atlas.errors import ProgramError
from atlas.evaluate import Case, build, find_schedule, prepare
from atlas.ir.program import Kind, Program
from atlas.launch.measured import with_norm
from atlas.launch.preflight import WorkerNeed, worker_needs
from atlas.launch.rendezvous import AgentName
from atlas.launch.train_options import TrainOptions, agreed, make_training
from atlas.planner.group_sums import group_waits
from atlas.planner.judge import done_s
from atlas.runtime.assignment import TrainingSetup
from atlas.runtime.group_sum_plan import group_links
from atlas.runtime.models.config import require_divisible
from atlas.runtime.topology import GroupShape, PeerLink, WorkerRole, all_roles, require_runnable
from atlas.sim import simulate
from atlas.spec import Job


@dataclass(frozen=True, eq=False)
class PreparedGroup:
    """Pipelines that are placed alike."""

    job: Job
    program: Program
    costs: Costs
    layers_per_stage: tuple[int, ...]
    waits_s: tuple[float, ...] = ()
    """By rank: from its last backward to the end of the sum with other groups, simulated."""
    norm_s: float = 0.0
    """The way of the global norm from the first group."""

    @property
    def predicted(self) -> Costs:
        """The costs with the waits for other groups: those of a simulation of this group alone."""
        if not self.waits_s:
            return self.costs
        compute_ns = self.costs.compute_ns.copy()
        compute_ns[:, :, Kind.SYNC] += np.array([round(1e9 * s) for s in self.waits_s], np.int64)
        compute_ns[:, :, Kind.NORM] += round(1e9 * self.norm_s)
        return replace(self.costs, compute_ns=compute_ns)

    def scaled(self, factor: int) -> PreparedGroup:
        waits_s = tuple(factor * s for s in self.waits_s)
        return replace(self, costs=self.costs.scaled(factor), waits_s=waits_s, norm_s=factor * self.norm_s)


def shapes_of(groups: Sequence[PreparedGroup]) -> tuple[GroupShape, ...]:
    found: list[GroupShape] = []
    for group in groups:
        program, first = group.program, found[-1].first_pipeline + found[-1].num_pipelines if found else 0
        count = program.num_pipelines * group.job.cells
        shape = GroupShape(first, count, program.num_microbatches, program.rank_dc, group.layers_per_stage)
        found.append(shape)
    return tuple(found)


def roles_of(groups: Sequence[PreparedGroup], shapes: tuple[GroupShape, ...]) -> list[WorkerRole]:
    """Of all workers. `shapes`: empty where pipelines are placed alike."""
    return [r for k, group in enumerate(groups) for r in all_roles(group.program, group.job.cells, shapes, k)]


def links_of(role: WorkerRole, training: TrainingSetup, tp: int) -> list[PeerLink]:
    """All that a worker opens."""
    config = training.model.config
    return [*role.links(tied=config.tied), *group_links(role, config, tp)]


def divided(training: TrainingSetup, group: PreparedGroup) -> TrainingSetup:
    """The training with its layers divided as in one group."""
    return replace(training, model=replace(training.model, layers_per_stage=group.layers_per_stage))


@dataclass(frozen=True, eq=False)
class PreparedJob:
    job: Job
    """Of the first group of pipelines, as program and costs are; it knows the others (`Job.groups`)."""
    program: Program
    costs: Costs
    training: TrainingSetup
    predicted_s: float
    """Simulated seconds of an iteration."""
    groups: tuple[PreparedGroup, ...] = ()
    """Where pipelines are placed differently: all groups, the first one included."""

    @property
    def parts(self) -> tuple[PreparedGroup, ...]:
        """All groups; where pipelines are placed alike, the one."""
        layers = self.training.model.layer_counts(self.program.num_stages)
        return self.groups or (PreparedGroup(self.job, self.program, self.costs, layers),)

    @cached_property
    def shapes(self) -> tuple[GroupShape, ...]:
        """Of all groups; empty where pipelines are placed alike."""
        return shapes_of(self.groups)

    @property
    def roles(self) -> list[WorkerRole]:
        return roles_of(self.parts, self.shapes)

    def training_of(self, group: int) -> TrainingSetup:
        """With the layers divided as in one group."""
        return divided(self.training, self.groups[group]) if self.groups else self.training

    def needs_of(self, roles: Sequence[WorkerRole], *, saves: bool) -> list[WorkerNeed]:
        """By worker: its memory."""
        found: dict[str, WorkerNeed] = {}
        for number, part in enumerate(self.parts):
            mine = [role for role in roles if role.group == number]
            stands_in = not self.training.model.layers_per_stage  # its activations are not the job's
            training = self.training if stands_in else self.training_of(number)
            needs = worker_needs(mine, part.job, training, saves=saves)
            found |= {role.name: need for role, need in zip(mine, needs, strict=True)}
        return [found[role.name] for role in roles]

    @property
    def global_batch(self) -> int:
        """Sequences of a step."""
        counts = [g.job.num_microbatches * g.program.num_pipelines * g.job.cells for g in self.parts]
        return self.job.microbatch * sum(counts)

    @property
    def datacenters(self) -> list[str]:
        """In the order of the pipeline, group by group."""
        return list(dict.fromkeys(dc for group in self.parts for dc in group.program.rank_dc))

    def links_of(self, role: WorkerRole) -> list[PeerLink]:
        return links_of(role, self.training, self.job.tp)

    @property
    def peers(self) -> list[tuple[str, str]]:
        """The names of workers that exchange messages."""
        roles = {role.node: role for role in self.roles}
        return [(role.name, roles[link.peer].name) for role in roles.values() for link in self.links_of(role)]

    def roles_of(self, agent: AgentName) -> list[WorkerRole]:
        """The workers that one launcher of a datacenter runs: a consecutive share, nearly equal for all launchers."""
        mine = [role for role in self.roles if role.datacenter == agent.datacenter]
        return mine[agent.share(len(mine))]

    def roles_by_agent(self, agents: Sequence[AgentName]) -> dict[AgentName, list[WorkerRole]]:
        """The same where hosts are missing: those that are there share the workers of their datacenter."""
        found: dict[AgentName, list[WorkerRole]] = {}
        for dc in dict.fromkeys(agent.datacenter for agent in agents):
            here = sorted(agent for agent in agents if agent.datacenter == dc)
            for number, agent in enumerate(here):
                found[agent] = self.roles_of(AgentName(dc, number, len(here)))
        return found


class BuiltProgram(NamedTuple):
    """What the workers of a run execute, and what it costs."""

    case: Case
    program: Program
    costs: Costs


def build_program(job: Job, options: TrainOptions) -> BuiltProgram:
    """The same for all launchers of a run, and for those who only watch it. Reads neither model nor data."""
    chosen = find_schedule(options.schedule)
    case = prepare(job, chosen, options.tcp)
    program = build(case, chosen, budget=options.budget)
    if options.clip is not None:
        program = with_norm(program)
    require_runnable(program)
    case = case.of(program)
    costs = case.costs_of(program)
    if costs.circuits is not None and options.zero:
        costs = replace(costs, circuits=replace(costs.circuits, until_step=True))
    return BuiltProgram(case, program, costs)


def prepare_job(job: Job, options: TrainOptions, before: PreparedJob | None = None) -> PreparedJob:
    """`before`: the run continues its training, with the layers divided as the new job says."""
    if job.groups:
        return _prepare_groups(job, options)
    case, program, costs = build_program(job, options)
    if before is None:
        training = make_training(case, options, program.num_stages)
    else:
        training = before.training
        if training.model.layers_per_stage:
            model = replace(training.model, layers_per_stage=case.arrangement.layers_per_stage)
            training = replace(training, model=model)
    require_divisible(training.model.config, job.tp)
    return PreparedJob(job, program, costs, training, simulate(program, costs).iteration_ns / 1e9)


def _prepare_groups(job: Job, options: TrainOptions) -> PreparedJob:
    """Every group under the same schedule, and what the sums between them take."""
    found = [prepare_job(part, options) for part in job.groups]
    if any(part.program.num_stages != part.program.num_ranks for part in found):
        raise ProgramError(
            f"schedule {options.schedule}: groups of pipelines that are placed differently need one stage on each "
            "worker. Choose a schedule that does not interleave"
        )
    deepest = max(found, key=lambda part: part.program.num_stages)
    layers = [part.training.model.layer_counts(part.program.num_stages) for part in found]
    timelines = [simulate(part.program, part.costs) for part in found]
    waits = group_waits(job.groups, [done_s(timeline) for timeline in timelines], options.tcp)
    groups = tuple(
        PreparedGroup(part.job, part.program, part.costs, own, tuple(wait.sync_s.tolist()), wait.norm_s)
        for part, own, wait in zip(found, layers, waits, strict=True)
    )
    # From step to step, a group that is done earlier waits for the slowest one.
    seconds = [simulate(group.program, group.predicted).iteration_ns / 1e9 for group in groups]
    slowest_s = max(seconds)
    groups = tuple(
        replace(group, waits_s=tuple(wait + slowest_s - own_s for wait in group.waits_s))
        for group, own_s in zip(groups, seconds, strict=True)
    )
    first = groups[0]
    whole = first.job.alone()
    whole._groups = job.groups
    return PreparedJob(whole, first.program, first.costs, deepest.training, slowest_s, groups)


def digest_of(job: Job, options: TrainOptions) -> str:
    """What two launchers must agree on before they train together: a digest of the plan, and the keys of the recipe
    as JSON, so that a refusal can name the one that differs. Only keys that the user wrote here."""
    # zero is compared as a key of the recipe
    what = [part.model_dump(mode="json", exclude={"name", "profile", "zero"}) for part in job.parts]
    for part in what:
        part["model"].pop("config", None)
    text = json.dumps([*what, options.schedule, options.tcp, options.budget], sort_keys=True)
    keys = {key: v for key, v in agreed(options).items() if options.stated is None or key in options.stated}
    return f"{hashlib.sha256(text.encode()).hexdigest()} {json.dumps(keys, sort_keys=True)}"


def difference(theirs: str, ours: str) -> str | None:
    """Why a launcher with the digest `theirs` may not train with this one; None: it may."""
    (their_plan, _, their_keys), (our_plan, _, our_keys) = theirs.partition(" "), ours.partition(" ")
    if their_plan != our_plan:
        return "its plan differs from the plan at the rendezvous: copy the same file to both"
    found, wanted = json.loads(their_keys), json.loads(our_keys)
    key = next((key for key in found if found[key] != wanted.get(key)), None)
    if key is None:
        return None
    return (
        f"its recipe differs: {key} is {found[key]!r} there and {wanted.get(key)!r} at the rendezvous. Give both the "
        "same recipe and flags"
    )


def copy_targets(members: Sequence[str], agents: Sequence[AgentName], folders: Mapping[str, str]) -> dict[str, str]:
    """By agent: the agent of the next datacenter that keeps copies of its checkpoints; in a run in one datacenter, the
    next host with another folder. None where all have one place. `folders`: by agent, the number of its place, or an
    empty string."""
    if len(set(folders.values())) == 1 and all(folders.values()):
        return {}
    ring = [dc for dc in members if any(agent.datacenter == dc for agent in agents)]
    targets: dict[str, str] = {}
    for agent in agents:
        if len(ring) > 1:
            after = ring[(ring.index(agent.datacenter) + 1) % len(ring)]
            theirs = sorted(other for other in agents if other.datacenter == after)
            targets[agent.node] = theirs[agent.part % len(theirs)].node
        else:
            later = sorted(agents, key=lambda other: (other <= agent, other))
            theirs = [other for other in later if folders[other.node] != folders[agent.node]]
            if theirs:
                targets[agent.node] = theirs[0].node
    return targets
