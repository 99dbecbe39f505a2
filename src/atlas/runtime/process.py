"""`python -m atlas.runtime.process`: one worker as a process. Takes orders as JSON lines on stdin, answers on stdout.

    <- {"assignment": ...}     -> {"listening": {end: port}}
    <- {"channels": [...]}     -> {"ready": true}
    <- {"clock": any}          -> {"clock": ns}                     as often as wanted, to compare clocks
    <- {"start_ns": ns}        -> {"step": n, "loss": ..., ...}     as steps finish, then {"result": ...}
    <- {"stop": true}          -> {"stopping": n}                   the first step it has not begun; it begins no other
    <- {"last_step": n}           goes on to the end of step n, saves, and ends with {"result": ...}
    <- {"complete": [[a, n]]}     these saves are complete everywhere: older ones may go
                               -> {"saved": [a, n]}                 attempt and steps of a save that is written
                               -> {"copied": [a, n]}                and, later, copied to another datacenter
    <- {"where": any}          -> {"where": "..."}                  what it waits for at this moment; empty: it works
                               -> {"warning": "..."}                at any time, and it goes on
                               -> {"error": "...", "mend": bool}    at any time, and it ends; `mend`: starting it
                                                                    again would not help, somebody must change something

Steps are stopped in two orders because workers run ahead of each other: whoever gives them takes the largest of the
answers to the first, less one, for the second. When stdin ends, whoever started it is gone, and it goes too: no
worker outlives its launcher. Knows no sockets and no ops; the `Worker` does.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import logging
import os
import sys
import threading
import time
import traceback
from typing import TYPE_CHECKING, Any, TextIO

import numpy as np
import torch
import torch.fx.experimental.symbolic_shapes  # the first backward would, for most of a second, within a step

from atlas.errors import AtlasError, WorkerError
from atlas.runtime.assignment import Assignment
from atlas.runtime.checkpoint import SaveId
from atlas.runtime.device import make_device
from atlas.runtime.record import StepRecord
from atlas.runtime.waits import load_filler
from atlas.runtime.worker import Worker
from atlas.wan.transport.stream_slot import Faults

if TYPE_CHECKING:
    from atlas.runtime.tensor_parallel.leader import Followers

DECISION_S = 60.0
"""How long a worker that was told to stop waits to hear after which step."""
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, KEPT_BYTES = -1, -3, 1 << 30
"""Of `mallopt`: how much may lie free at the end of the heap, and from which size on memory is the kernel's again."""


def main() -> int:
    orders, talk = sys.stdin, MessageWriter(_private_stdout())
    _keep_memory()
    torch.set_num_threads(1)
    sys.setswitchinterval(0.0005)  # the default lets a sender wait 5 ms for the thread that computes
    logging.getLogger("atlas").addHandler(WarningForwarder(talk))
    try:
        result = _serve(orders, talk)
    except AtlasError as error:
        talk.say({"error": str(error), "mend": not isinstance(error, WorkerError)})
        return 1
    except torch.OutOfMemoryError as error:
        told = str(error).partition(". ")[0]
        talk.say({"error": f"the model does not fit: {told}. Use more stages, or a smaller microbatch", "mend": True})
        return 1
    except Exception:
        talk.say({"error": f"a bug, not a mistake of yours:\n{traceback.format_exc()}", "mend": False})
        return 1
    talk.say({"result": result})
    threading.Event().wait()  # peers may still be sending to us; the end of stdin ends us
    return 0


class MessageWriter:
    """Answers, whole lines from any thread."""

    def __init__(self, answers: TextIO) -> None:
        self._answers, self._lock = answers, threading.Lock()

    def say(self, message: dict[str, Any]) -> None:
        with self._lock:
            self._answers.write(json.dumps(message) + "\n")
            self._answers.flush()

    def fail(self, error: AtlasError) -> None:
        """Of something beside the main thread, which may be waiting: ends the process."""
        try:
            self.say({"error": str(error), "mend": not isinstance(error, WorkerError)})
        finally:
            os._exit(1)


class WarningForwarder(logging.Handler):
    """What is worth a person's attention goes to whoever started us, not only into a file beside it."""

    def __init__(self, talk: MessageWriter) -> None:
        super().__init__(logging.WARNING)
        self._talk = talk

    def emit(self, record: logging.LogRecord) -> None:
        self._talk.say({"warning": record.getMessage()})


class StopControl:
    """Between the orders and the worker's loop: lets it begin a step, or makes it wait for the decision to stop."""

    def __init__(self, worker: Worker, talk: MessageWriter) -> None:
        self._worker, self._talk = worker, talk
        self._changed = threading.Condition()
        self._next_step = worker.next_step
        """The first that has not been let begin."""
        self._is_stopping = False
        self._is_decided = False

    def may_begin(self, step: int) -> None:
        with self._changed:
            if not self._is_stopping:
                self._next_step = step + self._worker.program.num_iterations
                return
            if not self._changed.wait_for(lambda: self._is_decided, DECISION_S):
                raise AtlasError(f"told to stop before step {step}, but not heard after which within {DECISION_S:g} s")

    def stop(self) -> None:
        with self._changed:
            self._is_stopping = True
            self._talk.say({"stopping": self._next_step})

    def decide(self, last_step: int) -> None:
        with self._changed:
            self._worker.last_step = min(self._worker.last_step, last_step)
            self._is_decided = True
            self._changed.notify_all()


def _serve(orders: TextIO, talk: MessageWriter) -> dict[str, Any]:
    assignment = Assignment.from_json(_order(orders)["assignment"])
    if assignment.tp == 1:
        return _work(assignment, orders, talk, None)
    from atlas.runtime.tensor_parallel.leader import Followers  # brings DTensor, a second that most workers do not need

    followers = Followers(assignment, talk.fail)
    with followers.explaining():
        return _work(assignment, orders, talk, followers)


def _work(assignment: Assignment, orders: TextIO, talk: MessageWriter, followers: Followers | None) -> dict[str, Any]:
    skew_ns = assignment.skew_ns

    told = Faults()

    def tell(record: StepRecord) -> None:
        nonlocal told
        before, told = told, worker.links.faults
        talk.say({**record.to_json(skew_ns), "wan_faults": told.since(before)})

    def saved(id: SaveId) -> None:
        talk.say({"saved": [id.attempt, id.step]})

    def copied(id: SaveId) -> None:
        talk.say({"copied": [id.attempt, id.step]})

    device, filler = make_device(assignment.device), load_filler(assignment.filler)
    device.on_failure(talk.fail)
    worker = Worker(assignment, device, followers=followers, filler=filler, tell=tell, on_saved=saved, on_copied=copied)
    talk.say({"listening": worker.links.ports})
    worker.connect([tuple(place) for place in _order(orders)["channels"]])
    talk.say({"ready": True})
    brake = StopControl(worker, talk)
    while "start_ns" not in (order := _order(orders)):
        if "clock" in order:
            talk.say({"clock": time.monotonic_ns() + skew_ns})
        else:
            _obey(order, worker, brake, talk)
    gc.freeze()  # what was built stays: no collection walks it in the middle of a step
    threading.Thread(target=_heed, args=(orders, worker, brake, talk), daemon=True).start()
    worker.run(order["start_ns"] - skew_ns, brake.may_begin)
    if assignment.weights_file:
        weights = worker.stage_set.weights()
        arrays = {name: weight.detach().float().cpu().numpy() for name, weight in weights.items()}
        np.savez(assignment.weights_file, **arrays)  # type: ignore[arg-type]
    worker.stage_set.end()
    return {"steps": worker.next_step, "overrun_ns": device.overrun_ns, "copied": device.copied()}


def _heed(orders: TextIO, worker: Worker, brake: StopControl, talk: MessageWriter) -> None:
    """Orders that come while it runs; the end of them ends the process, and so does one that cannot be obeyed."""
    try:
        while line := orders.readline():
            _obey(json.loads(line), worker, brake, talk)
    except Exception:
        talk.fail(WorkerError(f"a bug, not a mistake of yours:\n{traceback.format_exc()}"))
    os._exit(1)


def _obey(order: dict[str, Any], worker: Worker, brake: StopControl, talk: MessageWriter) -> None:
    """What may be ordered at any time: a save of an earlier life may be complete before this one has started."""
    if "stop" in order:
        brake.stop()
    elif "last_step" in order:
        brake.decide(order["last_step"])
    elif "where" in order:
        talk.say({"where": worker.waits.now_for})
    elif "complete" in order and worker.saving is not None:
        worker.saving.confirm(*(SaveId(*pair) for pair in order["complete"]))


def _keep_memory() -> None:
    """What is freed stays ours: every microbatch takes the same again, and would fault in each page of it."""
    with contextlib.suppress(OSError, AttributeError):  # glibc
        for option in (M_MMAP_THRESHOLD, M_TRIM_THRESHOLD):
            ctypes.CDLL(None).mallopt(option, KEPT_BYTES)


def _private_stdout() -> TextIO:
    """Our own stdout, while a stray print of some library goes to stderr and cannot spoil the protocol."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return answers


def _order(orders: TextIO) -> dict[str, Any]:
    line = orders.readline()
    if not line:
        os._exit(1)
    order: dict[str, Any] = json.loads(line)
    return order


if __name__ == "__main__":
    sys.exit(main())
