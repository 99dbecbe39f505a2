"""The protocol of a store of values, and a store in this process. `client` is one behind a server.

A store has keys and bytes and executes nothing. The first value wins and stays until it is dropped.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from tvcache.keys import Task, ToolCall, key
from tvcache.leases import CallLease, CallLeases
from tvcache.values import Value


@dataclass(frozen=True)
class Ask:
    """One call in one state."""

    task: Task
    state: bytes
    call: ToolCall
    key: bytes
    mutates: bool

    @classmethod
    def of(cls, task: Task, state: bytes, call: ToolCall, mutates: bool) -> Ask:
        return cls(task, state, call, key(state, call), mutates)


@dataclass(frozen=True)
class Lease:
    """Permission to execute a call. Number 0: no other caller waits for it."""

    number: int = 0


class CallStore(Protocol):
    def begin(self, ask: Ask, wait_s: float) -> Value | Lease:
        """The value; or a lease to execute the call, at once or after waiting `wait_s` for another caller."""

    def finish(self, ask: Ask, lease: Lease, value: Value | None) -> Value | None:
        """Store the value, or None if there is none. Returns the stored value: the first wins."""

    def drop(self, ask: Ask, tool: str, reason: str) -> None:
        """Remove every value of this call's state and of every later state."""

    def close(self) -> None: ...


class MemoryStore:
    """Values of this process."""

    def __init__(self, flight_s: float = 600.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._values: dict[bytes, Value] = {}
        self._children: dict[bytes, list[bytes]] = {}
        self._flights = CallLeases(flight_s)
        self._failed: dict[bytes, int] = {}
        self._changed = threading.Condition()
        self._clock = clock

    def __len__(self) -> int:
        return len(self._values)

    def begin(self, ask: Ask, wait_s: float) -> Value | Lease:
        found = self._values.get(ask.key)
        if found is not None:
            return found
        give_up_s = self._clock() + wait_s
        with self._changed:
            failures = self._failed.get(ask.key, 0)
            while True:
                found, now_s = self._values.get(ask.key), self._clock()
                if found is not None:
                    return found
                if self._failed.get(ask.key, 0) != failures:
                    return Lease()  # the executing caller failed: all others execute it themselves
                asked = self._flights.ask(ask.key, now_s)
                if isinstance(asked, CallLease):
                    return Lease(asked.lease)
                if now_s >= give_up_s:
                    return Lease()
                self._changed.wait(min(asked, give_up_s) - now_s)

    def finish(self, ask: Ask, lease: Lease, value: Value | None) -> Value | None:
        with self._changed:
            if value is None:
                self._failed[ask.key] = self._failed.get(ask.key, 0) + 1
            elif ask.key not in self._values:
                self._values[ask.key] = value
                self._children.setdefault(ask.state, []).append(ask.key)
            self._flights.end(lease.number)
            self._changed.notify_all()
            return self._values.get(ask.key)

    def drop(self, ask: Ask, tool: str, reason: str) -> None:
        with self._changed:
            waiting = [ask.state]
            while waiting:
                for child in self._children.pop(waiting.pop(), ()):
                    self._values.pop(child, None)
                    waiting.append(child)

    def close(self) -> None:
        pass
