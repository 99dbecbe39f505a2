"""Workers that do not train, as processes of this machine (`prefill.dedicated_worker`): started together, restarted
when one ends, ended together. `bubbletea serve --alone N` runs them. They are forked from a process that has imported
torch, so a lost worker is back without the two seconds that the import takes.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from typing import NamedTuple

from atlas.launch.forkserver import Child, fork_server
from atlas.lifetime import Closing, Repeating
from bubbletea.prefill.dedicated_worker import DedicatedWorker

WATCH_S = 0.1
"""Between two looks at whether a worker has ended."""


class _Started(NamedTuple):
    process: Child
    stdin: int
    """Our end of it: the worker ends when it is closed."""


class DedicatedWorkers(Closing):
    """`with DedicatedWorkers(workers):`; leaving the block leaves no process behind."""

    def __init__(self, workers: Sequence[DedicatedWorker]) -> None:
        self._workers = list(workers)
        self._started = [_start(worker) for worker in self._workers]
        self._watcher = Repeating("bubbletea workers", WATCH_S, self._watch)

    def close(self) -> None:
        self._watcher.close()
        for one in self._started:
            one.process.kill()
        for one in self._started:
            one.process.wait()
            os.close(one.stdin)

    def _watch(self) -> None:
        for index, one in enumerate(self._started):
            if one.process.wait(0) is not None:
                os.close(one.stdin)
                self._started[index] = _start(self._workers[index])


def _start(worker: DedicatedWorker) -> _Started:
    theirs, ours = os.pipe()
    try:
        process = fork_server("bubbletea.prefill.dedicated_worker").start(theirs, 1, 2)
    finally:
        os.close(theirs)
    with contextlib.suppress(OSError):
        os.write(ours, json.dumps(asdict(worker)).encode() + b"\n")
    return _Started(process, ours)
