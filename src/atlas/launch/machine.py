"""What launchers on one machine share: its memory, and the ports of its addresses. Two launchers share them if they
have the same names for them.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

BOOT, CGROUP, NETWORK = Path("/proc/sys/kernel/random/boot_id"), Path("/sys/fs/cgroup"), Path("/proc/self/ns/net")


def memory_name() -> str:
    """Of this machine's memory, or of a container's part of it. Empty: unknown."""
    return _name_of(CGROUP)


def network_name() -> str:
    """Of this machine's addresses; a network namespace has its own. Empty: unknown."""
    return _name_of(NETWORK)


def _name_of(path: Path) -> str:
    with contextlib.suppress(OSError):
        return f"{BOOT.read_text().strip()}/{path.stat().st_ino}"
    return ""
