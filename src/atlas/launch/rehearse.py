"""Rehearses a plan or a job on this machine: simulates its Program, runs it with worker processes over an emulated WAN,
and returns both Timelines. Every duration is the plan's own, times `slower`.

The model is a stand-in small enough for any machine, or a real one. Its layers are divided as the plan says, and its
activations take as long over the emulated paths as the plan's do over its links.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

from atlas.cost.weather import drawn, paths_with_weather
from atlas.errors import AtlasError
from atlas.ir.assemble import repeated
from atlas.ir.timeline import Timeline
from atlas.launch.checkpoint_folders import find_checkpoints, first_step
from atlas.launch.emulate import MANY_STREAMS, Emulation, EmulationSettings, emulate
from atlas.launch.paths import WeatherDraw, require_emulable
from atlas.launch.preflight import require_executable, require_memory
from atlas.launch.prepared_job import PreparedGroup, PreparedJob, prepare_job
from atlas.launch.rails import RailSettings
from atlas.launch.report.events import OnStep, StepEvent
from atlas.launch.supervisor import run_with_restarts
from atlas.launch.train_options import TrainOptions
from atlas.launch.worker_logs import new_attempt
from atlas.runtime.assignment import SaveChoice
from atlas.sim import simulate
from atlas.sim.weather import HORIZON
from atlas.spec import Job
from atlas.spec.power import keeps_ring

log = logging.getLogger("atlas.launch")
MAX_PREDICTED = 20
"""Iterations that are simulated. Later ones are like these."""
MAX_PREDICTED_WEATHER = 500
"""The same under weather: no iteration is like another."""
MAX_WORKERS = 16
"""Processes with torch that start in reasonable time on a laptop."""
MAX_OVERRUN = 0.05
"""Share of a run's predicted time by which the host may delay paced devices."""


@dataclass(frozen=True, eq=False)
class Rehearsal:
    """An emulated run on this machine: its predicted and its measured Timeline."""

    predicted: Timeline
    run: Emulation
    first_step: int
    """Steps that were done before this run; 0 unless it resumed from a checkpoint."""

    @property
    def measured(self) -> Timeline:
        return self.run.timeline

    @property
    def error(self) -> float:
        """Predicted divided by measured iteration time, minus 1."""
        return self.predicted.iteration_ns / self.measured.iteration_ns - 1

    @property
    def was_host_too_slow(self) -> bool:
        """Whether the host delayed paced devices so much that the measured times are not valid."""
        return self.run.overrun_s > MAX_OVERRUN * len(self.run.losses) * self.predicted.iteration_ns / 1e9


def rehearse(job: Job, options: TrainOptions, *, on_step: OnStep | None = None) -> Rehearsal:
    """Run the job's Program here; restart it after a failure where it is saved."""
    require_executable(job, options.filler)
    prepared = prepare_job(job, options)
    _require_small(prepared)
    needs = prepared.needs_of(prepared.roles, saves=options.checkpoints is not None)
    require_memory(needs, options.device, tp=prepared.job.tp)
    groups = tuple(group.scaled(options.slower) for group in prepared.groups)
    prepared = replace(prepared, costs=prepared.costs.scaled(options.slower), groups=groups)
    for part in prepared.parts:
        require_emulable(part.program, part.costs)
    num_done = 0

    def note_step(event: StepEvent, timeline: Timeline) -> None:
        nonlocal num_done
        num_done = event["step"]
        if on_step is not None:
            on_step(event, timeline)

    def attempt() -> Rehearsal:
        return _attempt(prepared, options, note_step)

    if options.checkpoints is None:
        return attempt()
    return run_with_restarts(attempt, lambda: num_done, options.restarts, log.warning)


def _attempt(prepared: PreparedJob, options: TrainOptions, on_step: OnStep) -> Rehearsal:
    """From the last complete checkpoint, if there is one, to the last step or a failure."""
    saves: dict[str, SaveChoice] = {}
    if options.checkpoints is not None:
        saves = find_checkpoints(options.checkpoints, prepared.datacenters, every=options.save_every, keep=options.keep)
    first = first_step(saves)
    if first >= options.steps:
        raise AtlasError(
            f"{options.checkpoints}: step {first} is done already, and --steps is {options.steps}. Give more "
            "steps, or choose another folder for a new run"
        )
    num_steps = options.steps - first
    predicted = _predicted(prepared.parts[0], num_steps, options.weather_seed)
    settings = EmulationSettings(
        num_steps,
        device=options.device,
        streams=1 if options.tcp == "one" else MANY_STREAMS,
        tcp=options.tcp,
        slower=options.slower,
        num_cells=prepared.job.cells,
        groups=prepared.groups,
        tp=prepared.job.tp,
        patience_s=options.patience_s + 2 * predicted.iteration_ns / 1e9,
        save=saves,
        logs=None if options.logs is None else new_attempt(options.logs),
        fillers={} if options.filler is None else {role.name: options.filler for role in prepared.roles},
        keep_weights=False,
        predicted_s=predicted.iteration_ns / 1e9,
        weather=WeatherDraw(options.weather_seed, 60 + 2 * num_steps * predicted.iteration_ns / 1e9),
        rails=RailSettings(fallback=keeps_ring(prepared.job.cluster)),
    )
    run = emulate(prepared.program, prepared.costs, prepared.training, settings, on_step=on_step)
    return Rehearsal(predicted, run, first)


def _predicted(group: PreparedGroup, num_steps: int, weather_seed: int) -> Timeline:
    """The simulated run. Links with a model have the draw that the emulator has, from the first op on."""
    costs = group.predicted
    if not paths_with_weather(costs):
        return simulate(repeated(group.program, min(num_steps, MAX_PREDICTED)), costs)
    program = repeated(group.program, min(num_steps, MAX_PREDICTED_WEATHER))
    horizon_ns = HORIZON * simulate(program, costs).makespan_ns
    return simulate(program, drawn(costs, weather_seed, 0, horizon_ns))


def _require_small(prepared: PreparedJob) -> None:
    num_workers, tp = len(prepared.roles), prepared.job.tp
    if num_workers * tp > MAX_WORKERS:
        each, lower = (f" of {tp} processes each", "tp, ") if tp > 1 else ("", "")
        raise AtlasError(
            f"{num_workers} workers{each} are more than the {MAX_WORKERS} that one machine can emulate: "
            f"lower {lower}pp, pipelines_per_cell or cells with --set, or simulate"
        )
