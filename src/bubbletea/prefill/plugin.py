"""BubbleTea inside a training worker: the entry point "bubbletea" of `atlas.fillers`. Chooses where prefill runs:
beside a paced worker in a process of its own, otherwise in the worker's process.
"""

from __future__ import annotations

import threading
from typing import Any

from atlas.runtime.waits import Filler
from bubbletea.prefill.prefill_process import PrefillProcess
from bubbletea.prefill.prefill_worker import PrefillWorker


def BubbleTea(settings: dict[str, Any]) -> Filler:  # noqa: N802 (the entry point has this name)
    """Settings: those of `prefill_worker`, and the worker's "device"."""
    # Only a process with one thread can be forked safely.
    forks = settings.get("device") == "paced" and threading.active_count() == 1
    return PrefillProcess(settings) if forks else PrefillWorker(settings)
