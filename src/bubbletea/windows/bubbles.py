"""Timeline -> the windows of one period of training, by worker; and the Forecast that repeats them into the future.

A Pattern follows from the schedule. A Forecast is the Pattern for every cell, corrected by the observed windows
(`learn`) and reduced by margins that keep training within its slowdown budget. Knows no prefill.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from atlas.errors import AtlasError
from atlas.ir.program import USEFUL, Ints
from atlas.ir.timeline import Timeline
from bubbletea.constants import SLOWDOWN_BUDGET
from bubbletea.windows.learn import Learner

UNLIMITED_BYTES = 2**62
"""Memory of workers whose memory does not matter."""
SWITCH_NS = 100_000
"""Subtracted from every window: from the end of an op to the first kernel of a slice, and back."""
MAX_RISK = 0.25
"""Largest risk: at least three of four windows are as long as forecast."""
CLOSED = 0.1
"""Of a worker's average windows: if its margins leave less, they are not used."""


@dataclass(frozen=True, eq=False)
class Pattern:
    """One period. Windows of worker w are `ptr[w] : ptr[w + 1]`; their times count from the worker's `phase_ns`, the
    start of its first op of the period, so that no window crosses the end of the period."""

    period_ns: int
    phase_ns: Ints
    ptr: Ints
    start_ns: Ints
    end_ns: Ints
    worker_dc: tuple[str, ...]
    memory_bytes: Ints
    """By worker: the arena that training leaves to prefill."""

    @classmethod
    def of_windows(
        cls,
        windows: Sequence[Sequence[tuple[int, int]]],
        period_ns: int,
        worker_dc: Sequence[str],
        memory_bytes: int | Ints,
    ) -> Pattern:
        """From each worker's windows (start, end), counted from the start of the period."""
        starts, ends = ([window[k] for own in windows for window in own] for k in (0, 1))
        return cls(
            period_ns=period_ns,
            phase_ns=np.zeros(len(windows), np.int64),
            ptr=np.cumsum([0, *map(len, windows)], dtype=np.int64),
            start_ns=np.array(starts, np.int64),
            end_ns=np.array(ends, np.int64),
            worker_dc=tuple(worker_dc),
            memory_bytes=np.full(len(windows), memory_bytes, np.int64),
        )

    @property
    def num_workers(self) -> int:
        return len(self.worker_dc)

    @property
    def idle_ns(self) -> Ints:
        """By worker: the sum of its windows."""
        total = np.concatenate([np.zeros(1, np.int64), np.cumsum(self.end_ns - self.start_ns)])
        return np.asarray(total[self.ptr[1:]] - total[self.ptr[:-1]], np.int64)

    @property
    def busy_ns(self) -> int:
        """Compute time of training in one period, over all workers."""
        return self.period_ns * self.num_workers - int(self.idle_ns.sum())

    def only(self, workers: Sequence[int]) -> Pattern:
        """Of these workers, in this order."""
        kept = np.concatenate([np.arange(self.ptr[w], self.ptr[w + 1]) for w in workers])
        chosen = np.asarray(workers, np.int64)
        return replace(
            self,
            phase_ns=self.phase_ns[chosen],
            ptr=np.concatenate([np.zeros(1, np.int64), np.cumsum(np.diff(self.ptr)[chosen])]),
            start_ns=self.start_ns[kept],
            end_ns=self.end_ns[kept],
            worker_dc=tuple(self.worker_dc[w] for w in workers),
            memory_bytes=self.memory_bytes[chosen],
        )

    def replicated(self, cells: int) -> Pattern:
        """The same for every cell: all cells run the same timeline at the same time."""
        count = len(self.start_ns)
        steps = (np.arange(cells)[:, None] * count + self.ptr[None, :-1]).ravel()
        return replace(
            self,
            phase_ns=np.tile(self.phase_ns, cells),
            ptr=np.append(steps, cells * count).astype(np.int64),
            start_ns=np.tile(self.start_ns, cells),
            end_ns=np.tile(self.end_ns, cells),
            worker_dc=self.worker_dc * cells,
            memory_bytes=np.tile(self.memory_bytes, cells),
        )


class WorkerGaps(NamedTuple):
    """The windows of one worker in the last period of a Timeline, and the ops around them."""

    phase_ns: int
    start_ns: Ints
    end_ns: Ints
    before: Ints
    """The op that ends where each window starts."""
    behind: Ints
    """The op that starts where it ends."""
    turned: NDArray[np.bool_]
    """Whether that is in the next period."""


def gaps_of(timeline: Timeline, worker: int, within: tuple[int, int]) -> WorkerGaps:
    """Gaps between the ops of one worker `within` the last period (`span`), counted from the start of the first; the
    last gap ends at the next period's first op. Without ops there is one gap, around no op."""
    program, (low_ns, high_ns) = timeline.program, within
    ops = np.arange(program.worker_ptr[worker], program.worker_ptr[worker + 1])
    begin, end = timeline.op_start_ns[ops], timeline.op_end_ns[ops]
    useful = np.isin(program.kind[ops], np.array(USEFUL, np.int8))
    inside = useful & (end > low_ns) & (begin < high_ns) & (end > begin)
    none, period = np.zeros(0, np.int64), high_ns - low_ns
    if not inside.any():
        return WorkerGaps(0, np.zeros(1, np.int64), np.array([period], np.int64), none, none, np.zeros(0, np.bool_))
    begin, end, ops = np.clip(begin[inside], low_ns, high_ns), np.clip(end[inside], low_ns, high_ns), ops[inside]
    order = np.argsort(begin, kind="stable")
    begin, reached, ops = begin[order], np.maximum.accumulate(end[order]), ops[order]
    after = np.append(begin[1:], begin[0] + period)
    open_, turned = after > reached, np.arange(len(ops)) == len(ops) - 1
    spans = ((reached - begin[0])[open_], (after - begin[0])[open_])
    return WorkerGaps(int(begin[0] - low_ns), *spans, ops[open_], np.roll(ops, -1)[open_], turned[open_])


def pattern_of(timeline: Timeline, memory_bytes: Ints | None = None) -> Pattern:
    """The idle spans of each worker's accelerator in the last period of a Timeline.

    A Timeline of one iteration is a period; of several, the last of them is, and so the steady state.
    """
    program = timeline.program
    if not program.num_ops:
        raise AtlasError("a timeline without ops has no period: simulate or run at least one iteration")
    low_ns, high_ns = span(timeline)
    found = [gaps_of(timeline, worker, (low_ns, high_ns)) for worker in range(program.num_workers)]
    room = np.full(program.num_workers, UNLIMITED_BYTES, np.int64) if memory_bytes is None else memory_bytes
    return Pattern(
        period_ns=high_ns - low_ns,
        phase_ns=np.array([gaps.phase_ns for gaps in found], np.int64),
        ptr=np.cumsum([0, *(len(gaps.start_ns) for gaps in found)], dtype=np.int64),
        start_ns=np.concatenate([gaps.start_ns for gaps in found]),
        end_ns=np.concatenate([gaps.end_ns for gaps in found]),
        worker_dc=tuple(program.worker_dc(w) for w in range(program.num_workers)),
        memory_bytes=np.asarray(room, np.int64),
    )


def observed_pattern(
    pattern: Pattern, period_ns: int, opened_ns: Ints, closed_ns: Ints, known_windows: NDArray[np.bool_]
) -> Pattern:
    """The Pattern of a run that is not as its plan predicts: with the period and the windows that were observed. Their
    times count from any moment of a period, the same for all workers."""
    ratio, phases = period_ns / pattern.period_ns, np.zeros_like(pattern.phase_ns)
    starts, ends = (pattern.start_ns * ratio).astype(np.int64), (pattern.end_ns * ratio).astype(np.int64)
    for worker, own in enumerate(map(slice, pattern.ptr[:-1].tolist(), pattern.ptr[1:].tolist())):
        opened, closed, known = opened_ns[own], closed_ns[own], known_windows[own]
        if not known.any():
            phases[worker] = int(pattern.phase_ns[worker] * ratio)
            continue
        phase = int(np.median((closed - ends[own])[known]))
        if known[-1] and pattern.end_ns[own][-1] >= pattern.period_ns:
            phase = int(closed[-1]) - period_ns  # its first op starts when its last window closes
        bounds = np.stack(
            [np.where(known, opened - phase, starts[own]), np.where(known, closed - phase, ends[own])], axis=1
        )
        bounds = np.clip(np.maximum.accumulate(bounds.ravel()), 0, period_ns)
        phases[worker], starts[own], ends[own] = phase, bounds[::2], bounds[1::2]
    return replace(pattern, period_ns=period_ns, phase_ns=phases, start_ns=starts, end_ns=ends)


def span(timeline: Timeline) -> tuple[int, int]:
    """Start and end of the last period."""
    low, high = int(timeline.op_start_ns.min()), int(timeline.op_end_ns.max())
    if timeline.program.num_iterations == 1:
        return low, high
    return high - timeline.iteration_ns, high


class Forecast:
    """Future windows: the corrected Pattern, repeated from `anchor_ns` on.

    `budget` is the share by which training may become slower. A window that ends early delays an op by at most one
    slice (each is checked before it starts), so the probability of that is chosen by the budget:
    budget * period / (windows of a worker * longest slice).

    `guarded`: workers predict their waits themselves (`prefill.guard`), so a forecast that is too long delays requests
    and not training. Then a worker whose margins leave it almost nothing gets its average windows: on a busy host some
    of its windows are closed and others are not, and a prompt takes as many of them as it needs.
    """

    def __init__(
        self,
        pattern: Pattern,
        *,
        anchor_ns: int = 0,
        budget: float = SLOWDOWN_BUDGET,
        slice_ns: int = 5_000_000,
        guarded: bool = False,
    ) -> None:
        if not 0 < budget < 1:
            raise AtlasError(
                f"a training slow-down budget of {budget!r} is not a share: give a number such as {SLOWDOWN_BUDGET}"
            )
        self.pattern, self.anchor_ns, self.period_ns = pattern, anchor_ns, pattern.period_ns
        self.budget, self.slice_ns, self.guarded = budget, slice_ns, guarded
        self.learner = Learner(len(pattern.start_ns))
        self.share = 1.0
        """The first part of every window that may be used."""
        self.version = 0
        """Increases whenever windows change."""

    @property
    def risk(self) -> float:
        """The probability that a window ends before its forecast end."""
        windows = max(1.0, len(self.pattern.start_ns) / self.pattern.num_workers)
        return min(MAX_RISK, self.budget * self.period_ns / (windows * self.slice_ns))

    def spans(self) -> tuple[Ints, Ints]:
        """Start of every window of the Pattern, corrected, and end of the part that may be used; a window shorter than
        its margins has length 0."""
        start, length = self._less(*self.learner.margins(self.risk))
        if self.guarded:
            usual_start, usual = self._less(*self.learner.averages())
            closed = self._by_worker(length) < CLOSED * self._by_worker(usual)
            start, length = np.where(closed, usual_start, start), np.where(closed, usual, length)
        return start, start + (self.share * length).astype(np.int64)

    def _less(self, late: Ints, early: Ints) -> tuple[Ints, Ints]:
        """Starts and lengths of all windows, less these margins."""
        start = self.pattern.start_ns + late + SWITCH_NS // 2
        end = self.pattern.end_ns + early - SWITCH_NS // 2
        return start, np.maximum(0, np.minimum(end, self.period_ns) - start)

    def _by_worker(self, length: Ints) -> Ints:
        """By window: the sum of all windows of its worker."""
        total = np.concatenate([np.zeros(1, np.int64), np.cumsum(length)])
        ptr = self.pattern.ptr
        found: Ints = np.repeat(total[ptr[1:]] - total[ptr[:-1]], np.diff(ptr))
        return found

    def use(self, share: float) -> None:
        """Only the first part of every window may be used from now on."""
        if share != self.share:
            self.share = share
            self.version += 1

    def observe(self, start_ns: int, first_ns: Ints, last_ns: Ints) -> None:
        """One observed period: its start, and when its windows opened and closed (absolute times in the Pattern's
        order; -1 if unknown)."""
        origin = start_ns + np.repeat(self.pattern.phase_ns, np.diff(self.pattern.ptr))
        known = (first_ns >= 0) & (last_ns >= 0)
        opened = np.where(known, first_ns - origin - self.pattern.start_ns, 0)
        closed = np.where(known, last_ns - origin - self.pattern.end_ns, 0)
        self.anchor_ns = start_ns
        self.learner.observe(opened, closed, known)
        self.version += 1

    def replan(self, pattern: Pattern, anchor_ns: int) -> None:
        """Another plan: observations of the old windows are dropped."""
        self.pattern, self.anchor_ns, self.period_ns = pattern, anchor_ns, pattern.period_ns
        self.learner = Learner(len(pattern.start_ns))
        self.version += 1
