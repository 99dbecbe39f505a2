"""Scheduling priorities on Linux: of emulators, which must be on time while other processes use the cores; of training,
whose threads often wake up for a moment; and of work that must not disturb either.

An emulator of root gets a real-time class. From Linux 6.12 on, every user may choose short time slices, which bring an
earlier turn after a wake-up. Where the kernel refuses something, priorities stay as they are.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import struct
from pathlib import Path

SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}
"""Number of the system call."""
SLICE_NS = 100_000
"""The shortest time slice that the kernel grants."""
NICENESS = 10
"""Of work that steps back. It gets a tenth of a core that something else would use alone: at 19 it would be a
hundredth, and requests would stand still on a busy host."""
AUTOGROUP = Path("/proc/self/autogroup")
"""The niceness of this session among all sessions. Where the kernel groups threads by session, that of a thread counts
only within its session."""


def raise_priority(*, realtime: bool = True) -> str:
    """Returns what the kernel granted: "realtime", "short slice" or "ordinary"."""
    if realtime:
        try:
            os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
            return "realtime"
        except (OSError, AttributeError):
            pass
    return "short slice" if shorten_slices() else "ordinary"


def shorten_slices() -> bool:
    """For this thread and those that it starts, if its scheduling class is the ordinary one. Returns whether the kernel
    did."""
    number = SCHED_SETATTR.get(platform.machine())
    if number is None or os.sched_getscheduler(0) != os.SCHED_OTHER:
        return False
    niceness = os.getpriority(os.PRIO_PROCESS, 0)
    attributes = struct.pack("IIQiIQQQ", 48, os.SCHED_OTHER, 0, niceness, 0, SLICE_NS, 0, 0)
    return int(ctypes.CDLL(None).syscall(number, 0, attributes, 0)) == 0


def lower_priority(thread: int = 0) -> None:
    """Of this thread and those that it starts, or of another thread of this process. Never raises it."""
    with contextlib.suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, thread, max(NICENESS, os.getpriority(os.PRIO_PROCESS, thread)))


def lower_process_priority() -> None:
    """Of this process, with all its threads. It becomes a session of its own."""
    with contextlib.suppress(OSError):
        os.setsid()
    with contextlib.suppress(OSError):
        AUTOGROUP.write_text(str(NICENESS))
    for path in Path("/proc/self/task").iterdir():
        lower_priority(int(path.name))
