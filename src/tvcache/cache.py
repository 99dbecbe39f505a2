"""The cache of one process: declared tools, a store of values, snapshots of environments, and the audit.

cache = Cache(tools=[Tool("search", "reads")])
with cache.rollout("task 7", make=lambda: MemoryEnvironment({}, tools)) as rollout:
    rollout.call("search", {"query": "x"})
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace

from tvcache.audit import Audit
from tvcache.counters import Counters
from tvcache.environments import Environment
from tvcache.errors import TvcacheError
from tvcache.keys import Task
from tvcache.rebuild import Make, Rebuilder
from tvcache.rollout import Rollout
from tvcache.snapshots import Snapshots
from tvcache.stores import Ask, CallStore, MemoryStore
from tvcache.tools import Effect, Tool

LOG = logging.getLogger("tvcache")


class Cache:
    def __init__(
        self,
        store: CallStore | None = None,
        tools: Iterable[Tool] = (),
        *,
        snapshots: Snapshots | None = None,
        audit: float = 0.01,
        wait_s: float = 600.0,
        seed: int | None = None,
    ) -> None:
        """`audit`: the share of hits that are executed again. `wait_s`: how long a call waits for an equal one that is
        being executed."""
        if not 0 <= audit <= 1:
            raise TvcacheError(f"audit {audit!r} is not a share: give a number from 0 to 1, such as 0.01")
        self.store: CallStore = store if store is not None else MemoryStore()
        self.snapshots = snapshots if snapshots is not None else Snapshots()
        self.counters = Counters()
        self.wait_s = wait_s
        self._tools: dict[str, Tool] = {}
        for tool in tools:
            self.declare(tool)
        self.found_mutating: set[str] = set()
        """Tools declared `reads` that changed the state in an audit."""
        self._told: set[str] = set()
        self.rebuilder = Rebuilder(self.snapshots, self._tools, self.counters)
        self.audit = Audit(audit, self.rebuilder, self.counters, self.differs, seed)

    def declare(self, tool: Tool) -> None:
        """Declare a tool. Another version gives new keys."""
        self._tools[tool.name] = tool

    def declare_once(self, tool: Tool) -> None:
        """Unless this version is declared already: the audit may have changed its effect."""
        known = self._tools.get(tool.name)
        if known is None or known.version != tool.version:
            self.declare(tool)

    def tool(self, name: str) -> Tool:
        return self._tools.get(name) or Tool(name)

    def rollout(
        self, task: Task | str, make: Make | None = None, *, environment: Environment | None = None, image: str = ""
    ) -> Rollout:
        """`make` returns a new environment in the task's initial state. Alternatively `environment`: used directly and
        never copied. `image`: the digest of the initial environment."""
        if (make is None) == (environment is None):
            raise TvcacheError("a rollout takes either `make` or `environment`: give one of them")
        return Rollout(self, Task(task, image) if isinstance(task, str) else task, make, environment)

    def differs(self, ask: Ask, tool: Tool, should_be: Effect, why: str) -> None:
        """A value cannot be trusted: drop everything in its state and after it, and treat the tool as it should have
        been declared from now on."""
        self.counters.differed(tool.name)
        if tool.effect == "reads" and should_be == "mutates":
            self.found_mutating.add(tool.name)
        self.store.drop(ask, tool.name, why)
        self.snapshots.drop(ask.state)
        self._tools[tool.name] = replace(self.tool(tool.name), effect=should_be)
        self._tell(
            f"differs {tool.name}",
            f"task {ask.task.name!r}: tool {tool.name!r}, declared `{tool.effect}`: {why}. Its values and all that "
            f"followed were dropped; it counts as `{should_be}` now. Declare it `{should_be}`",
        )

    def uncacheable(self, name: str, error: Exception) -> None:
        self.counters.add(uncacheable=1)
        self._tell(f"uncacheable {name}", f"tool {name!r} runs without a cache: {error}")

    def close(self) -> None:
        self.audit.close()
        self.snapshots.close()
        self.store.close()

    def __enter__(self) -> Cache:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _tell(self, what: str, message: str) -> None:
        if what not in self._told:
            self._told.add(what)
            LOG.warning("tvcache: %s", message)
