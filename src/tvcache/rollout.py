"""One rollout: its calls in order, each a hit or executed in the rollout's own environment.

The environment is created at the first miss and brought up to date at later ones. A rollout uses its cache; it does not
know where values are stored.
"""

from __future__ import annotations

import copy
import logging
import threading
import time
from collections.abc import Callable
from contextvars import ContextVar, Token
from typing import TYPE_CHECKING, Any

from tvcache.audit import HitCheck
from tvcache.environments import Environment
from tvcache.errors import ArgumentsError, CannotForkError, ReplayError
from tvcache.history import History
from tvcache.keys import Task, ToolCall
from tvcache.rebuild import DivergedError, Make, Rebuilt
from tvcache.stores import Ask
from tvcache.tools import Tool
from tvcache.values import Value, decode, encode, encode_error

if TYPE_CHECKING:
    from tvcache.cache import Cache

LOG = logging.getLogger("tvcache")
current: ContextVar[Rollout | None] = ContextVar("tvcache_rollout", default=None)
"""The rollout of decorated functions."""


class Rollout:
    """Use it in a `with` block, or close it. Calls of several threads are executed one after the other."""

    def __init__(self, cache: Cache, task: Task, make: Make | None, environment: Environment | None) -> None:
        self.cache, self.task = cache, task
        self.history = History(task)
        self.private = False
        """The state no longer follows from the history: nothing is looked up or stored any more."""
        self.hits = 0
        self._make = make
        self._place = Rebuilt(environment, 0) if environment is not None else None
        self._read: set[str] = set()
        """Tools declared `reads` that were executed in its environment."""
        self._lock = threading.Lock()
        self._token: Token[Rollout | None] | None = None

    def call(self, name: str, arguments: Any) -> Any:
        """The tool's output, or what it raises, as without a cache."""
        tool = self.cache.tool(name)
        with self._lock:
            ask = None if self.private or tool.effect == "volatile" else self._ask(tool, arguments)
            if ask is None:
                return self._privately(tool, arguments)
            return self._cached(ask, tool, lambda environment: environment.execute(name, arguments))

    def reward(self, name: str, function: Callable[[Environment], Any], arguments: Any = None) -> Any:
        """What `function(environment)` gives for the state that all mutating calls so far have made. The function may
        change the environment, since it gets a copy if the environment can be copied. Put everything else that the
        reward depends on, such as an answer, into `arguments`."""
        tool = Tool(name, "reads")
        with self._lock:
            ask = None if self.private else self._ask(tool, arguments, "reward")
            if ask is None:
                return self._in_copy(self._environment(), function)
            return self._cached(ask, tool, lambda environment: self._in_copy(environment, function))

    def environment(self) -> Environment:
        """The rollout's own environment, in its present state."""
        with self._lock:
            return self._environment()

    def close(self) -> None:
        with self._lock:
            if self._place is not None:
                self._place.environment.close()
                self._place = None

    def __enter__(self) -> Rollout:
        self._token = current.set(self)
        return self

    def __exit__(self, *_: object) -> None:
        if self._token is not None:
            current.reset(self._token)
        self.close()

    def _ask(self, tool: Tool, arguments: Any, kind: str = "call") -> Ask | None:
        """None: the call has no canonical form, so it is executed without a cache."""
        try:
            call = ToolCall(tool.name, copy.deepcopy(arguments), tool.version, self.task.image, kind)
            return Ask.of(self.task, self.history.state, call, tool.mutates)
        except (ArgumentsError, RecursionError, TypeError) as error:
            self.cache.uncacheable(tool.name, error)
            return None

    def _privately(self, tool: Tool, arguments: Any) -> Any:
        environment = self._environment()
        self.cache.counters.add(private=1)
        self.private = self.private or tool.mutates  # also on failure: its effect is unknown
        return environment.execute(tool.name, arguments)

    def _cached(self, ask: Ask, tool: Tool, run: Callable[[Environment], Any]) -> Any:
        found = self.cache.store.begin(ask, self.cache.wait_s)
        if isinstance(found, Value):
            return self._hit(ask, tool, found)
        self.cache.counters.add(misses=1)
        value, finished = None, False
        try:
            environment = self._environment()
            if self.private:  # the replay showed that the history is not reproducible
                return run(environment)
            value, output = self._run(tool, environment, run)
            first = self.cache.store.finish(ask, found, value)
            finished = True
        finally:
            if not finished:
                self.cache.store.finish(ask, found, None)
        self._executed(ask, tool, value, first)
        if isinstance(output, Exception):
            raise output
        return output

    def _run(self, tool: Tool, environment: Environment, run: Callable[[Environment], Any]) -> tuple[Value | None, Any]:
        """The value, if there is one, and the output; an error that is a value is returned, others are raised."""
        if not tool.mutates:
            self._read.add(tool.name)
        began_s, output, body, done = time.perf_counter(), None, None, False
        try:
            output = run(environment)
            body = encode(output)
            done = tool.accept is None or tool.accept(output)
        except tool.errors as error:
            output, body, done = error, encode_error(error), True
        finally:
            if not done and tool.mutates:
                self.private = True  # it failed or was interrupted: the state does not match the key
        seconds = time.perf_counter() - began_s
        self.cache.counters.add(executed_s=seconds)
        return (Value(body, seconds) if done and body is not None else None), output

    def _executed(self, ask: Ask, tool: Tool, value: Value | None, first: Value | None) -> None:
        if self.private:
            return
        if value is not None and first is not None and first.body != value.body:
            # Another caller stored a different output for the same call. Ours matches this rollout's environment.
            self.private = self.private or tool.mutates
            self.cache.differs(ask, tool, "volatile", "two executions gave different outputs")
        if not tool.mutates:
            return
        assert self._place is not None, "what executed a call has an environment"
        if value is None or first is None:
            self.private = True  # later values could not be dropped with it: a chain must have no gaps
            return
        self.history.append(ask.call, ask.key, value.body, value.seconds)
        self._place.length = len(self.history)
        if not self.private:
            self.cache.snapshots.consider(self._place.environment, self.history, self._place.length, self._place.make_s)

    def _hit(self, ask: Ask, tool: Tool, value: Value) -> Any:
        self.hits += 1
        self.cache.counters.add(hits=1, saved_s=value.seconds)
        if ask.call.kind == "call" and self.cache.audit.chosen():
            self._audit(ask, tool, value)
        if tool.mutates:
            self.history.append(ask.call, ask.key, value.body, value.seconds)
        return decode(value.body, tool)

    def _audit(self, ask: Ask, tool: Tool, value: Value) -> None:
        if self._make is not None:
            self.cache.audit.submit(HitCheck(ask, tool, value.body, self.history, len(self.history), self._make))
        elif tool.effect == "reads":  # no copy available, but reads can be repeated
            self.cache.audit.compare(ask, tool, value.body, self._environment())
        else:
            self.cache.counters.add(audits_skipped=1)

    def _in_copy(self, environment: Environment, function: Callable[[Environment], Any]) -> Any:
        try:
            copied = environment.fork()
        except CannotForkError:
            return function(environment)
        except Exception as error:
            LOG.warning("tvcache: task %r: could not copy the environment for a reward (%s)", self.task.name, error)
            self.private = True  # the reward may change what later calls see
            return function(environment)
        try:
            return function(copied)
        finally:
            copied.close()

    def _environment(self) -> Environment:
        try:
            self._place = self.cache.rebuilder.reach(self.history, len(self.history), self._make, self._place)
        except DivergedError as error:
            self._place, self.private = error.place, True
            call = self.history.calls[error.index]
            ask = Ask.of(self.task, self.history.states[error.index], call, True)
            self.cache.differs(ask, self.cache.tool(call.name), "volatile", "replayed, it gave another output")
        except ReplayError:
            self._place = None
            raise
        if not self.cache.found_mutating.isdisjoint(self._read):
            self.private = True  # a tool declared as a read has changed this environment
        return self._place.environment
