"""How far each worker's clock is from the launcher's: all are asked at once, a few times, and the fastest reply of each
counts. Half its round trip bounds the error, so a smaller difference counts as zero. Over several hosts the launchers
are asked, because the processes of a host have one clock.

Knows clocks and worker groups, not what is timed.
"""

from __future__ import annotations

import time

from atlas.launch.worker_processes import WorkerGroup

NUM_QUESTIONS = 5
"""Per worker; the answer with the shortest round trip counts."""
TIMEOUT_S = 20.0
"""For the answers of all workers to one question."""


def offsets_ns(workers: WorkerGroup) -> dict[str, int]:
    """By worker: its clock minus the launcher's."""
    clock_of = workers.clock_of
    asked = list(dict.fromkeys(clock_of.values()))
    best: dict[str, tuple[int, int]] = {}
    for number in range(NUM_QUESTIONS):
        asked_ns = time.monotonic_ns()
        for name, (theirs_ns, received_ns) in workers.request(asked, {"clock": number}, "clock", TIMEOUT_S).items():
            measured = (received_ns - asked_ns, theirs_ns - (asked_ns + received_ns) // 2)
            best[name] = min(best.get(name, measured), measured)
    offsets = {name: 0 if abs(offset) <= trip // 2 else offset for name, (trip, offset) in best.items()}
    return {name: offsets[source] for name, source in clock_of.items()}
