"""Follows connected workers from the start signal to the last result: reports every step that all have finished,
confirms complete checkpoints, names the cause of a stall, and stops all workers after the same step.

Knows a worker group and its Program. Does not know where the workers run, or what follows a failure.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from atlas.cost.table import Costs
from atlas.errors import START_AGAIN, DivergedRunError, StopSignal, WorkerError
from atlas.ir.program import Program
from atlas.ir.timeline import Timeline
from atlas.launch.clocks import offsets_ns
from atlas.launch.measured import RunClock, WorkerRecords
from atlas.launch.report.events import OnStep, StepEvent
from atlas.launch.worker_processes import WorkerGroup
from atlas.runtime.links import PeerAddress
from atlas.runtime.topology import PeerLink, WorkerRole
from atlas.wan.transport.base import Address
from atlas.wan.transport.stream_slot import Faults

log = logging.getLogger("atlas.launch")
HEADSTART_NS = 500_000_000
"""From the start signal to the first op: longer than a message takes to any datacenter."""
STALL_S, STALL_ITERATIONS = 5.0, 4
"""No step for this long, and for as many iterations, is a stall: all workers are asked what they wait for."""
ANSWER_S = 1.0
"""What workers may take to say what they wait for."""
POLL_S = 0.25
"""Between two checks whether a step has finished."""


@dataclass(frozen=True)
class RunOutcome:
    """How a run ended that did not fail."""

    num_done: int
    """Steps of the whole run."""
    losses: list[float]
    """Of the steps of this attempt."""
    sentence: str
    exit_code: int = 0
    """Of `atlas train`: 130 where a user stopped it before the last step, 75 where a scheduler did."""
    results: dict[str, Any] = field(default_factory=dict)
    """By worker."""
    paused: bool = False
    """Whether it was stopped to continue on other hosts."""


class PauseError(Exception):
    """All workers are to stop after a common step, with a checkpoint."""


def interrupt_code(interrupt: KeyboardInterrupt) -> int:
    """The exit code after Ctrl-C, or after a scheduler's signal."""
    return START_AGAIN if isinstance(interrupt, StopSignal) else 130


def connect_workers(
    workers: WorkerGroup,
    roles: list[WorkerRole],
    *,
    links_of: Callable[[WorkerRole], list[PeerLink]],
    address_of: Callable[[WorkerRole, PeerLink], Address | None],
) -> None:
    """Send every worker the addresses of its peers. Where a worker cannot dial a peer, the peer dials for it."""
    channels: dict[str, list[PeerAddress]] = {role.node: [] for role in roles}
    dial_for: dict[str, list[PeerAddress]] = {role.node: [] for role in roles}
    by_node = {role.node: role for role in roles}
    for role in roles:
        for link in links_of(role):
            host, port = address_of(role, link) or (None, 0)
            channels[role.node].append((link.end, link.peer, link.lane, host, port))
            if host is None:
                back = PeerLink(link.peer_end, role.node, link.end, link.lane)
                host, port = address_of(by_node[link.peer], back) or (None, 0)
                dial_for[link.peer].append((back.end, back.peer, back.lane, host, port))
    for role in roles:
        workers.send(role.name, {"channels": channels[role.node], "dial_for": dial_for[role.node]})


@dataclass
class RunMonitor:
    """Call `play` once all workers are connected, or `rejoin` where they run already."""

    workers: WorkerGroup
    program: Program
    costs: Costs
    first_step: int
    silence_s: float
    """Fail when no worker sends anything for this long."""
    saves: bool = False
    copies: bool = False
    """Whether checkpoints are complete only when they are copied to another datacenter."""
    say: Callable[[str], None] = log.warning
    on_step: OnStep | None = None
    on_done: Callable[[int], None] = lambda num_done: None
    """Called with the number of steps that all have finished, after they are reported: a coordinator that is
    killed in between reports a step twice rather than never."""
    may_pause: Callable[[], bool] = lambda: False
    """Asked when a checkpoint is complete, or after a step where none is written on the way: whether to stop all
    workers after a common step, with a checkpoint, to continue on other hosts."""
    saves_on_the_way: bool = True
    predicted_s: float | None = None
    """Simulated seconds of an iteration."""
    sent_bytes: Callable[[], int] | None = None
    """Bytes sent over the WAN so far, where the launcher can count them."""
    headstart_ns: int = HEADSTART_NS
    on_start: Callable[[int], None] | None = None
    """Called by `play` with the moment of the first op (`time.monotonic_ns`), before it."""
    source: Literal["emulated", "measured"] = "measured"
    keep_all: bool = False
    """Whether the records of all passes are kept, or of the last one only."""

    def __post_init__(self) -> None:
        self.num_done = self.first_step
        self.records = WorkerRecords(self.program)
        self._clock: RunClock | None = None
        self._num_reports: Counter[int] = Counter()
        self._next_step = dict.fromkeys(self.workers.names, self.first_step)
        self._num_passes = 0
        self._last_end_ns: int | None = 0
        self._last_bytes, self._last_faults = 0, Faults()
        self._written: dict[tuple[int, int], set[str]] = {}
        self._complete: set[tuple[int, int]] = set()
        self._can_pause = False
        self._watch = _StallWatch(self)

    def play(self) -> RunOutcome:
        """Start all workers at one moment and follow them to the end. Ctrl-C stops them after a common step where the
        run is saved; a second one stops them at once."""
        offsets = offsets_ns(self.workers)
        zero_ns = time.monotonic_ns() + self.headstart_ns
        self._begin(zero_ns, offsets)
        if self.on_start is not None:
            self.on_start(zero_ns)
        for name in self.workers.names:
            self.workers.send(name, {"start_ns": zero_ns + offsets[name]})
        return self._follow()

    def rejoin(self, zero_ns: int, offsets: Mapping[str, int]) -> RunOutcome:
        """Follow workers that run already since `zero_ns`, from `first_step` on. Messages that an earlier monitor has
        handled are ignored."""
        self._begin(zero_ns, offsets)
        self._last_end_ns = None  # of a step that the earlier monitor reported
        return self._follow()

    def _begin(self, zero_ns: int, offsets: Mapping[str, int]) -> None:
        names = self.workers.names[: self.program.num_workers]
        self._clock = RunClock(names, self.costs, zero_ns, offsets, source=self.source)
        self._last_bytes = self.sent_bytes() if self.sent_bytes is not None else 0

    def _follow(self) -> RunOutcome:
        code, paused = 0, False
        with self._watch:
            try:
                self._can_pause = self.saves
                results = self.workers.wait_for("result", self.silence_s, meanwhile=self.note)
            except PauseError:
                results, paused = self._stop(), True
            except KeyboardInterrupt as interrupt:
                if not self.saves:
                    raise
                self.say("stopping after this step, with a checkpoint; interrupt again to stop at once")
                results, code = self._stop(), interrupt_code(interrupt)
            except DivergedRunError as error:
                raise DivergedRunError(f"{error}. {self._after_divergence(error.step)}", error.step) from None
        losses = self.records.losses()
        sentence = self._sentence(losses, stopped=code != 0)
        return RunOutcome(self.num_done, losses, sentence, code, results, paused)

    @property
    def saved_steps(self) -> list[int]:
        """Steps whose checkpoint became complete in this attempt."""
        return sorted(step for _, step in self._complete)

    def _after_divergence(self, step: int) -> str:
        """Which checkpoint is good, and what to change. A checkpoint is known to be good when the step after it was
        finite."""
        change = "Lower learning_rate.peak, lengthen learning_rate.warmup, or set clip"
        saved = {done for _, done in self._complete} | ({self.first_step} if self.saves and self.first_step else set())
        good = max((done for done in saved if done <= step - 2), default=None)
        if good is None:
            return f"{change}, and start again: no checkpoint from before step {step} is known to be good"
        suspect = [done for done in sorted(saved) if good < done < step]
        delete = f" (first delete the later save of step {suspect[0]}: it may be damaged)" if suspect else ""
        return f"The last good checkpoint is of step {good}. {change}: the same command resumes from there{delete}"

    def timeline(self, meta: dict[str, Any]) -> Timeline:
        """Of all passes whose records are kept."""
        assert self._clock is not None, "play comes first"
        self._clock.meta.update(meta)
        return self.records.timeline(self._clock)

    def _sentence(self, losses: list[float], *, stopped: bool) -> str:
        done = f"step {self.num_done} is done" if self.num_done else "no step was done"
        done += f", loss {losses[-1]:.4f}" if losses else ""
        if not self.saves:
            return done
        saved = max((step for _, step in self._complete), default=None)
        if saved != self.num_done:
            last = (
                f"the last complete checkpoint is of step {saved}" if saved is not None else "no checkpoint is complete"
            )
            return f"{done}, but it could not be saved everywhere: {last}"
        return f"{done} and saved" + (": the same command resumes from there" if stopped else "")

    def _stop(self) -> dict[str, Any]:
        """Stop all workers after the same step: they run ahead of each other, so each first reports its step."""
        results: dict[str, Any] = {}

        def meanwhile(name: str, message: dict[str, Any]) -> bool:
            if "result" in message:
                results[name] = message["result"]
            return "result" in message or self.note(name, message)

        self._can_pause = False
        self.workers.send_all({"stop": True})
        begun = self.workers.wait_for("stopping", self.silence_s, meanwhile=meanwhile)
        self.workers.send_all({"last_step": max(begun.values()) - 1})
        late = [name for name in self.workers.names if name not in results]
        return results | self.workers.wait_for("result", self.silence_s, of=late, meanwhile=self.note)

    # ---- messages of workers -----------------------------------------------------------------------------------------
    def note(self, name: str, message: dict[str, Any]) -> bool:
        """Handle a message that may arrive at any time; whether it was one."""
        if "step" in message:
            self._note_step(name, message)
        elif "saved" in message or "copied" in message:
            self._note_saved(name, message)
        elif "waits_for" in message:
            self._watch.note(name, message["waits_for"])
        return not message.keys().isdisjoint({"step", "saved", "copied", "waits_for"})

    def _note_step(self, name: str, message: dict[str, Any]) -> None:
        first = message["step"]
        if first < self._next_step[name]:
            return  # received twice: the coordinator was started again
        self._next_step[name] = first + self.program.num_iterations
        self.records.add(name, message)
        self._num_reports[first] += 1
        if self._num_reports[first] < len(self.workers.names):
            return
        del self._num_reports[first]
        self.num_done = first + self.program.num_iterations
        self._report(self._num_passes - self.records.num_forgotten)
        self.on_done(self.num_done)
        self._num_passes += 1
        if not self.keep_all and self._num_passes > 1:
            self.records.forget_pass()
        if self._can_pause and not self.saves_on_the_way and self.may_pause():
            raise PauseError

    def _report(self, number: int) -> None:
        """Report the pass `number` of those that are kept."""
        assert self._clock is not None
        timeline = self.records.timeline(self._clock, number, number + 1)
        end_ns, faults = int(timeline.op_end_ns.max()), self.records.faults
        begin_ns = int(timeline.op_start_ns.min()) if self._last_end_ns is None else self._last_end_ns
        seconds, new_faults = (end_ns - begin_ns) / 1e9, faults.since(self._last_faults)
        self._last_end_ns, self._last_faults = end_ns, faults
        self._watch.moved(seconds)
        if self.on_step is None:
            return
        steps = [steps[number] for steps in self.records.by_worker.values()]
        losses = [loss for step in steps for loss in step["losses"]]
        event: StepEvent = {
            "step": self.num_done,
            "loss": math.fsum(losses) / len(losses),
            "tokens": sum(step["tokens"] for step in steps),
            "iteration_s": seconds,
            "num_workers": len(self.workers.names),
            "predicted_s": self.predicted_s,
            "wan_streams_replaced": new_faults.num_replaced,
            "wan_chunks_resent": new_faults.num_resent,
            "wan_retransmits": sum(step.get("retransmits", 0) for step in steps),
        }
        if self._complete:
            event["checkpoint_step"] = self.saved_steps[-1]
        if self.sent_bytes is not None:
            before, self._last_bytes = self._last_bytes, self.sent_bytes()
            event["wan_gbit_s"] = (self._last_bytes - before) * 8e-9 / seconds if seconds > 0 else None
        facts = {
            key: {name: found[number].get(key) for name, found in self.records.by_worker.items()}
            for key in ("peak_bytes", "compiled")
        }
        self.on_step(event, replace(timeline, meta={**timeline.meta, **facts}))

    def _note_saved(self, name: str, message: dict[str, Any]) -> None:
        """A checkpoint that all workers have written, and copied where required, is complete: older ones may go."""
        if ("copied" in message) != self.copies:
            return
        attempt, step = message["copied" if self.copies else "saved"]
        writers = self._written.setdefault((attempt, step), set())
        writers.add(name)
        if len(writers) == len(self.workers.names):
            self._complete.add((attempt, step))
            self.workers.send_all({"complete": [[attempt, step]]})
            if self._can_pause and self.may_pause():
                raise PauseError


class _StallWatch:
    """When no step finishes, asks all workers what they wait for, and reports it once."""

    def __init__(self, monitor: RunMonitor) -> None:
        self._monitor = monitor
        self._moved, self._iteration_s = time.monotonic(), monitor.predicted_s or 0.0
        self._answers: dict[str, str] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="stall watch")

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
        reported = 0.0
        while not self._ended.wait(POLL_S):
            limit_s = max(STALL_S, STALL_ITERATIONS * self._iteration_s)
            if self._moved != reported and time.monotonic() - self._moved > limit_s:
                reported = self._moved
                self._ask(limit_s)

    def _ask(self, limit_s: float) -> None:
        self._answers.clear()
        workers = self._monitor.workers
        for name in workers.names:
            with contextlib.suppress(WorkerError):  # its launcher does not read: it is reported as not answering
                workers.send(name, {"waits_for": True})
        if self._ended.wait(ANSWER_S):
            return
        silent = [workers.title(name) for name in workers.names if name not in self._answers]
        words = [f"no step for {limit_s:.0f} s"]
        if silent:
            words.append(f"{' and '.join(silent)} {'does' if len(silent) == 1 else 'do'} not answer")
        waits = [what for what in self._answers.values() if what][:3]
        if not waits and not silent:
            waits = ["no worker waits for a peer: all compute"]
        words += waits
        self._monitor.say("; ".join(words))
