"""A job made ready to run: its Program, its costs, the training, and which launcher runs which workers.

Prepared once where the launchers meet, and sent to the others; prepared again when a datacenter is lost. Starts
nothing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from atlas.cost.table import Costs
from atlas.evaluate import Case, build, find_schedule, prepare
from atlas.ir.program import Program
from atlas.launch.measured import with_norm
from atlas.launch.rendezvous import AgentName
from atlas.launch.train_options import TrainOptions, agreed, make_training
from atlas.runtime.assignment import TrainingSetup
from atlas.runtime.models.config import require_divisible
from atlas.runtime.wiring import WorkerRole, all_roles, require_runnable
from atlas.sim import simulate
from atlas.spec import Job


@dataclass(frozen=True, eq=False)
class PreparedJob:
    job: Job
    program: Program
    costs: Costs
    training: TrainingSetup
    predicted_s: float
    """Simulated seconds of an iteration."""

    @property
    def roles(self) -> list[WorkerRole]:
        return all_roles(self.program, self.job.cells)

    @property
    def datacenters(self) -> list[str]:
        """In the order of the pipeline."""
        return list(dict.fromkeys(self.program.rank_dc))

    @property
    def peers(self) -> list[tuple[str, str]]:
        """The names of workers that exchange messages."""
        roles = {role.node: role for role in self.roles}
        tied = self.training.model.config.tied
        return [(role.name, roles[link.peer].name) for role in roles.values() for link in role.links(tied=tied)]

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
    return BuiltProgram(case, program, case.costs_of(program))


def prepare_job(job: Job, options: TrainOptions, before: PreparedJob | None = None) -> PreparedJob:
    """`before`: the run continues its training, with the layers divided as the new job says."""
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


def digest_of(job: Job, options: TrainOptions) -> str:
    """What two launchers must agree on before they train together: a digest of the plan, and the keys of the recipe
    as JSON, so that a refusal can name the one that differs. Only keys that the user wrote here."""
    what = job.model_dump(mode="json", exclude={"name", "profile", "zero"})  # zero is compared as a key of the recipe
    what["model"].pop("config", None)
    text = json.dumps([what, options.schedule, options.tcp, options.budget], sort_keys=True)
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
    next host with another folder. `folders`: by agent, a number of its folder."""
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
