"""The workers of one life, from the order to start to the last result: every step as all have told it, saves that are
complete, who waits for whom when nothing moves, and the end after one and the same step.

Knows a fleet of any kind and the work it does. Where the workers run, and what is done after a failure, others know.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from atlas.errors import WorkerError
from atlas.ir.timeline import Timeline
from atlas.launch.clocks import offsets_ns
from atlas.launch.measured import Records, RunClock
from atlas.launch.prepared_job import PreparedJob
from atlas.launch.report.events import StepEvent
from atlas.launch.worker_processes import WorkerGroup

HEADSTART_NS = 500_000_000
"""From the last order to the first op: longer than an order takes to any datacenter."""
COPY_S = 60.0
STUCK_S = 5.0
"""Nothing moves for so long, and for several iterations: then it is asked who waits for whom."""
STUCK_ITERATIONS = 4
ANSWER_S = 1.0

OnStep = Callable[[StepEvent, Timeline], None]


@dataclass(frozen=True)
class RunOutcome:
    """How a life ended that was not cut short."""

    num_done: int
    """Steps of the whole run."""
    losses: list[float]
    """Of the steps of this life."""
    sentence: str
    stopped: bool = False
    """Before the last step, because somebody asked for it."""


@dataclass
class RunMonitor:
    """`play` once all workers are connected."""

    crew: WorkerGroup
    work: PreparedJob
    first_step: int
    silence_s: float
    """Nothing at all may be heard for at most so long."""
    saves: bool
    copies: bool
    say: Callable[[str], None]
    tell: OnStep | None = None
    num_done: int = 0
    losses: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.num_done = self.first_step
        self._passes: dict[int, Records] = {}
        self._written: dict[tuple[int, int], set[str]] = {}
        self._complete: set[tuple[int, int]] = set()
        self._view: RunClock | None = None
        self._last_end_ns = 0
        self._watch = _StallWatch(self)

    def play(self) -> RunOutcome:
        offsets = offsets_ns(self.crew)
        zero_ns = time.monotonic_ns() + HEADSTART_NS
        names = self.crew.names[: self.work.program.num_workers]
        self._view = RunClock(names, self.work.costs, zero_ns, offsets)
        for name in self.crew.names:
            self.crew.tell(name, {"start_ns": zero_ns + offsets[name]})
        stopped = False
        with self._watch:
            try:
                self.crew.hear("result", self.silence_s, meanwhile=self.note)
            except KeyboardInterrupt:
                if not self.saves:
                    raise
                self.say("stopping after this step, with a checkpoint; again to stop at once")
                self._stop()
                stopped = True
        return RunOutcome(self.num_done, self.losses, self._sentence(stopped=stopped), stopped)

    def _sentence(self, *, stopped: bool) -> str:
        done = f"step {self.num_done} is done, loss {self.losses[-1]:.4f}" if self.losses else "nothing was done"
        if not self.saves:
            return done
        saved = max((step for _, step in self._complete), default=None)
        if saved != self.num_done:
            last = (
                f"the last complete checkpoint is of step {saved}" if saved is not None else "no checkpoint is complete"
            )
            return f"{done}, but it could not be saved everywhere: {last}"
        return f"{done} and saved" + (": the same command goes on from there" if stopped else "")

    def _stop(self) -> None:
        """Ends all workers after one and the same step."""
        results: dict[str, Any] = {}

        def meanwhile(name: str, message: dict[str, Any]) -> bool:
            if "result" in message:
                results[name] = message["result"]
            return "result" in message or self.note(name, message)

        for name in self.crew.names:
            self.crew.tell(name, {"stop": True})
        begun = self.crew.hear("stopping", self.silence_s, meanwhile=meanwhile)
        for name in self.crew.names:
            self.crew.tell(name, {"last_step": max(begun.values()) - 1})
        late = [name for name in self.crew.names if name not in results]
        self.crew.hear("result", self.silence_s, of=late, meanwhile=self.note)

    # ---- what they say -----------------------------------------------------------------------------------------------
    def note(self, name: str, message: dict[str, Any]) -> bool:
        """What comes at any time; whether it was that."""
        if "step" in message:
            self._note_step(name, message)
        elif "saved" in message or "copied" in message:
            self._note_saved(name, message)
        elif "where" in message:
            self._watch.note(name, message["where"])
        return not message.keys().isdisjoint({"step", "saved", "copied", "where"})

    def _note_step(self, name: str, message: dict[str, Any]) -> None:
        first = message["step"]
        records = self._passes.setdefault(first, Records(self.work.program))
        records.add(name, message)
        if len(records.by_worker) < len(self.crew.names):
            return
        del self._passes[first]
        self.num_done = first + self.work.program.num_iterations
        found = records.losses()
        self.losses += found
        assert self._view is not None
        timeline = records.timeline(self._view)
        end_ns = int(timeline.op_end_ns.max())
        seconds, self._last_end_ns = (end_ns - self._last_end_ns) / 1e9, end_ns
        self._watch.moved(seconds)
        if self.tell is not None:
            tokens = sum(step["tokens"] for steps in records.by_worker.values() for step in steps)
            event: StepEvent = {
                "step": self.num_done,
                "loss": math.fsum(found) / len(found),
                "tokens": tokens,
                "iteration_s": seconds,
                "predicted_s": self.work.predicted_s,
                "wan_streams_replaced": records.faults.num_replaced,
                "wan_chunks_resent": records.faults.num_resent,
            }
            self.tell(event, replace(timeline, source="measured"))

    def _note_saved(self, name: str, message: dict[str, Any]) -> None:
        """A save that everybody has written, and copied where it is to be, lets older ones go."""
        if ("copied" in message) != self.copies:
            return
        attempt, step = message["copied" if self.copies else "saved"]
        writers = self._written.setdefault((attempt, step), set())
        writers.add(name)
        if len(writers) == len(self.crew.names):
            self._complete.add((attempt, step))
            for other in self.crew.names:
                self.crew.tell(other, {"complete": [[attempt, step]]})


class _StallWatch:
    """Asks all workers what they wait for when nothing moves, and says it once."""

    def __init__(self, lead: RunMonitor) -> None:
        self._lead = lead
        self._moved, self._iteration_s = time.monotonic(), 0.0
        self._answers: dict[str, str] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="watch")

    def __enter__(self) -> _StallWatch:
        self._moved = time.monotonic()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def moved(self, seconds: float) -> None:
        self._moved, self._iteration_s = time.monotonic(), max(self._iteration_s, seconds)

    def note(self, name: str, waits_for: str) -> None:
        self._answers[name] = waits_for

    def _run(self) -> None:
        told = 0.0
        while not self._ended.wait(0.25):
            limit_s = max(STUCK_S, STUCK_ITERATIONS * self._iteration_s)
            if self._moved != told and time.monotonic() - self._moved > limit_s:
                told = self._moved
                self._ask(limit_s)

    def _ask(self, limit_s: float) -> None:
        self._answers.clear()
        for name in self._lead.crew.names:
            with contextlib.suppress(WorkerError):  # its launcher does not read: it is one of those that do not answer
                self._lead.crew.tell(name, {"where": True})
        if self._ended.wait(ANSWER_S):
            return
        crew = self._lead.crew
        silent = [crew.title(name) for name in crew.names if name not in self._answers]
        waits = [what for what in self._answers.values() if what]
        words = [f"no step for {limit_s:.0f} s"]
        if silent:
            words.append(f"{' and '.join(silent)} {'does' if len(silent) == 1 else 'do'} not answer")
        words += waits[:3] or ["nobody waits for a peer: it computes"]
        self._lead.say("; ".join(words))
