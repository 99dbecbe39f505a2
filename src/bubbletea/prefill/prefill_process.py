"""Prefill beside a paced worker, in a process of its own with a low priority. A paced device stands for a GPU: the host
does the arithmetic of prefill only so that answers are real, and that must not delay training. In the worker's process
it would take the interpreter from the threads of its connections, and on a host with few cores also CPU time.

If it dies, it is started again, by a process without threads that only waits for its end: a worker with threads cannot
be forked safely. Its service sees a lost worker, which then joins again.

The worker and the process that prefills exchange JSON over a socket. From the worker:

    ["attach", {...}]                              when it has started; answered by ["ready"]
    ["fill", number, step, index, began_ns]        a wait begins
    ["arrived", number]                            its input has arrived
    ["waited", step, index, began_ns, ended_ns]    it is over
    ["close"]                                      training has ended

To the worker: ["started", pid]; ["piece", start_ns, end_ns] before each piece, because the paced device is then busy;
and ["warning", text]. Training waits for the paced end of a piece, not for its arithmetic: if that is late, only the
prefill is, and pieces are predicted to take longer. A piece that starts in the moment in which the input arrives is not
announced.
"""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import mmap
import os
import queue
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from atlas.errors import WorkerError
from atlas.lifetime import describe_exit, forked
from atlas.priority import lower_process_priority
from atlas.runtime.device import Paced, Running, Span
from atlas.runtime.waits import Arrival, Position, SharedDevice, WorkerFacts
from atlas.wan.security.credentials import Credentials, Security
from atlas.wan.transport.base import Handle
from bubbletea.constants import MIB
from bubbletea.prefill.joining import WorkerIdentity
from bubbletea.prefill.prefill_worker import PrefillWorker

T = TypeVar("T")
log = logging.getLogger("atlas.bubbletea")
START_S, END_S, POLL_S = 600.0, 2.0, 0.01
"""Longest time to load a model, and to end."""
RESTART_S, MAX_RESTARTS, STEADY_S = 1.0, 5, 60.0
"""Pause before the first restart, doubled for each further one, of which there are so many; a process that has lived
for STEADY_S starts anew."""
MAX_MESSAGE_BYTES = 64 * 1024
"""Of JSON; the longest message has the worker's paths of certificates."""
NAME = "prefill"
"""Of both processes, for `ps` and `top`."""


class _Wire:
    """Whole messages over a socket pair. `over` is memory of both processes: the number of the last wait whose input
    has arrived."""

    def __init__(self, sock: socket.socket, memory: mmap.mmap) -> None:
        self.sock, self.over = sock, memoryview(memory).cast("q")

    def send(self, *message: Any) -> None:
        """Never waits: without room, because the other process gets no CPU time, the message is dropped."""
        with contextlib.suppress(BlockingIOError):
            self.sock.send(json.dumps(message).encode(), socket.MSG_DONTWAIT)

    def receive(self, flags: int = 0) -> list[Any]:
        data = self.sock.recv(MAX_MESSAGE_BYTES, flags)
        if not data:
            raise WorkerError("the process that prefills has ended")
        found: list[Any] = json.loads(data)
        return found


class PrefillProcess:
    """The Filler in the worker's process. Forks this process, which is safe only without other threads."""

    def __init__(self, settings: dict[str, Any]) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        memory = mmap.mmap(-1, mmap.PAGESIZE)
        self._pid = forked(lambda: _keep_running(settings, _Wire(theirs, memory)))
        theirs.close()
        self._wire, self._number = _Wire(ours, memory), 0
        self.prefill_pid = 0
        """Of the process that prefills now."""

    def attach(self, facts: WorkerFacts, device: SharedDevice) -> None:
        self._device, security = device, facts.security
        files = security.credentials
        self._facts = {
            "me": [facts.name, facts.datacenter, int(facts.worker), facts.plan],
            "host": facts.host,
            "credentials": files and [str(path) for path in (files.ca_file, files.cert_file, files.key_file)],
            "networks": [str(network) for network in security.trusted_networks],
        }
        self._wire.sock.settimeout(START_S)
        while (message := self._wire.receive()) != ["ready"]:
            died = message[0] == "started" and self.prefill_pid
            self._handle(message, 0)
            if died:
                break  # training does not wait for another attempt
        self._wire.sock.settimeout(None)

    def fill(self, position: Position, arrived: Callable[[], bool]) -> None:
        """Returns at once: the worker waits for its input, and the other process uses the wait."""
        self._number = number = self._number + 1
        self._wire.send("fill", number, position.step, position.index, time.monotonic_ns())
        if isinstance(arrived, Arrival):
            arrived.notify(lambda: self._end(number) if arrived() else None)

    def _end(self, number: int) -> None:
        """On any thread."""
        if self._wire.over[0] < number:
            self._wire.over[0] = number
            with contextlib.suppress(OSError):
                self._wire.send("arrived", number)

    def waited(self, position: Position, began_ns: int, ended_ns: int) -> None:
        self._end(self._number)
        with contextlib.suppress(BlockingIOError):
            while True:
                self._handle(self._wire.receive(socket.MSG_DONTWAIT), began_ns)
        self._wire.send("waited", position.step, position.index, began_ns, ended_ns)

    def _handle(self, message: list[Any], began_ns: int) -> None:
        if message[0] == "started":
            self.prefill_pid = message[1]
            self._wire.send("attach", self._facts)
        elif message[0] == "warning":
            log.warning("%s", message[1])
        elif message[0] == "piece" and message[1] >= began_ns:
            self._device.occupied(Span(*message[1:]))

    def ran(self, position: Position, span: Span) -> None:
        pass  # ops of a paced device take as long as they should

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._wire.send("close")
        deadline = time.monotonic() + END_S
        while not _has_ended(self._pid):
            if time.monotonic() > deadline:
                os.kill(self._pid, signal.SIGKILL)
                os.waitpid(self._pid, 0)
                break
            time.sleep(POLL_S)
        self._wire.sock.close()


def _has_ended(pid: int) -> bool:
    return os.waitpid(pid, os.WNOHANG)[0] == pid


# ---- the process that starts it --------------------------------------------------------------------------------------
def _keep_running(settings: dict[str, Any], wire: _Wire) -> None:
    """Starts the process that prefills, and starts it again if it dies."""
    Path("/proc/self/comm").write_text(NAME)
    os.setsid()  # Ctrl-C is for the worker
    _close_others(wire.sock.fileno())
    logging.getLogger("atlas").handlers = [_WarningSender(wire)]
    num_restarts, is_first = 0, True
    while died := _run_once(settings, wire, is_first):
        why, seconds = died
        num_restarts, is_first = 0 if seconds > STEADY_S else num_restarts, False
        if num_restarts == MAX_RESTARTS:
            log.warning("the prefill process %s; it is not started again. Training continues without it", why)
            return
        log.warning("the prefill process %s; it is started again", why)
        time.sleep(RESTART_S * 2**num_restarts)
        num_restarts += 1
        if "close" in _drained(wire):
            return


def _run_once(settings: dict[str, Any], wire: _Wire, is_first: bool) -> tuple[str, float] | None:
    """How it died, and after how many seconds; None: it has ended as it should."""
    began_s = time.monotonic()
    pid = forked(lambda: _Prefilling(settings, wire).run(is_first))
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return (describe_exit(code), time.monotonic() - began_s) if code else None


def _drained(wire: _Wire) -> set[str]:
    """The kinds of the messages that the worker has sent in the meantime."""
    found = set()
    with contextlib.suppress(BlockingIOError):
        while True:
            found.add(wire.receive(socket.MSG_DONTWAIT)[0])
    return found


# ---- the process that prefills ---------------------------------------------------------------------------------------
def _close_others(kept: int) -> None:
    """Descriptors of the worker: whoever reads from it must see that it has ended."""
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    for descriptor in [int(path.name) for path in Path("/proc/self/fd").iterdir()]:
        if descriptor > 2 and descriptor != kept:
            with contextlib.suppress(OSError):
                os.close(descriptor)


class _WarningSender(logging.Handler):
    """To the worker, which shows them."""

    def __init__(self, wire: _Wire) -> None:
        super().__init__(logging.WARNING)
        self._wire = wire

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError):
            self._wire.send("warning", record.getMessage())


class _AnnouncedDevice(Paced):
    """Announces each piece to the worker, whose device is then busy."""

    def __init__(self, wire: _Wire) -> None:
        super().__init__()
        self._wire, self.number = wire, 0

    def begin(self, work: Callable[[], T], cost_ns: int, ready_ns: int) -> Running[T]:
        start_ns = max(self.free_ns, ready_ns)
        if self._wire.over[0] < self.number:
            self._wire.send("piece", start_ns, start_ns + cost_ns)
        return super().begin(work, cost_ns, ready_ns)


class _FarArrival(Arrival):
    """Of the input of wait `number` of the worker."""

    def __init__(self, wire: _Wire, number: int) -> None:
        self.handle, self.number = Handle("the worker's input"), number
        super().__init__([self.handle])
        self._over = wire.over

    def __call__(self) -> bool:
        return self._over[0] >= self.number


class _Prefilling:
    def __init__(self, settings: dict[str, Any], wire: _Wire) -> None:
        self._wire, self._worker, self._device = wire, PrefillWorker(settings), _AnnouncedDevice(wire)
        self._memory_bytes = int(settings.get("memory_mib", 0)) * MIB
        self._messages: queue.SimpleQueue[list[Any]] = queue.SimpleQueue()
        self._arrival = _FarArrival(wire, 0)

    def run(self, is_first: bool) -> None:
        if not is_first:
            lower_process_priority()
        self._wire.send("started", os.getpid())
        while (message := self._wire.receive())[0] != "attach":
            if message[0] == "close":
                return
        self._attach(**message[1])
        if is_first:
            lower_process_priority()  # from now on: loading a model holds up the start of training
        self._wire.send("ready")
        gc.freeze()
        threading.Thread(target=self._read, daemon=True, name="bubbletea messages").start()
        while (message := self._messages.get())[0] != "close":
            if message[0] == "fill":
                self._fill(*message[1:])
            elif message[0] == "waited":
                step, index, began_ns, ended_ns = message[1:]
                self._worker.waited(Position(step, index), began_ns, ended_ns)
        self._worker.close()

    def _attach(self, me: list[Any], host: str, credentials: list[str] | None, networks: list[str]) -> None:
        files = None if credentials is None else Credentials(*map(Path, credentials))
        name, datacenter, worker, plan = me
        security = Security(files, networks)
        identity = WorkerIdentity(name, datacenter, worker, plan, "paced", self._memory_bytes, security)
        self._worker.open(identity, SharedDevice(self._device, lambda span: None), host, trains=True)

    def _fill(self, number: int, step: int, index: int, began_ns: int) -> None:
        self._arrival = arrival = _FarArrival(self._wire, number)
        if not arrival():
            self._device.number = number
            self._worker.fill(Position(step, index), arrival, began_ns)

    def _read(self) -> None:
        """On a thread of its own, so that an input ends a wait without work at once."""
        try:
            while True:
                message = self._wire.receive()
                if message[0] != "arrived":
                    self._messages.put(message)
                elif message[1] >= self._arrival.number:
                    self._arrival.handle.finish()
        except (OSError, WorkerError):
            os._exit(1)  # the worker has ended
