"""A plan or a job rehearsed on this machine: its Program simulated, then run by worker processes on paced devices over
emulated paths, and the two Timelines side by side. The weights that are trained are those of a stand-in model, small
enough for any machine; every duration is the plan's own, times `slower`.

Knows both plan and runtime. Real devices and several hosts come with the runtime.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from atlas.errors import AtlasError
from atlas.ir.program import repeated
from atlas.ir.timeline import Timeline
from atlas.launch.emulate import Emulation, Setup, emulate
from atlas.launch.paths import require_emulable
from atlas.plan.evaluate import build, find_schedule, prepare
from atlas.runtime.assignment import stand_in
from atlas.sim import simulate
from atlas.spec import Job

MAX_WORKERS = 16
"""A process with torch each: more do not start in reasonable time on a laptop."""


@dataclass(frozen=True, eq=False)
class Rehearsal:
    """What was predicted, and what came of it."""

    predicted: Timeline
    run: Emulation

    @property
    def error(self) -> float:
        """Predicted over measured iteration time, less one."""
        return self.predicted.iteration_ns / self.run.timeline.iteration_ns - 1


def rehearse(
    job: Job,
    schedule: str,
    *,
    tcp: Literal["one", "many"] = "many",
    steps: int = 3,
    slower: int = 1,
    budget: int | None = None,
) -> Rehearsal:
    """Run `steps` iterations of the job's Program here."""
    chosen = replace(find_schedule(schedule), shares=False)
    case = prepare(job, chosen, tcp)
    program = build(case, chosen, budget=budget)
    if program.num_workers > MAX_WORKERS:
        raise AtlasError(
            f"{program.num_workers} workers are more than the {MAX_WORKERS} that one machine rehearses: "
            "lower pp or pipelines_per_cell with --set, or simulate"
        )
    costs = case.apart.scaled(slower)
    require_emulable(program, costs)
    predicted = simulate(repeated(program, steps), costs)
    training = stand_in(num_layers=max(4, program.num_stages - 2))
    setup = Setup(steps, patience_s=20.0 + 2 * predicted.makespan_ns / 1e9)
    return Rehearsal(predicted, emulate(program, costs, training, setup))
