"""Emulated training with BubbleTea in every worker, in a separate process (`python -m` this module).

Reads one JSON object from stdin (the training and the filler's settings), prints a JSON line per step, restarts when
the run ends or a worker dies, and ends when stdin is closed. `Rehearsed` is what both sides compute from a plan: the
Program, its costs, its Timeline.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import bubbletea
from atlas.cost.table import Costs
from atlas.errors import AtlasError, WorkerError
from atlas.evaluate import build, find_schedule, prepare
from atlas.ir.assemble import repeated
from atlas.ir.program import Program
from atlas.ir.timeline import Timeline
from atlas.launch.emulate import EmulationSettings, emulate
from atlas.launch.paths import require_emulable
from atlas.launch.rehearse import MAX_WORKERS
from atlas.launch.report.events import OnStep, StepEvent
from atlas.lifetime import Lifeline
from atlas.runtime.assignment import FillerChoice, stand_in
from atlas.sim import simulate
from atlas.spec import Job
from atlas.spec.plan import load_job_or_plan

PREDICTED = 4
"""Simulated iterations; the last one is the steady state."""
AGAIN_S = 1.0
TOLD = 1024
"""Steps that are kept."""


@dataclass(frozen=True)
class TrainingSource:
    """What to train, and how."""

    path: str
    changes: tuple[str, ...] = ()
    schedule: str = ""
    steps: int = 1_000_000
    slower: int = 1
    device: str = "paced"
    """Of every worker; all workers share it if it is a GPU."""


@dataclass(frozen=True, eq=False)
class Rehearsed:
    job: Job
    program: Program
    costs: Costs
    predicted: Timeline


def rehearsed(source: TrainingSource) -> Rehearsed:
    """The Program of a plan (or of a job and a schedule) and its simulated Timeline."""
    job, plan = load_job_or_plan(Path(source.path), list(source.changes))
    if plan is not None and plan.runnable != "yes":
        raise AtlasError(f"{source.path}: runnable: {plan.runnable}")
    name = source.schedule or (plan.schedule.name if plan else "1f1b")
    chosen = replace(find_schedule(name), shares=False)
    case = prepare(job, chosen, plan.schedule.tcp if plan else "many")
    program = build(case, chosen, budget=plan.schedule.tries or None if plan else None)
    if program.num_workers > MAX_WORKERS:
        raise AtlasError(
            f"{program.num_workers} workers exceed the limit of {MAX_WORKERS} on one machine: "
            "lower pp or pipelines_per_cell with --set"
        )
    costs = case.apart.scaled(source.slower)
    require_emulable(program, costs)
    return Rehearsed(job, program, costs, simulate(repeated(program, PREDICTED), costs))


def train(what: Rehearsed, source: TrainingSource, filler: dict[str, Any] | None, on_step: OnStep) -> list[float]:
    """One run from the first step; returns the losses."""
    program = what.program
    names = [program.worker_name(w) for w in range(program.num_workers)]
    fillers = dict.fromkeys(names, FillerChoice("bubbletea", filler)) if filler else {}
    setup = EmulationSettings(
        source.steps,
        device=source.device,
        patience_s=20.0 + 2 * what.predicted.makespan_ns / 1e9,
        fillers=fillers,
        keep_weights=False,
        keep_timeline=False,
    )
    training = stand_in(num_layers=max(4, program.num_stages - 2))
    return emulate(program, what.costs, training, setup, on_step=on_step).losses


class TrainingProcess:
    """`with TrainingProcess(source, filler):` trains in another process until the block is left."""

    def __init__(
        self, source: TrainingSource, filler: dict[str, Any], on_step: Callable[[float], None] = lambda seconds: None
    ) -> None:
        """`on_step` is called with the seconds of each iteration, on another thread."""
        self._on_step = on_step
        path = os.pathsep.join(
            filter(None, [str(Path(bubbletea.__file__).parent.parent), os.environ.get("PYTHONPATH")])
        )
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bubbletea.serve.training"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,  # Ctrl-C is handled by the service
        )
        self.steps: deque[dict[str, Any]] = deque(maxlen=TOLD)
        """The last steps: number, loss and seconds."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"source": asdict(source), "filler": filler}) + "\n")
        self._process.stdin.flush()
        threading.Thread(target=self._listen, daemon=True, name="bubbletea training").start()

    def close(self) -> None:
        """Its workers end with it."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> TrainingProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                message = json.loads(line)
                if "error" in message:
                    then = "it has ended: fix this and start again" if message["ends"] else "it is restarted"
                    print(f"bubbletea: training: {message['error']}; {then}", file=sys.stderr)
                else:
                    self.steps.append(message)
                    if message["step"] > 1:  # the first one includes the start
                        self._on_step(message["seconds"])


def main() -> int:
    settings = json.loads(sys.stdin.readline())
    Lifeline(sys.stdin.fileno())
    source = TrainingSource(**{**settings["source"], "changes": tuple(settings["source"]["changes"])})
    what = rehearsed(source)

    def on_step(event: StepEvent, timeline: Timeline) -> None:
        _say({"step": event["step"], "loss": event["loss"], "seconds": event["iteration_s"]})

    while True:
        try:
            train(what, source, settings["filler"], on_step)
        except AtlasError as error:
            ends = not isinstance(error, WorkerError)
            _say({"error": str(error), "ends": ends})
            if ends:
                return 2
        time.sleep(AGAIN_S)


def _say(message: dict[str, Any]) -> None:
    print(json.dumps(message), flush=True)


if __name__ == "__main__":
    sys.exit(main())
