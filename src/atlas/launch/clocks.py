"""How far each worker's clock is from ours: asked a few times, the quickest answer counts. Half its round trip bounds
the error, so a difference smaller than that is none.

Knows clocks and a fleet. What is timed by them is others' business.
"""

from __future__ import annotations

import time

from atlas.launch.worker_processes import WorkerGroup

QUESTIONS = 5
TIMEOUT_S = 20.0


def offsets_ns(fleet: WorkerGroup) -> dict[str, int]:
    """By worker: its clock less ours."""
    return {name: _offset_ns(fleet, name) for name in fleet.names}


def _offset_ns(fleet: WorkerGroup, name: str) -> int:
    best: tuple[int, int] | None = None
    for number in range(QUESTIONS):
        asked_ns = time.monotonic_ns()
        theirs_ns, heard_ns = fleet.ask(name, {"clock": number}, "clock", TIMEOUT_S)
        answer = (heard_ns - asked_ns, theirs_ns - (asked_ns + heard_ns) // 2)
        best = answer if best is None else min(best, answer)
    assert best is not None
    round_trip_ns, offset_ns = best
    return 0 if abs(offset_ns) <= round_trip_ns // 2 else offset_ns
