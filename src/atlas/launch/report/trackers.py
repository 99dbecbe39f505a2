"""Experiment trackers: TensorBoard, Weights & Biases, MLflow, and any that a package offers by the entry-point group
`atlas.trackers`. Each gets the figures of every step.

An entry point is a callable `tracker(folder, name, facts)`. What it returns has `step(number, figures)` and `close()`.
It is called on a thread of its own: a server that does not answer costs figures, not training. Only the adapters
know the packages, and load them when they are used.
"""

from __future__ import annotations

import math
import os
import queue
import threading
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from atlas.errors import AtlasError
from atlas.ir.timeline import Timeline

GROUP = "atlas.trackers"
DEFAULT = "tensorboard"
"""Used where it is installed and the run has a folder."""
NONE = "none"
WAITING = 1000
"""Steps that wait for a slow tracker; the next are left out."""
CLOSE_S = 10.0
"""A tracker has this long to send the rest when the run ends."""
Figures = dict[str, float]


class Tracker(Protocol):
    def step(self, number: int, figures: Figures) -> None: ...

    def close(self) -> None: ...


class TrackerError(AtlasError):
    """A tracker is not installed, or does not start."""


def default_trackers() -> tuple[str, ...]:
    return (DEFAULT,) if find_spec(DEFAULT) is not None and DEFAULT in _offered() else ()


def _offered() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=GROUP)}


def open_tracker(chosen: str, folder: Path, name: str, facts: Mapping[str, Any]) -> Tracker:
    """Raises TrackerError."""
    found = _offered()
    if chosen not in found:
        known = ", ".join(sorted(found)) or NONE
        raise TrackerError(f"--track {chosen}: no such tracker. Known are {known}; other packages can add theirs")
    try:
        tracker: Tracker = found[chosen].load()(folder, name, facts)
    except AtlasError:
        raise
    except Exception as error:  # whatever the package raises: no login, no server, no disk
        first = str(error).strip().partition("\n")[0]
        raise TrackerError(f"--track {chosen}: {type(error).__name__}: {first}. Fix it or leave it out") from error
    return tracker


class TrackerThread:
    """Passes steps on to a tracker. Never blocks and never raises; `warn` gets one line for a tracker that fails."""

    def __init__(self, name: str, tracker: Tracker, warn: Callable[[str], None]) -> None:
        self._name, self._tracker, self._warn = name, tracker, warn
        self._queue: queue.Queue[tuple[int, Figures] | None] = queue.Queue(WAITING)
        self._warned = False
        self._thread = threading.Thread(target=self._pass_on, daemon=True, name=f"tracker {name}")
        self._thread.start()

    def step(self, number: int, figures: Figures) -> None:
        try:
            self._queue.put_nowait((number, figures))
        except queue.Full:
            self._warn_once("the tracker is too slow: some steps are not recorded")

    def close(self) -> None:
        try:
            self._queue.put(None, timeout=CLOSE_S)
        except queue.Full:
            return self._warn_once("the last steps were not recorded in time")
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            self._warn_once("the last steps were not recorded in time")

    def _pass_on(self) -> None:
        while (item := self._queue.get()) is not None:
            self._try(lambda found=item: self._tracker.step(*found))  # type: ignore[misc]
        self._try(self._tracker.close)

    def _try(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:
            self._warn_once(f"{type(error).__name__}: {error}")

    def _warn_once(self, why: str) -> None:
        if not self._warned:
            self._warned = True
            self._warn(f"report ({self._name}): {why}. Training continues")


def figures_of(event: Mapping[str, Any], timeline: Timeline | None) -> Figures:
    """Every finite number of a step, and the share of the time in which accelerators compute."""
    found = {key: float(value) for key, value in event.items() if key != "step" and _is_number(value)}
    if timeline is not None and timeline.makespan_ns:
        found["utilization"] = float(timeline.busy_ns.mean()) / timeline.makespan_ns
    return found


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


# ---- adapters --------------------------------------------------------------------------------------------------------
def _package(name: str) -> Any:
    """Raises TrackerError if it is not installed."""
    if find_spec(name) is None:
        raise TrackerError(f"--track {name}: needs the package {name}. Install it with: pip install {name}")
    return import_module(name)


class TensorBoard:
    """Scalars in FOLDER/tensorboard, for `tensorboard --logdir FOLDER`. The file is made with the first step: a run
    that is refused leaves nothing."""

    def __init__(self, folder: Path, name: str, facts: Mapping[str, Any]) -> None:
        _package("tensorboard")
        self._folder = str(folder / "tensorboard")
        self._writer: Any = None

    def step(self, number: int, figures: Figures) -> None:
        if self._writer is None:
            self._writer = import_module("tensorboard.summary").Writer(self._folder)
        for key, value in figures.items():
            self._writer.add_scalar(f"training/{key}", value, number)
        self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class WandB:
    """A run of the project `atlas`. Its own variables apply: WANDB_PROJECT, WANDB_MODE=offline, WANDB_API_KEY."""

    def __init__(self, folder: Path, name: str, facts: Mapping[str, Any]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        project = os.environ.get("WANDB_PROJECT", "atlas")
        self._run = _package("wandb").init(project=project, name=name, dir=str(folder), config=dict(facts))

    def step(self, number: int, figures: Figures) -> None:
        self._run.log(figures, step=number)

    def close(self) -> None:
        self._run.finish()


class MLflow:
    """A run of the experiment `atlas`, at MLFLOW_TRACKING_URI if it is set, else in MLflow's default place."""

    def __init__(self, folder: Path, name: str, facts: Mapping[str, Any]) -> None:
        client = _package("mlflow").MlflowClient()
        found = client.get_experiment_by_name("atlas")
        experiment = found.experiment_id if found is not None else client.create_experiment("atlas")
        self._client, self._run_id = client, client.create_run(experiment, run_name=name).info.run_id
        for key, value in facts.items():
            client.log_param(self._run_id, key, value)

    def step(self, number: int, figures: Figures) -> None:
        for key, value in figures.items():
            self._client.log_metric(self._run_id, key, value, step=number)

    def close(self) -> None:
        self._client.set_terminated(self._run_id)
