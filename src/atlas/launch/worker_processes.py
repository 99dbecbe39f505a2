"""Worker processes of one host: started together, sent JSON lines, and ended together. An error, a kill or a timeout of
one worker ends all of them within seconds and is reported as one WorkerError.

Knows pipes and messages (processes: `forkserver`). Does not know what the workers do.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any, NamedTuple, TextIO

from atlas.errors import EXTRAS, AtlasError, DivergedRunError, MissingExtraError, WorkerError
from atlas.launch.forkserver import Child, fork_server
from atlas.launch.worker_logs import WorkerLogs
from atlas.lifetime import Closing, describe_exit

log = logging.getLogger("atlas.launch")
WORKER = "atlas.runtime.process"
"""The module of a worker process."""
GRACE_S = 0.7
"""How long to collect errors of other workers after the first: the worker that died is the cause, not those that lost
their connection to it."""
END_S = 30.0
"""How long to wait for a killed process: the kernel frees its memory first."""


class WorkerMessage(NamedTuple):
    """A message of a worker and when it was received."""

    name: str
    message: dict[str, Any] | None
    """None: the worker's output has ended."""
    at_ns: int
    """On the launcher's monotonic clock."""


Meanwhile = Callable[[str, dict[str, Any]], bool]
"""Handles a message that is not the awaited one; returns whether it was expected."""


class WorkerGroup(Closing, ABC):
    """A group of workers, on this host or elsewhere, as the launcher sees it."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = list(names)
        self.warn: Callable[[str], None] = log.warning
        self.handlers: dict[str, Callable[[str, Any], None]] = {}
        """By key: what takes a message at once, on the thread that reads it, with the worker's name and the value."""
        self._received: queue.SimpleQueue[WorkerMessage] = queue.SimpleQueue()
        self._said: set[str] = set()
        """Warnings of which only the first worker's is shown."""
        self._deferred: deque[WorkerMessage] = deque()
        """Received but not asked for yet: the next call takes them first, so that their order is kept."""

    @abstractmethod
    def send(self, name: str, message: dict[str, Any]) -> None:
        """Send a message to one worker. `wait_for` reports a worker that has ended."""

    @abstractmethod
    def exit_reason(self, name: str) -> str:
        """Why a worker ended that reported no error: `was killed by SIGKILL`."""

    def title(self, name: str) -> str:
        """The worker's name in error messages."""
        return f"worker {name}"

    def fail(self, error: AtlasError) -> None:
        """End the `wait_for` of now, or the next one, with this error; from any thread."""
        self._received.put(WorkerMessage("", {"failure": error}, time.monotonic_ns()))

    def send_all(self, message: dict[str, Any]) -> None:
        for name in self.names:
            self.send(name, message)

    def wait_for(
        self, key: str, timeout_s: float, *, of: Sequence[str] | None = None, meanwhile: Meanwhile = lambda *_: False
    ) -> dict[str, Any]:
        """The value of `key` from each worker (or from each of `of`), once all have sent it.

        Messages without `key` go to `meanwhile`. Messages of workers that are not in `of` stay queued for a later call.
        Raises when nothing arrives for `timeout_s`, and on the first error of any worker. After an exception of
        `meanwhile`, or Ctrl-C, replies stay queued too.
        """
        found = self._replies(self.names if of is None else of, key, timeout_s, meanwhile, strict=True)
        return {name: value for name, (value, _) in found.items()}

    def request(
        self, names: Sequence[str], message: dict[str, Any], key: str, timeout_s: float
    ) -> dict[str, tuple[Any, int]]:
        """The replies of all these to a message, and when each was received. Other messages stay queued, in order."""
        for name in names:
            self.send(name, message)
        return self._replies(names, key, timeout_s, lambda *_: False, strict=False)

    def _replies(
        self, names: Sequence[str], key: str, timeout_s: float, meanwhile: Meanwhile, *, strict: bool
    ) -> dict[str, tuple[Any, int]]:
        """The value of `key` from each of these, and when it was received. `strict`: another message of one of them is
        an error, if `meanwhile` does not expect it."""
        replies, others, taken = dict[str, tuple[Any, int]](), list[WorkerMessage](), list[WorkerMessage]()
        try:
            while len(replies) < len(names):
                new = self._next(
                    timeout_s, lambda: f"no message {key!r} from {', '.join(n for n in names if n not in replies)}"
                )
                if new.message is not None and key in new.message and new.name in names:
                    replies[new.name] = (new.message[key], new.at_ns)
                    taken.append(new)
                elif new.message is None or not meanwhile(new.name, new.message):
                    if new.message is None or "error" in new.message or (strict and new.name in names):
                        raise self._root_cause(new.name, new.message)
                    others.append(new)
            taken = []
        finally:
            self._deferred.extendleft(reversed([*taken, *others]))
        return replies

    @property
    def clock_of(self) -> dict[str, str]:
        """By worker: the process or agent to ask for its clock. Processes of one host have one clock."""
        return {name: name for name in self.names}

    def _next(self, timeout_s: float, missing: Callable[[], str]) -> WorkerMessage:
        """The next message that is not a warning; warnings are passed to `warn`."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                left_s = max(0.0, deadline - time.monotonic())
                new = self._deferred.popleft() if self._deferred else self._received.get(timeout=left_s)
            except queue.Empty:
                raise WorkerError(f"{missing()} within {timeout_s:g} s") from None
            if new.message is not None and "failure" in new.message:
                raise new.message["failure"]
            if new.message is None or "warning" not in new.message:
                return new
            self._warn(new.name, str(new.message["warning"]), once=bool(new.message.get("once")))

    def _warn(self, name: str, text: str, *, once: bool) -> None:
        if not once or text not in self._said:
            self.warn(f"{self.title(name)}: {text}")
        if once:
            self._said.add(text)

    def _root_cause(self, name: str, message: dict[str, Any] | None) -> AtlasError:
        """The error to report. A worker that ended without an error explains the errors of its peers; otherwise the
        first error counts, those that the user must fix before the others. They are no WorkerErrors: a restart would
        not help."""
        errors = [(name, message)]
        deadline = time.monotonic() + GRACE_S
        with contextlib.suppress(queue.Empty):
            while (left_s := deadline - time.monotonic()) > 0:
                errors.append(self._received.get(timeout=left_s)[:2])
        explained = {n for n, m in errors if m is not None and "error" in m}
        for who, found in errors:
            if found is None and who not in explained:
                return WorkerError(f"{self.title(who)} {self.exit_reason(who)}")
        reported = [(n, m) for n, m in errors if m is not None and "error" in m]
        who, found = next(((n, m) for n, m in reported if m.get("user_error")), reported[0] if reported else errors[0])
        assert found is not None, "a worker that ended is found above"
        text = f"{self.title(who)} failed: {found.get('error', found)}"
        if "diverged" in found:
            return DivergedRunError(text, int(found["diverged"]))
        return AtlasError(text) if found.get("user_error") else WorkerError(text)


def _require_importable(*packages: str) -> None:
    """Raise here, before workers start, if they would lack a package."""
    for package in packages:
        if find_spec(package) is None:
            raise MissingExtraError(package, EXTRAS[package], "a worker")


class _WorkerProcess(NamedTuple):
    child: Child
    stdin: TextIO


class WorkerProcesses(WorkerGroup):
    """`with WorkerProcesses("atlas.runtime.process", names) as workers:` ends all processes on exit."""

    def __init__(self, module: str, names: Sequence[str], logs: WorkerLogs | None = None) -> None:
        super().__init__(names)
        _require_importable("torch", "safetensors")
        self.logs = logs or WorkerLogs()
        self._workers: dict[str, _WorkerProcess] = {}
        self._sending = threading.Lock()
        self._readers: list[threading.Thread] = []
        try:
            for name in self.names:
                self._workers[name] = self._start(module, name)
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> dict[str, int]:
        return {name: worker.child.pid for name, worker in self._workers.items()}

    def send(self, name: str, message: dict[str, Any]) -> None:
        stdin = self._workers[name].stdin
        with contextlib.suppress(OSError), self._sending:  # `wait_for` reports a worker that has ended
            stdin.write(json.dumps(message) + "\n")
            stdin.flush()

    def close(self) -> None:
        """Kill every process and wait until its output has ended."""
        for worker in self._workers.values():
            worker.child.kill()
            with contextlib.suppress(OSError):
                worker.stdin.close()
        deadline = time.monotonic() + END_S
        for worker in self._workers.values():
            worker.child.wait(max(0.0, deadline - time.monotonic()))
        for reader in self._readers:
            reader.join(max(0.0, deadline - time.monotonic()))
        self.logs.close()

    def _start(self, module: str, name: str) -> _WorkerProcess:
        their_stdin, stdin = os.pipe()
        stdout, their_stdout = os.pipe()
        try:
            with self.logs.file(name).open("a") as stderr:
                child = fork_server(module).start(their_stdin, their_stdout, stderr.fileno())
        except BaseException:
            os.close(stdin)
            os.close(stdout)
            raise
        finally:
            os.close(their_stdin)
            os.close(their_stdout)
        reader = threading.Thread(target=self._read, args=(name, os.fdopen(stdout)), daemon=True)
        reader.start()
        self._readers.append(reader)
        return _WorkerProcess(child, os.fdopen(stdin, "w"))

    def _read(self, name: str, stdout: TextIO) -> None:
        with stdout, contextlib.suppress(ValueError, OSError):
            for line in stdout:
                message, at_ns = json.loads(line), time.monotonic_ns()
                handler = self.handlers.get(next(iter(message), ""))
                if handler is not None:
                    handler(name, *message.values())
                else:
                    self._received.put(WorkerMessage(name, message, at_ns))
        self._received.put(WorkerMessage(name, None, time.monotonic_ns()))

    def next_message(self, timeout_s: float) -> WorkerMessage | None:
        """The next message, to be forwarded; None where none arrives in time."""
        with contextlib.suppress(queue.Empty):
            return self._received.get(timeout=timeout_s)
        return None

    def exit_reason(self, name: str) -> str:
        code = self._workers[name].child.wait(timeout_s=2)
        if code is None:
            return "closed its output but is still running"
        tail = self.logs.tail(name)
        return describe_exit(code) + (f"; {tail}" if tail else "")
