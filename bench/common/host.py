"""What others do on this host while we measure: a run that had to share its cores says nothing. Linux only."""

from __future__ import annotations

import os
import time
from pathlib import Path

TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")


class Others:
    """From when it is made: the processor time of everybody but this process and its descendants."""

    def __init__(self) -> None:
        self._began_s, self._busy_s, self._own_s = time.monotonic(), _busy_s(), _own_s()

    @property
    def cores(self) -> float:
        """How many they kept busy, on average."""
        others_s = (_busy_s() - self._busy_s) - (_own_s() - self._own_s)
        return max(0.0, others_s / (time.monotonic() - self._began_s))


def _busy_s() -> float:
    """Of all cores, since the host started."""
    ticks = [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return (sum(ticks) - ticks[3] - ticks[4]) * TICK_S


def _own_s() -> float:
    """Of this process and all that came of it; those that have ended are in the account of whoever waited for them."""
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
