"""Iteration time for very many microbatches from a few, only where this is exact; otherwise all are simulated.

With constant rates, what happens next depends on the distances between recent events, not on their absolute times.
Suppose the schedule of M + p microbatches is that of M with p inserted in the middle, and in the middle every op and
transfer of microbatch m + p comes exactly `shift` after that of m, for longer than anything is in flight. Then the
state repeats, and p more microbatches shift everything after them by exactly `shift` again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from atlas.cost.table import Costs
from atlas.ir.program import PER_MICROBATCH, Ints, Program
from atlas.ir.timeline import Timeline
from atlas.sim.simulate import simulate

PERIODS = (1, 2, 3, 4, 6)


@dataclass(frozen=True, eq=False)
class Extrapolated:
    """A run of many microbatches, derived from one of few."""

    timeline: Timeline
    """Of few; of all that were asked for when nothing could be spared."""
    later_ns: int
    """How much later everything from its middle on happens in the full run."""

    @property
    def makespan_ns(self) -> int:
        return self.timeline.makespan_ns + self.later_ns


def extrapolate(
    build: Callable[[int], Program], costs: Costs, num_microbatches: int, *, in_full: int | None = None
) -> Extrapolated | None:
    """What `build(num_microbatches)` takes, from fewer microbatches where the schedule becomes periodic. Where it does
    not, all are simulated; None where they are more than `in_full`."""
    varies = any(link.trace is not None and len(link.trace.at_ns) > 1 for link in costs.links)
    for period in () if varies else PERIODS:
        few = _enough(build(1).num_stages, period)
        few += (num_microbatches - few) % period
        if few + 2 * period >= num_microbatches:
            break
        short, long = (simulate(build(few + k * period), costs) for k in (0, 1))
        shift = _steady_shift(short, long, period)
        if shift is not None:
            return Extrapolated(long, ((num_microbatches - few) // period - 1) * shift)
    if in_full is not None and num_microbatches > in_full:
        return None
    return Extrapolated(simulate(build(num_microbatches), costs), 0)


def _enough(num_stages: int, period: int) -> int:
    """Microbatches that let the pipeline fill, repeat for longer than anything is in flight, and drain."""
    return 8 * num_stages + 8 * period + 8


def _steady_shift(short: Timeline, long: Timeline, period: int) -> int | None:
    """By how much `period` more microbatches delay the end, if they do nothing else; None if they do."""
    cut = _inserted_at(short.program, long.program, period)
    if cut is None:
        return None
    a, b = _times(short), _times(long)
    num_mb, in_flight = short.program.num_microbatches, short.program.peak_in_flight
    first = num_mb // 2 - in_flight
    if first < period or cut < first + in_flight + period:
        return None
    shift = int(b[0, -1] - a[0, -1])
    repeats = (
        b[:, first + period : first + in_flight + 2 * period] - b[:, first : first + in_flight + period]
    ) == shift
    follows = (b[:, first + period :] - a[:, first:]) == shift
    same = b[:, : first + period] == a[:, : first + period]
    return shift if repeats.all() and follows.all() and same.all() else None


def _times(timeline: Timeline) -> Ints:
    """[row, m]: the end of every kind on every worker, and the arrival on every channel, by microbatch."""
    program = timeline.program
    rows = []
    for kind in PER_MICROBATCH:
        index = program.op_index[kind].reshape(-1, program.num_slots)
        rows.append(timeline.op_end_ns[index[index[:, 0] >= 0]])
    rows.append(timeline.transfer_arrive_ns.reshape(-1, program.num_slots))
    return np.concatenate(rows)


def _inserted_at(short: Program, long: Program, period: int) -> int | None:
    """The first microbatch before which the longer Program is the shorter one with `period` more put in between."""
    earliest = short.num_microbatches
    for w in range(short.num_workers):
        a, b = (np.array(program.ops(w)) for program in (short, long))
        moved = a + np.array([0, 0, period])
        differ = np.flatnonzero((a != b[: len(a)]).any(axis=1))
        cut = int(differ[0]) if differ.size else len(a)
        if not np.array_equal(moved[cut:], b[len(b) - len(a) + cut :]):
            return None
        earliest = min(earliest, int(a[cut:, 2].min(initial=earliest)))
    return earliest
