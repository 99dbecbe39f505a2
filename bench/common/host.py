"""Timing on this host: medians of repeated runs, and the CPU time of other processes meanwhile. Linux only."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")


def median_s(job: Callable[[], object], repeats: int, clock: Callable[[], float] = time.process_time) -> float:
    """Median seconds of a job, by CPU time unless another clock is given."""
    took = []
    for _ in range(repeats):
        began = clock()
        job()
        took.append(clock() - began)
    return statistics.median(took)


class Others:
    """CPU time, since its creation, of all processes but this one and its descendants."""

    def __init__(self) -> None:
        self._began_s, self._busy_s, self._own_s = time.monotonic(), _busy_s(), _own_s()

    @property
    def cores(self) -> float:
        """The average number of cores that they used."""
        others_s = (_busy_s() - self._busy_s) - (_own_s() - self._own_s)
        return max(0.0, others_s / (time.monotonic() - self._began_s))


def _busy_s() -> float:
    """Busy seconds of all cores since the host started."""
    ticks = [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return (sum(ticks) - ticks[3] - ticks[4]) * TICK_S


def _own_s() -> float:
    """CPU seconds of this process and its descendants, including those that have ended and were waited for."""
    parent, spent = dict[int, int](), dict[int, int]()
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            parent[int(folder.name)] = int(fields[1])
            spent[int(folder.name)] = sum(map(int, fields[11:15]))
    mine = [pid for pid in spent if _descends(pid, parent)]
    return sum(spent[pid] for pid in mine) * TICK_S


def _descends(pid: int, parent: dict[int, int]) -> bool:
    while pid and pid != os.getpid():
        pid = parent.get(pid, 0)
    return pid == os.getpid()
