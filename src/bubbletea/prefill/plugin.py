"""BubbleTea inside a training worker: the entry point "bubbletea" of `atlas.fillers`. Chooses where prefill runs:
beside a paced worker in a process of its own, otherwise in the worker's process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from atlas.runtime.device import Span
from atlas.runtime.waits import Filler, Position, SharedDevice, WorkerFacts
from bubbletea.prefill.prefill_process import PrefillProcess
from bubbletea.prefill.prefill_worker import PrefillWorker


class BubbleTea:
    """The Filler. Settings: those of `prefill_worker`, and the worker's "device"."""

    def __init__(self, settings: dict[str, Any]) -> None:
        # Only a process with one thread can be forked safely.
        forks = settings.get("device") == "paced" and threading.active_count() == 1
        self._prefill: Filler = PrefillProcess(settings) if forks else PrefillWorker(settings)

    def attach(self, facts: WorkerFacts, device: SharedDevice) -> None:
        self._prefill.attach(facts, device)

    def fill(self, position: Position, arrived: Callable[[], bool]) -> None:
        self._prefill.fill(position, arrived)

    def waited(self, position: Position, began_ns: int, ended_ns: int) -> None:
        self._prefill.waited(position, began_ns, ended_ns)

    def ran(self, position: Position, span: Span) -> None:
        self._prefill.ran(position, span)

    def close(self) -> None:
        self._prefill.close()
