"""A share of hits is executed again, in a copy of the environment; a difference drops what may be wrong and names the
tool. With an environment that has a fingerprint, a tool that changes the state although declared `reads` is found even
where its own output is right."""

from __future__ import annotations

import copy
import logging
import queue
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass

from tvcache.counters import Counters
from tvcache.environments import Environment, Fingerprinted
from tvcache.history import History
from tvcache.rebuild import DivergedError, Make, Rebuilder
from tvcache.stores import Ask
from tvcache.tools import Effect, Tool
from tvcache.values import encode, encode_error

LOG = logging.getLogger("tvcache")
QUEUE = 64
"""Hits that wait to be executed again, at most."""


@dataclass(frozen=True)
class HitCheck:
    """One hit to execute again."""

    ask: Ask
    tool: Tool
    body: bytes
    history: History
    length: int
    """Length of the history when the call hit."""
    make: Make


Report = Callable[[Ask, Tool, Effect, str], None]
"""Called for every difference: the call, the responsible tool, its correct declaration, and the reason."""


class Audit:
    """Executes in the background, one check at a time; chosen hits are skipped while the queue is full."""

    def __init__(
        self, share: float, rebuilder: Rebuilder, counters: Counters, report: Report, seed: int | None = None
    ) -> None:
        self.share, self._random = share, random.Random(seed)
        self._rebuilder, self._counters, self._report = rebuilder, counters, report
        self._queue: queue.Queue[HitCheck | None] = queue.Queue(QUEUE)
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def chosen(self) -> bool:
        return self.share > 0 and self._random.random() < self.share

    def submit(self, check: HitCheck) -> None:
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="tvcache-audit", daemon=True)
                self._thread.start()
        try:
            self._queue.put_nowait(check)
        except queue.Full:
            self._counters.add(audits_skipped=1)

    def drain(self) -> None:
        """Wait until everything submitted so far was executed."""
        self._queue.join()

    def close(self) -> None:
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()

    def _work(self) -> None:
        while (check := self._queue.get()) is not None:
            try:
                self.run(check)
            except Exception as error:
                self._counters.add(audits_skipped=1)
                LOG.warning("tvcache: an audit of %r could not be executed (%s)", check.tool.name, error)
            finally:
                self._queue.task_done()

    def run(self, check: HitCheck) -> None:
        try:
            place = self._rebuilder.reach(check.history, check.length, check.make)
        except DivergedError as error:
            error.place.environment.close()
            self._blame(check, error.index)
            return
        try:
            self.compare(check.ask, check.tool, check.body, place.environment)
        finally:
            place.environment.close()

    def compare(self, ask: Ask, tool: Tool, body: bytes, environment: Environment) -> None:
        """Execute the call in an environment in the same state, and compare."""
        marked = environment if tool.effect == "reads" and isinstance(environment, Fingerprinted) else None
        before = marked.fingerprint() if marked is not None else ""
        try:
            found = encode(environment.execute(ask.call.name, copy.deepcopy(ask.call.arguments)))
        except Exception as error:
            found = encode_error(error) if isinstance(error, tool.errors) else None
        self._counters.add(audits=1)
        if marked is not None and marked.fingerprint() != before:
            self._report(ask, tool, "mutates", "it changed the environment although it is declared `reads`")
        elif found != body:
            self._report(ask, tool, "volatile", "executed again, it gave another output")

    def _blame(self, check: HitCheck, index: int) -> None:
        """Report a mutating call of the history that returned another output on replay."""
        history, call = check.history, check.history.calls[index]
        self._counters.add(audits=1)
        tool = self._rebuilder.tools.get(call.name, Tool(call.name))
        ask = Ask.of(history.task, history.states[index], call, True)
        self._report(ask, tool, "volatile", "executed again, it gave another output")
