"""How far each worker's clock is from the launcher's: measured a few times, and the fastest reply counts. Half its
round trip bounds the error, so a smaller difference counts as zero.

Knows clocks and worker groups, not what is timed.
"""

from __future__ import annotations

import time

from atlas.launch.worker_processes import WorkerGroup

NUM_QUESTIONS = 5
TIMEOUT_S = 20.0


def offsets_ns(workers: WorkerGroup) -> dict[str, int]:
    """By worker: its clock minus the launcher's."""
    return {name: _offset_ns(workers, name) for name in workers.names}


def _offset_ns(workers: WorkerGroup, name: str) -> int:
    best: tuple[int, int] | None = None
    for number in range(NUM_QUESTIONS):
        asked_ns = time.monotonic_ns()
        theirs_ns, received_ns = workers.request(name, {"clock": number}, "clock", TIMEOUT_S)
        measured = (received_ns - asked_ns, theirs_ns - (asked_ns + received_ns) // 2)
        best = measured if best is None else min(best, measured)
    assert best is not None
    round_trip_ns, offset_ns = best
    return 0 if abs(offset_ns) <= round_trip_ns // 2 else offset_ns
