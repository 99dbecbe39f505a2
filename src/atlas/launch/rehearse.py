"""A plan or a job rehearsed on this machine: its Program simulated, then run by worker processes over an emulated WAN,
and the two Timelines side by side. Every duration is the plan's own, times `slower`.

What is trained is a stand-in small enough for any machine, or a real model; its layers are cut as the plan says, and
its activations take over the emulated paths what the plan's take over its links. Knows both plan and runtime.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from atlas.cost.table import Costs
from atlas.errors import AtlasError, SpecError
from atlas.evaluate.job import build, find_schedule, prepare
from atlas.evaluate.result import Case
from atlas.ir.assemble import repeated
from atlas.ir.program import Program
from atlas.ir.timeline import Timeline
from atlas.launch.checkpoint_folders import RunCheckpoints, find_checkpoints
from atlas.launch.emulate import MANY_STREAMS, Emulation, EmulationSettings, emulate
from atlas.launch.iterations import StepProgress
from atlas.launch.measured import with_norm
from atlas.launch.paths import require_emulable
from atlas.launch.preflight import require_executable
from atlas.launch.supervisor import RestartPolicy, run_with_restarts
from atlas.runtime.assignment import DataChoice, ModelChoice, TrainingSetup, stand_in
from atlas.runtime.models.config import from_spec
from atlas.runtime.models.huggingface import read_config
from atlas.runtime.recipe import LearningRate, OptimizerSettings
from atlas.sim import simulate
from atlas.spec import Job
from atlas.spec.plan import Plan, PlanSchedule

log = logging.getLogger("atlas.launch")
MAX_WORKERS = 16
"""A process with torch each, or tp of them: more do not start in reasonable time on a laptop."""
STAND_IN_LENGTH = 64
"""Tokens of a sequence, where a stand-in reads real data."""
OWN = "job"
"""In place of a folder: the model that the job describes, with random weights."""


@dataclass(frozen=True)
class TrainOptions:
    """What a user may choose beside the plan."""

    schedule: str
    tcp: Literal["one", "many"] = "many"
    steps: int = 3
    """Of the whole run: one that resumes does what is left."""
    slower: int = 1
    budget: int | None = None
    device: str = "paced"
    model: str = ""
    """A Hugging Face folder, or `OWN`; empty: a stand-in."""
    data: str = ""
    """A folder of shards, or the text that ships (`assignment.SHIPPED`); empty: a made-up task."""
    learning_rate: float | None = None
    clip: float | None = None
    checkpoints: Path | None = None
    save_every: int = 0
    max_restarts: int = 5
    """In a row, without a step of progress; where the run is saved."""

    @classmethod
    def of(
        cls, plan: Plan | None, schedule: str | None = None, tcp: Literal["one", "many"] | None = None, **others: Any
    ) -> TrainOptions:
        """As the plan has them where the user chose nothing. Raises AtlasError for a plan that cannot be executed."""
        if plan is not None and plan.runnable != "yes":
            raise AtlasError(f"{plan.job.where}: runnable: {plan.runnable}")
        how = PlanSchedule(name="1f1b") if plan is None else plan.schedule
        return cls(schedule or how.name, tcp or how.tcp, budget=how.tries or None, **others)


@dataclass(frozen=True, eq=False)
class Rehearsal:
    """What was predicted, and what came of it."""

    predicted: Timeline
    run: Emulation
    first_step: int
    """Where it began; not 0 where it resumed."""

    @property
    def measured(self) -> Timeline:
        return self.run.timeline

    @property
    def error(self) -> float:
        """Predicted over measured iteration time, less one."""
        return self.predicted.iteration_ns / self.measured.iteration_ns - 1


def rehearse(
    job: Job, options: TrainOptions, *, on_step: Callable[[StepProgress, float], None] | None = None
) -> Rehearsal:
    """Run the job's Program here. `on_step` hears of every step, and the predicted seconds of one."""
    require_executable(job)
    chosen = find_schedule(options.schedule)
    case = prepare(job, chosen, options.tcp)
    program = build(case, chosen, budget=options.budget)
    if options.clip is not None:
        program = with_norm(program)
    _require_small(program, job.cells, job.tp)
    costs = case.turns if program.sharing and case.turns is not None else case.apart
    costs = costs.scaled(options.slower)
    require_emulable(program, costs)
    training = make_training(case, options, program.num_stages)
    num_done = 0

    def told(done: StepProgress, predicted_s: float) -> None:
        nonlocal num_done
        num_done = done.num_done
        if on_step is not None:
            on_step(done, predicted_s)

    def live() -> Rehearsal:
        return _live(program, costs, training, options, job, told)

    if options.checkpoints is None:
        return live()
    return run_with_restarts(live, lambda: num_done, RestartPolicy(options.max_restarts), log.warning)


def _live(
    program: Program,
    costs: Costs,
    training: TrainingSetup,
    options: TrainOptions,
    job: Job,
    on_step: Callable[[StepProgress, float], None],
) -> Rehearsal:
    """From the last complete checkpoint, if there is one, to the last step or a failure."""
    saves = RunCheckpoints(0, {})
    if options.checkpoints is not None:
        saves = find_checkpoints(options.checkpoints, program.rank_dc, every=options.save_every)
    if saves.first_step >= options.steps:
        raise AtlasError(
            f"{options.checkpoints}: step {saves.first_step} is done already, and --steps says {options.steps}. Ask "
            "for more steps, or choose another folder for a new run"
        )
    num_steps = options.steps - saves.first_step
    predicted = simulate(repeated(program, max(num_steps, 2)) if num_steps > 1 else program, costs)
    setup = EmulationSettings(
        num_steps,
        saves.first_step,
        device=options.device,
        streams=1 if options.tcp == "one" else MANY_STREAMS,
        num_cells=job.cells,
        tp=job.tp,
        patience_s=20.0 + 2 * predicted.iteration_ns / 1e9,
        save=saves.by_datacenter,
        keep_weights=False,
    )

    def tell(done: StepProgress) -> None:
        on_step(done, predicted.iteration_ns / 1e9)

    return Rehearsal(predicted, emulate(program, costs, training, setup, on_step=tell), saves.first_step)


def _require_small(program: Program, num_cells: int, tp: int) -> None:
    num_workers = program.num_workers * num_cells
    if num_workers * tp > MAX_WORKERS:
        each, lower = (f" of {tp} processes each", "tp, ") if tp > 1 else ("", "")
        raise AtlasError(
            f"{num_workers} workers{each} are more than the {MAX_WORKERS} that one machine rehearses: "
            f"lower {lower}pp, pipelines_per_cell or cells with --set, or simulate"
        )


# ---- what is trained -------------------------------------------------------------------------------------------------
def make_training(case: Case, options: TrainOptions, num_stages: int) -> TrainingSetup:
    """The model and the data that were wished for; else stand-ins."""
    rate = options.learning_rate
    if not options.model and not options.data:
        num_heads = max(2, case.job.tp)
        training = stand_in(
            num_layers=max(4, num_stages - 2), num_heads=num_heads, learning_rate=0.1 if rate is None else rate
        )
        return replace(training, max_norm=options.clip)
    model, length, microbatch = _model(case, options, num_stages)
    settings = OptimizerSettings(LearningRate(1e-3 if rate is None else rate))
    return TrainingSetup(model, DataChoice(length, microbatch, options.data), settings, options.clip)


def _model(case: Case, options: TrainOptions, num_stages: int) -> tuple[ModelChoice, int, int]:
    """The model, the tokens of its sequences, the sequences of its microbatches."""
    job = case.job
    if not options.model:
        from atlas.runtime.training import open_dataset

        small = stand_in(
            num_layers=max(4, num_stages - 2),
            num_heads=max(2, job.tp),
            vocabulary=open_dataset(options.data).vocabulary,
            length=STAND_IN_LENGTH,
        )
        return small.model, STAND_IN_LENGTH, small.data.microbatch
    folder = None if options.model == OWN else Path(options.model)
    config = from_spec(job.model) if folder is None else read_config(folder)
    if config.num_layers != job.model.layers:
        raise SpecError(
            where=options.model,
            key="layers",
            value=config.num_layers,
            rule=f"the plan cuts a model of {job.model.layers} layers into stages",
            remedy="Plan for this model (model.config in the job), or train the model that was planned for",
        )
    weights = "" if folder is None or not any(folder.glob("*.safetensors")) else str(folder)
    layers = case.arrangement.layers_per_stage
    dtype: Literal["fp32", "bf16"] = "fp32" if job.precision == "fp32" else "bf16"
    length = min(job.model.seq_len, config.max_length)
    return ModelChoice(config, dtype, weights=weights, layers_per_stage=layers), length, job.microbatch
