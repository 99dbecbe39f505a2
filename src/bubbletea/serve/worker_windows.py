"""The windows of a training job's workers, from its Timeline, or of workers that do not train; and which window belongs
to which wait of a worker.

Knows Timelines; not requests, not sockets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from atlas.cost.table import Costs
from atlas.errors import AtlasError
from atlas.ir.program import USEFUL, Program
from atlas.ir.timeline import Timeline
from atlas.sim import simulate
from bubbletea.costs import LayerTime
from bubbletea.windows.bubbles import Pattern, gaps_of, pattern_of, span

LONGER = 0.1
"""Of all ops: the increase by which `sensitivity` is measured."""


@dataclass(frozen=True, eq=False)
class WorkerWindows:
    """`window_of[worker][op]`: the Pattern's window that ends when that op's input arrives."""

    pattern: Pattern
    window_of: Sequence[Mapping[int, int]]
    num_ranks: int
    pace: LayerTime | None = None
    """On paced devices: the time of a layer."""
    head_ns: int = 0
    layer: LayerTime | None = None
    """On other devices: the expected time of a layer until it is measured; None: it is timed on this host."""
    trains: bool = False
    """The workers train; prefill must not slow them."""
    sensitivity: float = 1.0
    """Relative increase of an iteration per relative increase of its ops; 1 if unknown."""
    numbers: tuple[int, ...] = ()
    """Of each worker: its number in the run."""
    plan: str = ""
    """The id of the run's Program; empty: workers of any run are taken."""
    device: str = ""
    """Of the workers: paced, cpu or cuda; empty: any."""

    def waits_ns(self, worker: int) -> dict[int, int]:
        """By op: its expected wait."""
        length_ns = self.pattern.end_ns - self.pattern.start_ns
        return {op: int(length_ns[window]) for op, window in self.window_of[worker].items()}


def of_training(
    timeline: Timeline,
    arena_bytes: int,
    pace: LayerTime | None = None,
    head_ns: int = 0,
    *,
    cells: int = 1,
    datacenter: str | None = None,
) -> WorkerWindows:
    """`timeline`: the simulated Timeline of the Program that the workers of each cell repeat. `datacenter`: only the
    workers there."""
    program = timeline.program
    one = pattern_of(timeline, np.full(program.num_workers, arena_bytes, np.int64))
    by_worker = [_windows_of(timeline, one, worker) for worker in range(program.num_workers)]
    numbers = [w for w in range(cells * program.num_workers) if datacenter in (None, one.worker_dc[w % len(by_worker)])]
    if not numbers:
        known = ", ".join(dict.fromkeys(one.worker_dc))
        raise AtlasError(f"--dc {datacenter}: the plan has no worker there; it has them in {known}. Give one of these")
    pattern = one.replicated(cells).only(numbers)
    window_of = []
    for index, number in enumerate(numbers):
        worker = number % program.num_workers
        ahead = int(pattern.ptr[index] - one.ptr[worker])
        window_of.append({op: window + ahead for op, window in by_worker[worker].items()})
    num_ranks = sum(datacenter in (None, dc) for dc in program.rank_dc)
    return WorkerWindows(pattern, window_of, num_ranks, pace, head_ns, trains=True, numbers=tuple(numbers))


def sensitivity(program: Program, costs: Costs) -> float:
    """Relative increase of the iteration per relative increase of all ops; small if the WAN is the bottleneck."""
    slower = replace(costs, compute_ns=(costs.compute_ns * (1 + LONGER)).astype(np.int64))
    before, after = (simulate(program, priced).makespan_ns for priced in (costs, slower))
    return max(0.0, (after / before - 1) / LONGER)


def _windows_of(timeline: Timeline, pattern: Pattern, worker: int) -> dict[int, int]:
    """By index of the op in one pass of the worker: the window in which it waits. These are the op whose start ends the
    window, and the ops before it that only wait for a network."""
    program, within, found = timeline.program, span(timeline), dict[int, int]()
    gaps = gaps_of(timeline, worker, within)
    own = np.arange(program.worker_ptr[worker], program.worker_ptr[worker + 1])
    took = timeline.op_end_ns[own] > timeline.op_start_ns[own]
    useful = np.flatnonzero(np.isin(program.kind[own], np.array(USEFUL, np.int8)) & took)
    per_pass = len(own) // program.num_iterations
    for window, at in enumerate((gaps.behind - own[0]).tolist(), int(pattern.ptr[worker])):
        if timeline.op_start_ns[own[at]] < within[0]:
            continue  # it starts before the period, so the window does not end where it starts
        before = int(max(useful[useful < at], default=-1))
        found.update({op % per_pass: window for op in range(max(before + 1, at - per_pass + 1), at + 1)})
    return found


def alone(num_workers: int, arena_bytes: int, period_s: float = 1.0, busy: float = 0.0) -> WorkerWindows:
    """Workers without training, each free except for the first `busy` of every period."""
    period_ns = int(period_s * 1e9)
    windows = [[(int(busy * period_ns), period_ns)]] * num_workers
    pattern = Pattern.of_windows(windows, period_ns, ["localhost"] * num_workers, arena_bytes)
    window_of = [{0: worker} for worker in range(num_workers)]
    return WorkerWindows(pattern, window_of, num_ranks=1, numbers=tuple(range(num_workers)))
