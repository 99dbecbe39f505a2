"""The state of one run, as the page shows it: figures of the last steps, the map, the event log, two timelines. Made of
plain values, so that any number of clients can read one version of it.

Knows step events and Timelines; not where they come from, nor who reads the state.
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from atlas.cost.price import Tcp
from atlas.errors import AtlasError
from atlas.ir.analysis import summary, verdict
from atlas.ir.timeline import Timeline
from atlas.spec import Job
from atlas.ui.run_model import RunModel, shape_of, transfer_times_ms
from atlas.view.page import page_data

HISTORY = 1000
"""Steps in the curves."""
LOGGED = 200
"""Events in the log."""
STREAMED, CHECKPOINTS = 50, 5
"""The last events that each server-sent state has, and the last checkpoints."""
SERIES = ("step", "loss", "tokens_per_s", "iteration_s", "utilization", "mfu")
"""Figures of a step that the page draws as curves."""
DRIFT = 0.1
"""An iteration that takes so much longer than predicted is an event."""


class LiveRun:
    """One run. Thread-safe; `wait` blocks until there is a newer version."""

    def __init__(self) -> None:
        self._lock = threading.Condition()
        self.version = 0
        self.closed = False
        self.job: Job | None = None
        self.model: RunModel | None = None
        self.facts: dict[str, Any] = {}
        self._run: dict[str, Any] = {"name": "", "status": "waiting"}
        self._history: deque[dict[str, Any]] = deque(maxlen=HISTORY)
        self._events: deque[dict[str, Any]] = deque(maxlen=LOGGED)
        self._extra: dict[str, Any] = {"predicted": None, "links": [], "map": "", "verdict": ""}
        self._extra |= {"bubbles": None, "service": None}
        self._measured: Timeline | None = None
        self._last: Timeline | None = None
        self._timeline_version = 0
        self._timeline_body: tuple[int, bytes] | None = None
        self._adopted: tuple[dict[str, Any], bytes] | None = None
        self._drifts = False
        self._num_groups = 1

    # ---- what comes in -----------------------------------------------------------------------------------------------
    def begin(self, name: str, facts: Mapping[str, Any], job: Job | None) -> None:
        """What runs. Without a job there is no prediction and no map."""
        with self._lock:
            self.job, self.facts = job, dict(facts)
            self._run.update(name=name, **{key: facts.get(key) for key in ("schedule", "tcp", "steps", "slower")})
            self._run["device"] = facts.get("device", "")
            self._new_model(None)
            if job is not None:
                self._num_groups = max(len(job.parts), int(facts.get("num_groups") or 1))
            if self._num_groups > 1:
                text = f"one of the plan's {self._num_groups} groups of pipelines, and without the sum between groups"
                self._event("warning", f"before the first step, and in the timeline, the prediction is of {text}", None)
            self._bump()

    def search(self, pause: Callable[[], None] = lambda: None) -> RunModel | None:
        """Replace the first prediction of a job that does not run with that of `atlas simulate`. Takes seconds. Returns
        None if there is no prediction, or if the page was closed in the meantime. `pause` is called often and may
        block."""

        def progress(what: str, done: int, total: int) -> None:
            pause()
            if self.closed:
                raise ClosedPageError

        with self._lock:
            first = self.model
        try:
            found = None if first is None else first.searched(progress)
        except ClosedPageError:
            return None
        with self._lock:
            if found is not None and self.model is first:
                self._predict(found, "searched")
                self._bump()
        return found

    def add(
        self,
        steps: Sequence[Mapping[str, Any]] = (),
        events: Sequence[Mapping[str, Any]] = (),
        timeline: Timeline | None = None,
        last: Timeline | None = None,
        record: Mapping[str, Any] | None = None,
    ) -> None:
        """What is new: steps, events, the timelines of the last passes and of the `last` one, attempts."""
        with self._lock:
            if timeline is not None:
                self._measure(timeline, last or timeline)
            for event in steps:
                self._step(event)
            for event in events:
                self._event(str(event.get("kind", "note")), str(event["text"]), _number(event.get("time")))
            if record is not None:
                self._attempts(record)
            if timeline is not None and self._history:
                self._history[-1]["utilization"] = self._run["utilization"]
            self._look()
            self._bump()

    def set_service(self, cards: list[dict[str, Any]] | None) -> None:
        """The figures of a service beside training."""
        with self._lock:
            if cards != self._extra["service"]:
                self._extra["service"] = cards
                self._bump()

    def adopt(self, state: dict[str, Any], timeline: bytes) -> None:
        """Show the state of another page."""
        with self._lock:
            self._adopted = (state, timeline)
            self._timeline_version = int(state.get("timeline_version", 0))
            self._bump()

    def close(self) -> None:
        with self._lock:
            self.closed = True
            self._lock.notify_all()

    # ---- what goes out -----------------------------------------------------------------------------------------------
    def wait(self, seen: int, timeout_s: float) -> int:
        """The version, once it is another than `seen` or the time is up."""
        with self._lock:
            self._lock.wait_for(lambda: self.closed or self.version != seen, timeout_s)
            return self.version

    def state(self, *, series: bool = True) -> dict[str, Any]:
        """Everything but the timelines; `series`: with the curves."""
        with self._lock:
            if self._adopted is not None:
                found = dict(self._adopted[0])
                if not series:
                    found.pop("series", None)
                return found
            last = self._history[-1] if self._history else None
            found = {
                "version": self.version,
                "timeline_version": self._timeline_version,
                "run": dict(self._run),
                "last": None if last is None else dict(last),
                **self._extra,
                "events": sorted(self._events, key=lambda event: float(event["time"]))[0 if series else -STREAMED :],
                "whatif": self.job is not None,
            }
            if series:
                found["coast"] = "" if self.model is None else self.model.coast
                found["series"] = {key: [step.get(key) for step in self._history] for key in SERIES}
            return found

    def timeline_json(self) -> bytes:
        """The page's timelines: `{"version", "header", "spans"}`; made once for each version."""
        with self._lock:
            if self._adopted is not None:
                return self._adopted[1]
            if self._timeline_body is None or self._timeline_body[0] != self._timeline_version:
                self._timeline_body = (self._timeline_version, self._packed())
            return self._timeline_body[1]

    # ---- inside ------------------------------------------------------------------------------------------------------
    def _bump(self) -> None:
        self.version += 1
        self._lock.notify_all()

    def _packed(self) -> bytes:
        drawn = [] if self._measured is None else [self._measured]
        if self.model is not None:
            count = 1 if self._measured is None else self._measured.program.num_iterations
            step = None if self._measured is None else self._measured.meta.get("last_step")
            drawn.insert(0, self.model.predicted(count, step if isinstance(step, int) else None))
        if not drawn:
            return json.dumps({"version": self._timeline_version, "header": None, "spans": []}).encode()
        header, spans = page_data(drawn, title=str(self._run["name"]))
        if len(drawn) > 1:
            for words, described in zip(("predicted", "measured"), header["schedules"], strict=True):
                described["name"] = f"{words}: {described['name']}"
        return json.dumps({"version": self._timeline_version, "header": header, "spans": spans}).encode()

    def _measure(self, timeline: Timeline, last: Timeline) -> None:
        before = self._last
        self._measured, self._last = timeline, last
        self._timeline_version += 1
        if before is None or shape_of(before.program) != shape_of(last.program):
            self._new_model(last)
        self._run["source"] = timeline.source
        figures = summary(last)
        self._run["utilization"], self._run["iteration_s"] = figures["utilization"], figures["iteration_s"]
        total = last.makespan_ns / 1e9 * last.program.num_workers
        self._extra["bubbles"] = {cause: s / total if total else 0.0 for cause, s in figures["bubbles_s"].items()}

    def _new_model(self, timeline: Timeline | None) -> None:
        """The prediction, from the Program that runs."""
        if self.job is None:
            return
        program = timeline.program if timeline is not None and timeline.program.num_iterations == 1 else None
        facts = self.facts
        tcp: Tcp = "one" if facts.get("tcp") == "one" else "many"
        try:
            self.model = RunModel(
                self.job, str(facts.get("schedule")), tcp, slower=int(facts.get("slower") or 1), program=program
            )
        except AtlasError as error:
            self.model = None
            self._event("warning", f"no prediction: {error}", None)
            return
        if timeline is not None and shape_of(timeline.program) != shape_of(self.model.case):
            what = "pipelines, stages, microbatches or placement"
            self._event("warning", f"run and job differ in {what}: the prediction shown is that of the job", None)
        self._predict(self.model)

    def _predict(self, model: RunModel, order: str = "first") -> None:
        """The figures of a prediction. `order`: the `first` one, or the one that was `searched`."""
        self.model, row = model, model.row
        kept = ("utilization", "mfu", "tokens_per_s", "bubbles_s", "num_gpus", "fits", "num_workers")
        figures = {"iteration_s": model.iteration_s, **{key: row[key] for key in kept}}
        self._extra["predicted"] = {**figures, "order": order}
        self._run["source"] = self._run.get("source") or "simulated"
        self._timeline_version += 1
        self._look()

    def _step(self, event: Mapping[str, Any]) -> None:
        seconds = _number(event.get("iteration_s")) or 0.0
        step = dict(event)
        step["tokens_per_s"] = (_number(event.get("tokens")) or 0.0) / seconds if seconds else None
        step.setdefault("mfu", None)
        if step["mfu"] is None and self.model is not None and self.facts.get("device") == "paced" and seconds:
            # Paced devices take the job's durations: its MFU, at the measured iteration time.
            step["mfu"] = self.model.row["mfu"] * self.model.iteration_s / seconds
        while self._history and self._history[-1]["step"] >= step["step"]:
            self._history.pop()  # a restart does some steps again; a new run in this folder all of them
        self._history.append(step)
        self._run["status"] = "running"
        replaced, resent = event.get("wan_streams_replaced") or 0, event.get("wan_chunks_resent") or 0
        at = _number(event.get("time"))
        if replaced:
            text = f"step {event['step']}: {replaced} connections lost and replaced, {resent} chunks sent again"
            self._event("warning", text, at)
        predicted = _number(event.get("predicted_s"))
        if self._num_groups > 1 and predicted and self._extra["predicted"] is not None:
            # The run's own prediction is of all groups; the page's model is of one.
            whole = {"iteration_s": predicted, "tokens_per_s": (_number(event.get("tokens")) or 0.0) / predicted}
            self._extra["predicted"] = {**self._extra["predicted"], **whole}
        off = seconds / predicted - 1 if predicted and seconds else 0.0
        if (off > DRIFT) != self._drifts and predicted:
            self._drifts = off > DRIFT
            text = f"{off:+.0%} against the prediction" if self._drifts else "as predicted again"
            self._event("warning" if self._drifts else "note", f"step {event['step']}: {seconds:.3g} s, {text}", at)

    def _event(self, kind: str, text: str, at: float | None) -> None:
        if kind == "begin":
            self._run["status"] = "running"
        elif kind == "end":
            self._run["status"] = "ended"
        self._events.append({"time": time.time() if at is None else at, "kind": kind, "text": text})

    def _attempts(self, record: Mapping[str, Any]) -> None:
        """From `run.json`: goodput, checkpoints, and how attempts ended where there is no log of events."""
        attempts = [one for one in record.get("attempts", ()) if isinstance(one, dict)]
        self._run["goodput_steps_per_s"] = record.get("goodput_steps_per_s")
        self._run["attempts"] = len(attempts)
        self._run["steps"] = self._run.get("steps") or record.get("steps")
        self._run["checkpoints"] = [step for one in attempts for step in one.get("checkpoints", ())][-CHECKPOINTS:]
        ended = bool(attempts) and "ended" in attempts[-1]
        if ended:
            self._run["status"], self._run["reason"] = "ended", attempts[-1].get("reason")
        if self._events:
            return
        for one in attempts:
            hosts = ", ".join(one.get("hosts") or ())
            where = f" on {hosts}" if hosts else ""
            self._event("begin", f"attempt {one.get('attempt')} begins{where}", _number(one.get("began")))
            if "ended" in one:
                text = f"attempt {one.get('attempt')} ends after step {one.get('last_step')}: {one.get('reason')}"
                self._event("end", text, _number(one.get("ended")))

    def _look(self) -> None:
        """The map, the links and the sentence, at the last measured iteration."""
        last = self._history[-1] if self._history else {}
        seconds = _number(last.get("iteration_s"))
        if seconds is None and self._measured is not None:
            seconds = self._measured.iteration_ns / 1e9
        if self.model is not None:
            took = transfer_times_ms(self._last) if self._last is not None else None
            self._extra["links"] = self.model.links(seconds, took)
            self._extra["map"] = self.model.map(self._extra["links"])
        if self._last is not None:
            self._extra["verdict"] = verdict([self._last])
        elif self.model is not None:
            self._extra["verdict"] = verdict([self.model.result.single])


class ClosedPageError(AtlasError):
    """The page was closed during a search."""


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
