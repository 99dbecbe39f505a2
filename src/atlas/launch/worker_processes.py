"""A fleet of worker processes: started together, spoken to in JSON lines, and ended together. Whatever happens to
one of them (an error, a kill, silence) ends all of them within seconds and is told as one WorkerError.

Knows pipes and what is said over them (processes: `fork_server`). Does not know what the workers do.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import signal
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from atlas.errors import EXTRAS, AtlasError, MissingExtraError, WorkerError
from atlas.launch.forkserver import Child, fork_server

log = logging.getLogger("atlas.launch")
GRACE_S = 0.7
"""How long after a first complaint to listen for others: who died matters more than who noticed."""
END_S = 30.0
"""How long a killed process may take to be gone: the kernel frees its memory first."""


class WorkerMessage(NamedTuple):
    """A line of a worker's, or the end of its output, and when it came on our monotonic clock."""

    name: str
    message: dict[str, Any] | None
    at_ns: int


Meanwhile = Callable[[str, dict[str, Any]], bool]


class WorkerGroup(ABC):
    """A group of workers, wherever they run, as whoever leads them hears them."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = list(names)
        self.warn: Callable[[str], None] = log.warning
        self._said: queue.SimpleQueue[WorkerMessage] = queue.SimpleQueue()

    @abstractmethod
    def tell(self, name: str, message: dict[str, Any]) -> None:
        """Gives one worker an order; one that is gone is reported by `hear`."""

    @abstractmethod
    def how_it_died(self, name: str) -> str:
        """Of a worker that has ended without a word: `was killed by SIGKILL`."""

    def title(self, name: str) -> str:
        """How an error calls it."""
        return f"worker {name}"

    def hear(
        self, key: str, timeout_s: float, *, of: Sequence[str] | None = None, meanwhile: Meanwhile = lambda *_: False
    ) -> dict[str, Any]:
        """What each worker (or each `of` some) says under `key`, once all have said it.

        `meanwhile` is given what they say under other keys, and says whether it was expected; what others say, who were
        not asked, waits until somebody asks. Nothing at all may come for at most `timeout_s`.
        """
        names, answers, others = list(self.names if of is None else of), dict[str, Any](), list[WorkerMessage]()
        while len(answers) < len(names):
            said = self._next(timeout_s, lambda: f"no {key!r} from {', '.join(n for n in names if n not in answers)}")
            if said.message is not None and key in said.message and said.name in names:
                answers[said.name] = said.message[key]
            elif said.message is None or not meanwhile(said.name, said.message):
                if said.name in names or said.message is None or "error" in said.message:
                    raise self._root_cause(said.name, said.message)
                others.append(said)
        for other in others:
            self._said.put(other)
        return answers

    def ask(self, name: str, message: dict[str, Any], key: str, timeout_s: float) -> tuple[Any, int]:
        """One worker's answer to a question, and when it came on our monotonic clock. What others say waits."""
        self.tell(name, message)
        others: list[WorkerMessage] = []
        while True:
            said = self._next(timeout_s, lambda: f"no {key!r} from {name}")
            if said.name == name and said.message is not None and key in said.message:
                for other in others:
                    self._said.put(other)
                return said.message[key], said.at_ns
            if said.message is None or "error" in said.message:
                raise self._root_cause(said.name, said.message)
            others.append(said)

    def _next(self, timeout_s: float, missing: Callable[[], str]) -> WorkerMessage:
        """Warnings, which may come at any time, are told on the way."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                said = self._said.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise WorkerError(f"{missing()} within {timeout_s:g} s") from None
            if said.message is None or "warning" not in said.message:
                return said
            self.warn(f"{self.title(said.name)}: {said.message['warning']}")

    def _root_cause(self, name: str, message: dict[str, Any] | None) -> AtlasError:
        """A worker that died without a word explains the complaints of its peers; otherwise the first counts. What
        somebody must mend is no WorkerError: starting again would not help."""
        complaints = [(name, message)]
        deadline = time.monotonic() + GRACE_S
        with contextlib.suppress(queue.Empty):
            while (left_s := deadline - time.monotonic()) > 0:
                complaints.append(self._said.get(timeout=left_s)[:2])
        spoke = {n for n, m in complaints if m is not None and "error" in m}
        for who, said in complaints:
            if said is None and who not in spoke:
                return WorkerError(f"{self.title(who)} {self.how_it_died(who)}")
        first = next(((n, m) for n, m in complaints if m is not None and "error" in m), complaints[0])
        assert first[1] is not None, "a death is found above"
        kind = AtlasError if first[1].get("mend") else WorkerError
        return kind(f"{self.title(first[0])} failed: {first[1].get('error', first[1])}")


def _require_importable(*packages: str) -> None:
    """Workers are other processes: that they lack a package is said here, before they are started."""
    for package in packages:
        if find_spec(package) is None:
            raise MissingExtraError(package, EXTRAS[package], "a worker")


class _Worker(NamedTuple):
    child: Child
    orders: TextIO


class WorkerProcesses(WorkerGroup):
    """`with WorkerProcesses("atlas.runtime.process", names) as workers:`; ends all processes on exit."""

    def __init__(self, module: str, names: Sequence[str]) -> None:
        super().__init__(names)
        _require_importable("torch", "safetensors")
        self._folder = tempfile.TemporaryDirectory(prefix="atlas-fleet-")
        self.folder = Path(self._folder.name)
        self._workers: dict[str, _Worker] = {}
        self._listeners: list[threading.Thread] = []
        try:
            for name in self.names:
                self._workers[name] = self._start(module, name)
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> dict[str, int]:
        return {name: worker.child.pid for name, worker in self._workers.items()}

    def tell(self, name: str, message: dict[str, Any]) -> None:
        orders = self._workers[name].orders
        with contextlib.suppress(OSError):  # a worker that is gone is reported by `hear`
            orders.write(json.dumps(message) + "\n")
            orders.flush()

    def close(self) -> None:
        """Ends every process, now, and waits for each: its output has ended, so it writes no more."""
        for worker in self._workers.values():
            worker.child.kill()
            with contextlib.suppress(OSError):
                worker.orders.close()
        deadline = time.monotonic() + END_S
        for worker in self._workers.values():
            worker.child.wait(max(0.0, deadline - time.monotonic()))
        for listener in self._listeners:
            listener.join(max(0.0, deadline - time.monotonic()))
        self._folder.cleanup()

    def __enter__(self) -> WorkerProcesses:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self, module: str, name: str) -> _Worker:
        their_orders, orders = os.pipe()
        answers, their_answers = os.pipe()
        try:
            with (self.folder / f"{name}.log").open("w") as log:
                child = fork_server(module).start(their_orders, their_answers, log.fileno())
        except BaseException:
            os.close(orders)
            os.close(answers)
            raise
        finally:
            os.close(their_orders)
            os.close(their_answers)
        listener = threading.Thread(target=self._listen, args=(name, os.fdopen(answers)), daemon=True)
        listener.start()
        self._listeners.append(listener)
        return _Worker(child, os.fdopen(orders, "w"))

    def _listen(self, name: str, answers: TextIO) -> None:
        with answers, contextlib.suppress(ValueError, OSError):
            for line in answers:
                self._said.put(WorkerMessage(name, json.loads(line), time.monotonic_ns()))
        self._said.put(WorkerMessage(name, None, time.monotonic_ns()))

    def next_said(self, timeout_s: float) -> WorkerMessage | None:
        """What comes next, for whoever passes it on; None where nothing does."""
        with contextlib.suppress(queue.Empty):
            return self._said.get(timeout=timeout_s)
        return None

    def how_it_died(self, name: str) -> str:
        code = self._workers[name].child.wait(timeout_s=2)
        if code is None:
            return "closed its output but lives"
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended early with exit code {code}"
        tail = (self.folder / f"{name}.log").read_text(errors="replace").strip().splitlines()[-5:]
        return how + ("; its last words: " + " | ".join(tail) if tail else "")
