"""Bring an environment to a state: from where it is, from the nearest snapshot, or from nothing, whichever is cheapest
by measured seconds, and execute the rest of the history in it. It uses only the expected outputs of replayed calls."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tvcache.counters import Counters
from tvcache.environments import Environment
from tvcache.errors import ReplayError
from tvcache.history import History
from tvcache.snapshots import Snapshots
from tvcache.tools import Tool
from tvcache.values import encode, encode_error

Make = Callable[[], Environment]


@dataclass
class Rebuilt:
    """An environment, and how many calls of the history were executed in it."""

    environment: Environment
    length: int
    make_s: float = 0.0
    """Seconds to create it, if it is new."""


class DivergedError(Exception):
    """A replayed call returned another output than before."""

    def __init__(self, place: Rebuilt, index: int) -> None:
        self.place, self.index = place, index


class Rebuilder:
    def __init__(self, snapshots: Snapshots, tools: Mapping[str, Tool], counters: Counters) -> None:
        self.snapshots, self.tools, self.counters = snapshots, tools, counters

    def reach(self, history: History, length: int, make: Make | None, own: Rebuilt | None = None) -> Rebuilt:
        """`own` is closed if another environment is cheaper. Raises ReplayError, or DivergedError with the
        environment in it, which has then executed all of the history."""
        if own is not None and own.length == length:
            return own
        place, again = self._start(history, length, make, own), make
        while True:
            try:
                return self._replay(history, length, place)
            except DivergedError:
                raise
            except Exception as error:
                place.environment.close()
                if again is None:
                    raise ReplayError(_failed(history, place, error)) from error
            place, again = Rebuilt(again(), 0), None  # the snapshot may be damaged: try again with a new environment

    def _start(self, history: History, length: int, make: Make | None, own: Rebuilt | None) -> Rebuilt:
        while True:
            at = self.snapshots.nearest(history, own.length + 1 if own else 0, length)
            if at is None:
                break
            saved_s = history.replay_s(own.length if own else 0, at)
            if own is not None and saved_s <= self.snapshots.restore_s(history):
                break
            forked = self.snapshots.fork(history, at)
            if forked is not None:
                if own is not None:
                    own.environment.close()
                return Rebuilt(forked, at)
        if own is not None:
            return own
        if make is None:
            raise ReplayError(f"task {history.task.name!r}: the rollout has no environment. Give it `make`")
        began_s = time.perf_counter()
        return Rebuilt(make(), 0, time.perf_counter() - began_s)

    def _replay(self, history: History, length: int, place: Rebuilt) -> Rebuilt:
        began_s, first, diverged = time.perf_counter(), place.length, None
        while place.length < length:
            index = place.length
            call = history.calls[index]
            body = self._execute(place.environment, call.name, copy.deepcopy(call.arguments))
            if body != history.bodies[index] and diverged is None:
                diverged = index
            place.length += 1
        if place.length > first:
            self.counters.add(replayed=place.length - first, replayed_s=time.perf_counter() - began_s)
        if diverged is not None:
            raise DivergedError(place, diverged)
        self.snapshots.consider(place.environment, history, length, place.make_s)
        return place

    def _execute(self, environment: Environment, name: str, arguments: object) -> bytes | None:
        try:
            return encode(environment.execute(name, arguments))
        except Exception as error:
            tool = self.tools.get(name)
            if tool is None or not isinstance(error, tool.errors):
                raise
            return encode_error(error)


def _failed(history: History, place: Rebuilt, error: Exception) -> str:
    name = history.calls[place.length].name if place.length < len(history) else "?"
    return (
        f"task {history.task.name!r}: call {place.length + 1} ({name}) failed when it was executed again: {error}. "
        "Declare a tool that may fail by chance `volatile`"
    )
