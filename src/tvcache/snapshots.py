"""Copies of environments, kept where executing the calls again would take longer than making and restoring a copy.

Budgets of count and bytes always hold. The cheapest to rebuild is evicted first. A snapshot that is being forked is
leased; a lease expires, so one that is never released blocks nothing. Dropping a snapshot costs time
later, never a result.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

from tvcache.environments import Environment, size_bytes
from tvcache.errors import CannotForkError
from tvcache.history import History

Policy = Literal["measured", "always", "never"]
LEASE_S = 300.0
"""A snapshot that is being forked is not evicted for this long."""
GUESS_S, GUESS_BYTES_PER_S = 1e-4, 500e6
LOG = logging.getLogger("tvcache")


@dataclass
class Snapshot:
    environment: Environment
    history: History
    length: int
    """Of the history, where it was taken."""
    size_bytes: int
    used_s: float
    rebuild_s: float = 0.0
    """Seconds to execute the calls since the nearest snapshot before it."""
    leases: dict[int, float] = field(default_factory=dict)
    """Expiry by number."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    """One fork at a time."""

    def marks(self, history: History, state: bytes, start: int, end: int) -> bool:
        """Whether it is a state of this history, at a length in `[start, end]`."""
        return start <= self.length <= end and history.states[self.length] == state

    def leased(self, now_s: float) -> bool:
        return any(now_s < until_s for until_s in self.leases.values())


class Snapshots:
    """Snapshots of every task, by state."""

    def __init__(
        self,
        max_count: int = 64,
        max_bytes: int = 8 << 30,
        policy: Policy = "measured",
        lease_s: float = LEASE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.max_count, self.max_bytes, self.policy, self.lease_s = max_count, max_bytes, policy, lease_s
        self._kept: dict[bytes, Snapshot] = {}
        self._fork_s: dict[bytes, float] = {}
        """By task: how long copies took lately, or a guess."""
        self._measured: set[bytes] = set()
        self._unforkable: set[bytes] = set()
        """Tasks whose environments have no copies."""
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._clock = clock

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, state: bytes) -> bool:
        return state in self._kept

    @property
    def used_bytes(self) -> int:
        return sum(one.size_bytes for one in list(self._kept.values()))

    def restore_s(self, history: History) -> float:
        """Expected seconds of a copy; 0 until one was measured."""
        return self._fork_s.get(history.states[0], 0.0)

    def nearest(self, history: History, start: int, end: int) -> int | None:
        """The longest length in `[start, end]` of which there is a snapshot."""
        found = [one.length for state, one in list(self._kept.items()) if one.marks(history, state, start, end)]
        return max(found, default=None)

    def fork(self, history: History, length: int) -> Environment | None:
        """A copy of a snapshot; None if it is gone or cannot be copied, and was removed."""
        with self.lease(history.states[length]) as found:
            if found is None:
                return None
            try:
                with found.lock:
                    return self._timed_fork(found.environment, history)
            except Exception as error:
                LOG.warning("tvcache: a snapshot of task %r cannot be forked (%s): dropped", history.task.name, error)
        self._forget(history.states[length])
        return None

    @contextmanager
    def lease(self, state: bytes) -> Iterator[Snapshot | None]:
        """A snapshot that is not evicted while its lease lasts."""
        number = next(self._numbers)
        with self._lock:
            found = self._kept.get(state)
            if found is not None:
                found.used_s = self._clock()
                found.leases[number] = found.used_s + self.lease_s
        try:
            yield found
        finally:
            if found is not None:
                with self._lock:
                    found.leases.pop(number, None)

    def consider(self, environment: Environment, history: History, length: int, make_s: float = 0.0) -> None:
        """Keep a copy of an environment that is in this state, if the policy says so. Never raises: without a snapshot
        the cache is slower, not wrong. `make_s`: what starting from nothing costs, besides the calls."""
        state = history.states[length]
        if self.policy == "never" or state in self._kept or history.states[0] in self._unforkable:
            return
        self._guess(environment, history)
        before = self.nearest(history, 0, length)
        rebuild_s = history.replay_s(before or 0, length) + (make_s if before is None else 0.0)
        if self.policy == "measured" and rebuild_s <= 2 * self.restore_s(history):
            return
        try:
            size = size_bytes(environment)
            if not self._make_room(size, rebuild_s):
                return
            copy = self._timed_fork(environment, history)
        except CannotForkError:
            self._unforkable.add(history.states[0])
            return
        except Exception as error:
            LOG.warning("tvcache: could not make a snapshot of task %r (%s)", history.task.name, error)
            return
        self._keep(state, Snapshot(copy, history, length, size, self._clock(), rebuild_s))

    def drop(self, state: bytes) -> None:
        """Remove the snapshots of this state and of every later state."""
        with self._lock:
            found = [key for key, one in self._kept.items() if state in one.history.states[: one.length + 1]]
        for key in found:
            self._forget(key)

    def close(self) -> None:
        for state in list(self._kept):
            self._forget(state)

    def _guess(self, environment: Environment, history: History) -> None:
        """Expected time of a copy, by its size, until one is measured."""
        if history.states[0] not in self._fork_s:
            self._fork_s[history.states[0]] = GUESS_S + size_bytes(environment) / GUESS_BYTES_PER_S

    def _timed_fork(self, environment: Environment, history: History) -> Environment:
        began_s = time.perf_counter()
        copy = environment.fork()
        took_s, task = time.perf_counter() - began_s, history.states[0]
        measured = task in self._measured
        self._measured.add(task)
        self._fork_s[task] = (self._fork_s[task] + took_s) / 2 if measured else took_s
        return copy

    def _keep(self, state: bytes, snapshot: Snapshot) -> None:
        with self._lock:
            raced = self._kept.setdefault(state, snapshot) is not snapshot
            over = not raced and (len(self._kept) > self.max_count or self.used_bytes > self.max_bytes)
            if over:  # others were kept while this one was copied
                del self._kept[state]
        if raced or over:
            snapshot.environment.close()

    def _make_room(self, size: int, rebuild_s: float) -> bool:
        """Evict snapshots that are cheaper to rebuild than the new one until it fits."""
        closing: list[Environment] = []
        with self._lock:
            now_s = self._clock()
            free = sorted(
                (key for key, one in self._kept.items() if not one.leased(now_s)),
                key=lambda key: (self._kept[key].rebuild_s, self._kept[key].used_s),
            )
            count, used, going = len(self._kept) + 1, self.used_bytes + size, []
            for key in free:
                if count <= self.max_count and used <= self.max_bytes:
                    break
                if self._kept[key].rebuild_s > rebuild_s:
                    return False
                going.append(key)
                count, used = count - 1, used - self._kept[key].size_bytes
            if count > self.max_count or used > self.max_bytes:
                return False
            for key in going:
                closing.append(self._remove(key).environment)
        for environment in closing:
            environment.close()
        return True

    def _remove(self, state: bytes) -> Snapshot:
        """Called with the lock held. Later snapshots become more expensive to rebuild."""
        gone = self._kept.pop(state)
        for one in self._kept.values():
            if one.length > gone.length and one.history.states[gone.length] == state:
                nearer = self.nearest(one.history, gone.length, one.length - 1)
                if nearer is None:
                    one.rebuild_s += gone.rebuild_s
        return gone

    def _forget(self, state: bytes) -> None:
        with self._lock:
            gone = self._remove(state) if state in self._kept else None
        if gone is not None:
            try:
                gone.environment.close()
            except Exception as error:
                LOG.warning("tvcache: closing a snapshot failed (%s)", error)
