"""What a group of datacenters runs: a plan, its Program, what is trained by it; and who does which part of it.

Made once where the launchers meet, and sent to the others; made anew when a datacenter is lost. Starts nothing.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace

from atlas.cost.table import Costs
from atlas.evaluate.job import build, find_schedule, prepare
from atlas.ir.program import Program
from atlas.launch.measured import with_norm
from atlas.launch.rehearse import TrainOptions, make_training
from atlas.launch.rendezvous import AgentName
from atlas.runtime.assignment import TrainingSetup
from atlas.runtime.models.config import require_divisible
from atlas.runtime.wiring import WorkerRole, require_runnable
from atlas.sim import simulate
from atlas.spec import Job


@dataclass(frozen=True, eq=False)
class PreparedJob:
    """Of one plan."""

    job: Job
    program: Program
    costs: Costs
    training: TrainingSetup
    predicted_s: float
    """Of an iteration, by the simulator."""

    @property
    def roles(self) -> list[WorkerRole]:
        return [
            WorkerRole(self.program, w, cell, self.job.cells)
            for cell in range(self.job.cells)
            for w in range(self.program.num_workers)
        ]

    @property
    def datacenters(self) -> list[str]:
        """In the order of the pipeline."""
        return list(dict.fromkeys(self.program.rank_dc))

    @property
    def global_batch(self) -> int:
        """Sequences of an iteration."""
        roles = self.job.cells * self.program.num_pipelines
        return self.training.data.microbatch * roles * self.program.num_microbatches

    def roles_of(self, site: AgentName) -> list[WorkerRole]:
        """A site's share of its datacenter's workers: consecutive ones, the same number for all, nearly."""
        mine = [role for role in self.roles if role.datacenter == site.datacenter]
        first, last = (len(mine) * (site.part + k) // site.num_parts for k in (0, 1))
        return mine[first:last]


def prepare_job(job: Job, options: TrainOptions, before: PreparedJob | None = None) -> PreparedJob:
    """`before`: what was trained until now goes on, cut anew."""
    chosen = find_schedule(options.schedule)
    case = prepare(job, chosen, options.tcp)
    program = build(case, chosen, budget=options.budget)
    if options.clip is not None:
        program = with_norm(program)
    require_runnable(program)
    costs = case.turns if program.sharing and case.turns is not None else case.apart
    if before is None:
        training = make_training(case, options, program.num_stages)
    else:
        training = before.training
        if training.model.layers_per_stage:
            cut = replace(training.model, layers_per_stage=case.arrangement.layers_per_stage)
            training = replace(training, model=cut)
    require_divisible(training.model.config, job.tp)
    return PreparedJob(job, program, costs, training, simulate(program, costs).iteration_ns / 1e9)


def digest_of(job: Job, options: TrainOptions) -> str:
    """Of what two launchers must agree on before they train together."""
    what = job.model_dump(mode="json", exclude={"name", "profile"})
    what["model"].pop("config", None)
    text = json.dumps([what, options.schedule, options.tcp, options.budget], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
