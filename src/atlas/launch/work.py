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
from atlas.launch.rehearse import Wishes, make_training
from atlas.launch.rendezvous import SiteName
from atlas.runtime.assignment import Training
from atlas.runtime.models.config import require_divisible
from atlas.runtime.wiring import Seat, require_runnable
from atlas.sim import simulate
from atlas.spec import Job


@dataclass(frozen=True, eq=False)
class Work:
    """Of one plan."""

    job: Job
    program: Program
    costs: Costs
    training: Training
    predicted_s: float
    """Of an iteration, by the simulator."""

    @property
    def seats(self) -> list[Seat]:
        return [
            Seat(self.program, w, cell, self.job.cells)
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
        seats = self.job.cells * self.program.num_pipelines
        return self.training.data.microbatch * seats * self.program.num_microbatches

    def seats_of(self, site: SiteName) -> list[Seat]:
        """A site's share of its datacenter's workers: consecutive ones, the same number for all, nearly."""
        mine = [seat for seat in self.seats if seat.datacenter == site.datacenter]
        first, last = (len(mine) * (site.part + k) // site.num_parts for k in (0, 1))
        return mine[first:last]


def make_work(job: Job, wishes: Wishes, before: Work | None = None) -> Work:
    """`before`: what was trained until now goes on, cut anew."""
    chosen = find_schedule(wishes.schedule)
    case = prepare(job, chosen, wishes.tcp)
    program = build(case, chosen, budget=wishes.budget)
    if wishes.clip is not None:
        program = with_norm(program)
    require_runnable(program)
    costs = case.turns if program.sharing and case.turns is not None else case.apart
    if before is None:
        training = make_training(case, wishes, program.num_stages)
    else:
        training = before.training
        if training.model.layers_per_stage:
            cut = replace(training.model, layers_per_stage=case.arrangement.layers_per_stage)
            training = replace(training, model=cut)
    require_divisible(training.model.config, job.tp)
    return Work(job, program, costs, training, simulate(program, costs).iteration_ns / 1e9)


def digest_of(job: Job, wishes: Wishes) -> str:
    """Of what two launchers must agree on before they train together."""
    what = job.model_dump(mode="json", exclude={"name", "profile"})
    what["model"].pop("config", None)
    text = json.dumps([what, wishes.schedule, wishes.tcp, wishes.budget], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
