"""Workers without training, as processes of this machine (`prefill.host`): started together, begun again when one dies,
ended together. What `bubbletea serve` runs when it is given no plan.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import bubbletea
from bubbletea.prefill.dedicated_worker import DedicatedWorker

AGAIN_S = 0.2


class DedicatedWorkers:
    """`with Hosts(guests) as hosts:`; leaving the block leaves no process behind."""

    def __init__(self, guests: Sequence[DedicatedWorker]) -> None:
        self._guests = list(guests)
        self._closing = threading.Event()
        self._processes = [self._start(guest) for guest in self._guests]
        self._watcher = threading.Thread(target=self._watch, daemon=True, name="bubbletea hosts")
        self._watcher.start()

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def close(self) -> None:
        self._closing.set()
        self._watcher.join()
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
            assert process.stdin is not None
            with contextlib.suppress(OSError):
                process.stdin.close()

    def __enter__(self) -> DedicatedWorkers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _watch(self) -> None:
        while not self._closing.wait(AGAIN_S):
            for index, process in enumerate(self._processes):
                if process.poll() is not None and process.stdin is not None:
                    with contextlib.suppress(OSError):
                        process.stdin.close()
                    self._processes[index] = self._start(self._guests[index])

    def _start(self, guest: DedicatedWorker) -> subprocess.Popen[str]:
        source = str(Path(bubbletea.__file__).parent.parent)
        path = os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH")]))
        process = subprocess.Popen(
            [sys.executable, "-m", "bubbletea.prefill.dedicated_worker"],
            stdin=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
            start_new_session=True,  # Ctrl-C is the service's to hear
        )
        assert process.stdin is not None
        with contextlib.suppress(OSError):
            process.stdin.write(guest.to_json() + "\n")
            process.stdin.flush()
        return process
