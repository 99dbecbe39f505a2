"""The process tree of a run: descendants, which of them are alive, and waiting for their end. Reads /proc."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable
from pathlib import Path

GONE_S = 20.0
"""docs/operating.md says 2 s on a host with a free core; a busy one takes longer."""


def _state(pid: int | str) -> tuple[str, int] | None:
    """(state, parent)."""
    with contextlib.suppress(OSError, ValueError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return fields[0], int(fields[1])
    return None


def is_alive(pid: int) -> bool:
    found = _state(pid)
    return found is not None and found[0] != "Z"


def below(*parents: int) -> list[int]:
    """All living descendants of these processes."""
    above: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (found := _state(entry.name)) is not None and found[0] != "Z":
            above[int(entry.name)] = found[1]
    tree = set(parents)
    while more := {pid for pid, parent in above.items() if parent in tree} - tree:
        tree |= more
    return sorted(tree - set(parents))


def command_of(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip()
    return ""


def require_gone(pids: Iterable[int], within_s: float = GONE_S) -> float:
    """Wait until all of them have ended; the seconds it took."""
    began, pids = time.monotonic(), list(pids)
    while left := [pid for pid in pids if is_alive(pid)]:
        assert time.monotonic() < began + within_s, f"left running: {[(pid, command_of(pid)) for pid in left]}"
        time.sleep(0.01)
    return time.monotonic() - began
