"""Ports for servers that a test starts.

They lie below the range from which the kernel takes the ports of outgoing connections (32768 on Linux), so no other
process gets one between its choice and its use. Each test process has ports of its own and gives away none twice.
"""

from __future__ import annotations

import os
import random
import socket

FIRST, PORTS_OF_A_PROCESS, NUM_PROCESSES = 20_000, 750, 16
_given: set[int] = set()


def free_port() -> int:
    return free_ports(1, 1)[0]


def free_ports(length: int, count: int) -> list[int]:
    """The first ports of so many free ranges of this length."""
    process = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % NUM_PROCESSES
    first = FIRST + PORTS_OF_A_PROCESS * process
    starts = range(first, first + PORTS_OF_A_PROCESS - length + 1, length)
    found: list[int] = []
    for start in random.SystemRandom().sample(starts, len(starts)):
        ports = range(start, start + length)
        if not _given.intersection(ports) and not any(map(is_taken, ports)):
            _given.update(ports)
            found.append(start)
        if len(found) == count:
            return found
    raise RuntimeError(f"{count} free ranges of {length} ports from {first}: only {len(found)}")


def is_taken(port: int) -> bool:
    try:
        with socket.create_server(("127.0.0.1", port)):
            return False
    except OSError:
        return True
