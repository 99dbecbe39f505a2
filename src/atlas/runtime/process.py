"""`python -m atlas.runtime.process`: one worker as a process. Reads messages as JSON lines from stdin, replies on
stdout.

    <- {"assignment": ...}     -> {"listening": port}
    <- {"channels": [...], "dial_for": [...]}  -> {"ready": true}
    <- {"clock": any}          -> {"clock": ns}                     any number of times, to compare clocks
    <- {"start_ns": ns}        -> {"step": n, "loss": ..., ...}     as steps finish, then {"result": ...}
    <- {"stop": true}          -> {"stopping": n}                   the first step it has not begun; it begins no other
    <- {"last_step": n}           continues to the end of step n, saves, and ends with {"result": ...}
    <- {"complete": [[a, n]]}     these saves are complete everywhere: older ones may be deleted
                               -> {"saved": [a, n]}                 attempt and step of a save that is written
                               -> {"copied": [a, n]}                and, later, copied to another datacenter
                               -> {"circuits": [what, step, rank]}  on photonic rails (`circuits`)
    <- {"circuits": [step, rank]}  these circuits are set up
    <- {"waits_for": any}      -> {"waits_for": "..."}              what it waits for at this moment; empty: it computes
                               -> {"warning": "..."}                at any time, and it continues; with `once`, only
                                                                    the first worker's is shown
                               -> {"error": "...", "user_error": b}     at any time, and it ends; `user_error`: the user
                                                                    must change something, a restart would not help

Stopping takes two messages because workers run ahead of each other: the launcher sends the largest reply to the first,
minus one, as the second. When stdin ends, the launcher is gone and the worker ends too. Knows no sockets and no ops;
the `Worker` does.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import json
import logging
import os
import resource
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, TextIO

import numpy as np
import torch
import torch.fx.experimental.symbolic_shapes  # 0.8 s: the first backward would import it within a step

from atlas.errors import AtlasError
from atlas.lifetime import Repeating
from atlas.priority import shorten_slices
from atlas.runtime.assignment import Assignment, read
from atlas.runtime.checkpoint.manifest import SaveId
from atlas.runtime.circuits import WorkerCircuits
from atlas.runtime.compiling import ONCE
from atlas.runtime.device import Device
from atlas.runtime.hardware import make_device
from atlas.runtime.kineto import KinetoRecorder
from atlas.runtime.messages import MessageWriter
from atlas.runtime.record import StepRecord
from atlas.runtime.start_times import StartTimes
from atlas.runtime.waits import Filler, load_filler
from atlas.runtime.worker import Worker
from atlas.wan.transport.stream_slot import Faults

if TYPE_CHECKING:
    from atlas.runtime.tensor_parallel.leader import Followers

DECISION_S = 60.0
"""How long a worker waits for {"last_step"} after {"stop"}."""
SWITCH_INTERVAL_S = 0.5e-3
"""Python's switch interval. Its default lets a sender wait 5 ms for the thread that computes."""
ALIVE_S = 3.0
"""Between two messages of a worker that is busy with something long."""
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, KEPT_BYTES = -1, -3, 1 << 30
"""Parameters of `mallopt` (<malloc.h>): up to this size, freed memory stays with the process."""


def main() -> int:
    messages, out = sys.stdin, MessageWriter(_private_stdout())
    faulthandler.enable()  # a crash in a library leaves the stacks of all threads in the log
    _keep_memory()
    _allow_sockets()
    torch.set_num_threads(1)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    logging.getLogger("atlas").addHandler(WarningForwarder(out))
    try:
        result = _serve(messages, out)
    except Exception as error:
        out.fail(error)
    out.send({"result": result})
    threading.Event().wait()  # peers may still send to this worker; it ends with stdin
    return 0


def _allow_sockets() -> None:
    """As many as the system lets this process have: the usual limit of 1,024 is a few hundred peers."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


class WarningForwarder(logging.Handler):
    """Sends warnings to the launcher, beside the worker's log file."""

    def __init__(self, out: MessageWriter) -> None:
        super().__init__(logging.WARNING)
        self._out = out

    def emit(self, record: logging.LogRecord) -> None:
        once = {"once": True} if getattr(record, ONCE, False) else {}
        self._out.send({"warning": record.getMessage(), **once})


class StopControl:
    """Between messages and the worker's loop: allows each step, or holds it until the last step is decided."""

    def __init__(self, worker: Worker, out: MessageWriter) -> None:
        self._worker, self._out = worker, out
        self._changed = threading.Condition()
        self._next_step = worker.next_step
        """The first step that was not allowed yet."""
        self._is_stopping = False
        self._is_decided = False

    def may_begin(self, step: int) -> None:
        with self._changed:
            if not self._is_stopping:
                self._next_step = step + self._worker.program.num_iterations
                return
            if not self._changed.wait_for(lambda: self._is_decided, DECISION_S):
                raise AtlasError(
                    f"the run was to stop, and this worker waited before step {step}: the launcher did not say within "
                    f"{DECISION_S:g} s which step is the last"
                )

    def stop(self) -> None:
        with self._changed:
            self._is_stopping = True
            self._out.send({"stopping": self._next_step})

    def decide(self, last_step: int) -> None:
        with self._changed:
            self._worker.last_step = min(self._worker.last_step, last_step)
            self._is_decided = True
            self._changed.notify_all()


def _serve(messages: TextIO, out: MessageWriter) -> dict[str, Any]:
    assignment = read(Assignment, _read(messages)["assignment"])
    if assignment.tp == 1:
        return _work(assignment, messages, out, None)
    from atlas.runtime.tensor_parallel.leader import Followers  # DTensor: 1 s, and most workers do not need it

    followers = Followers(assignment, out.fail)
    with followers.explaining():
        return _work(assignment, messages, out, followers)


def _work(assignment: Assignment, messages: TextIO, out: MessageWriter, followers: Followers | None) -> dict[str, Any]:
    skew_ns, faults, retransmits = assignment.skew_ns, Faults(), 0

    def on_step(record: StepRecord) -> None:
        nonlocal faults, retransmits
        before, faults = faults, worker.links.main.faults
        if record.first_step == assignment.first_step:
            times.finish("first step")
        sent_before, retransmits = retransmits, worker.links.main.num_retransmits
        host_bytes = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        told = {
            "wan_faults": faults.since(before),
            "retransmits": max(0, retransmits - sent_before),  # less where a connection was replaced
            "peak_bytes": [device.peak_bytes(), host_bytes],
            "compiled": worker.stage_set.backend,
        }
        out.send({**record.to_json(skew_ns), **told})

    times = StartTimes()
    filler, device = _filler(assignment), make_device(assignment.device)
    times.note("device")
    device.on_failure(out.fail)
    worker = Worker(
        assignment, device, followers=followers, filler=filler, on_step=on_step,
        on_saved=lambda id: out.send({"saved": id}), on_copied=lambda id: out.send({"copied": id}),
        circuits=WorkerCircuits.of(assignment, lambda news: out.send({"circuits": news})), times=times,
    )  # fmt: skip
    kineto = KinetoRecorder.of(worker.role.number * assignment.tp, worker.last_step)
    worker.names_ops = kineto is not None
    if kineto is not None:
        kineto.while_writing = lambda: says_alive(out, f"{worker.role.name} writes the trace of its steps")
    out.send({"listening": worker.links.port})
    peers = _read(messages)
    worker.connect(*([tuple(place) for place in peers.get(key, ())] for key in ("channels", "dial_for")))
    out.send({"ready": True})
    stop_control = StopControl(worker, out)
    while "start_ns" not in (message := _read(messages)):
        if "clock" in message:
            out.send({"clock": time.monotonic_ns() + skew_ns})
        else:
            _handle(message, worker, stop_control, out)
    gc.freeze()  # existing objects stay: no collection visits them in the middle of a step
    threading.Thread(target=_handle_all, args=(messages, worker, stop_control, out), daemon=True).start()
    may_begin = stop_control.may_begin if kineto is None else kineto.before(stop_control.may_begin)
    times.note("start signal")
    worker.run(message["start_ns"] - skew_ns, may_begin)
    worker.links.main.save_records()
    if kineto is not None:
        kineto.finish()
    return _end(worker, device)


def _end(worker: Worker, device: Device) -> dict[str, Any]:
    """Write the weights if asked to; what the worker says of its run."""
    if worker.assignment.weights_file:
        weights = worker.stage_set.weights()
        arrays = {name: weight.detach().float().cpu().numpy() for name, weight in weights.items()}
        np.savez(worker.assignment.weights_file, **arrays)  # type: ignore[arg-type]
    worker.stage_set.end()
    return {
        "steps": worker.next_step,
        "overrun_ns": device.overrun_ns,
        "copied": device.copied(),
        "compiled": worker.stage_set.backend,
        "peak_bytes": device.peak_bytes(),
        "start_s": worker.times.seconds,
    }


def _filler(assignment: Assignment) -> Filler | None:
    """Before there are threads. Its work uses the cores of this host too: with short slices, threads of training get
    one as soon as they wake up."""
    filler = load_filler(assignment.filler, assignment.device)
    if filler is not None:
        shorten_slices()
    return filler


def _handle_all(messages: TextIO, worker: Worker, stop_control: StopControl, out: MessageWriter) -> None:
    """Handle messages while it runs. The end of stdin ends the process, and so does an invalid message."""
    try:
        while line := messages.readline():
            _handle(json.loads(line), worker, stop_control, out)
    except Exception as error:
        out.fail(error)
    os._exit(1)


def says_alive(out: MessageWriter, what: str) -> Repeating:
    """Sends the launcher a message every few seconds: without one for long, it takes the worker for failed."""
    return Repeating("says alive", ALIVE_S, lambda: out.send({"waits_for": what}))


def _handle(message: dict[str, Any], worker: Worker, stop_control: StopControl, out: MessageWriter) -> None:
    """Messages that may come at any time: a save of an earlier attempt may be complete before this one has started."""
    if "stop" in message:
        stop_control.stop()
    elif "last_step" in message:
        stop_control.decide(message["last_step"])
    elif "circuits" in message and worker.circuits is not None:
        worker.circuits.opened(*message["circuits"])
    elif "waits_for" in message:
        out.send({"waits_for": worker.waits.now_for})
    elif "complete" in message and worker.saving is not None:
        worker.saving.confirm(*(SaveId(*pair) for pair in message["complete"]))


def _keep_memory() -> None:
    """Keep freed memory: every microbatch allocates the same again, and each page would fault."""
    with contextlib.suppress(OSError, AttributeError):  # glibc
        for option in (M_MMAP_THRESHOLD, M_TRIM_THRESHOLD):
            ctypes.CDLL(None).mallopt(option, KEPT_BYTES)


def _private_stdout() -> TextIO:
    """A private copy of stdout; a library's print goes to stderr and cannot break the protocol."""
    stream = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return stream


def _read(messages: TextIO) -> dict[str, Any]:
    line = messages.readline()
    if not line:
        os._exit(1)
    message: dict[str, Any] = json.loads(line)
    return message


if __name__ == "__main__":
    sys.exit(main())
