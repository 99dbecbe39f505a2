"""verl: a `BaseTool` whose calls go through the cache. In the module that a tool configuration names:

    from tvcache.adapters.verl import cached
    CachedSearch = cached(SearchTool, effect="reads")      # class_name: my_tools.CachedSearch

verl 0.9 creates and releases an instance for every call, so a rollout is `agent_data.request_id`. Calls of one turn
start together; they are executed in the order in which the model wrote them, because each may change what the next one
sees. All tools of a rollout share one history, whatever class they are.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import os
import sys
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tvcache.cache import Cache
from tvcache.client import Client
from tvcache.environments.live import LiveEnvironment
from tvcache.errors import TvcacheError
from tvcache.keys import canonical
from tvcache.rollout import Rollout
from tvcache.stores import CallStore
from tvcache.tools import Effect, Tool

_numbers = itertools.count(1)
MAX_THREADS = 512
"""Rollouts of a step that call tools at once; each blocks one thread."""
URL_VARIABLE, TOKEN_VARIABLE = "TVCACHE_URL", "TVCACHE_TOKEN"


class Session:
    """One rollout: `agent_data` as verl gives it, its calls in order."""

    def __init__(self, rollout: Rollout, loop: asyncio.AbstractEventLoop) -> None:
        self.rollout, self.loop = rollout, loop
        self.turn = asyncio.Lock()
        """Fair: first come, first served."""
        self.tools: dict[str, Callable[[Any], Any]] = {}
        """How to execute a call of each tool: a coroutine function of its parameters."""


class Sessions:
    """Rollouts of one process by request id. One ends when verl releases its `agent_data`."""

    def __init__(self, cache: Cache | None = None) -> None:
        self._cache = cache
        self._lock = threading.Lock()
        self._open: dict[str, Session] = {}
        self.pool = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="tvcache")
        """For calls that wait: asyncio's own pool has only a few threads."""

    def __len__(self) -> int:
        return len(self._open)

    @property
    def cache(self) -> Cache:
        with self._lock:
            if self._cache is None:
                self._cache = Cache(_store())
            return self._cache

    def of(self, agent_data: Any, task: str) -> Session:
        request_id, cache = str(agent_data.request_id), self.cache
        with self._lock:
            found = self._open.get(request_id)
            if found is None:
                found = self._open[request_id] = self._new(cache, task)
                weakref.finalize(agent_data, self._end, request_id)
            return found

    def _new(self, cache: Cache, task: str) -> Session:
        loop = asyncio.get_running_loop()

        def execute(name: str, parameters: Any) -> Any:
            """In a worker thread; the tool itself runs where verl would run it."""
            return asyncio.run_coroutine_threadsafe(made.tools[name](parameters), loop).result()

        made = Session(cache.rollout(task, environment=LiveEnvironment(execute)), loop)
        return made

    def _end(self, request_id: str) -> None:
        found = self._open.pop(request_id, None)
        if found is not None:
            found.rollout.close()


SESSIONS = Sessions()
"""The sessions of this process, with the cache named by the environment variables."""


def cached(
    tool_class: type[Any],
    *,
    effect: Effect = "mutates",
    version: str = "",
    accept: Callable[[Any], bool] | None = None,
    changes_state: bool = True,
    task: Callable[[Any], str] | None = None,
    sessions: Sessions | None = None,
) -> type[Any]:
    """A subclass of a `BaseTool` class. `task(agent_data)` identifies the initial environment; by default everything
    that verl passes to the tools of a sample (`tools_kwargs`)."""
    shared = sessions if sessions is not None else SESSIONS
    response_class = _response_class(tool_class)

    class Cached(tool_class):  # type: ignore[misc]
        async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, Any]:
            # The real instance is made when a call is executed. This one only holds its arguments.
            if instance_id is None:
                instance_id = f"tvcache-{next(_numbers)}"
            self._created()[instance_id] = kwargs
            return instance_id, response_class()

        async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
            agent_data = kwargs.get("agent_data")
            if agent_data is None or not hasattr(agent_data, "request_id"):
                return await self._really(self._created().get(instance_id, {}), parameters, kwargs)
            session = shared.of(agent_data, (task or task_of)(agent_data))
            async with session.turn:
                shared.cache.declare_once(Tool(self.name, effect, version, accept=accept, changes_state=changes_state))
                session.tools[self.name] = _runner(self, self._created().get(instance_id, {}), agent_data, kwargs)
                found = await session.loop.run_in_executor(shared.pool, session.rollout.call, self.name, parameters)
            return found if isinstance(found, tuple) else _unpacked(found, response_class)

        async def release(self, instance_id: str, **kwargs: Any) -> None:
            self._created().pop(instance_id, None)

        async def _really(self, given: dict[str, Any], parameters: dict[str, Any], kwargs: dict[str, Any]) -> Any:
            instance_id, _ = await super().create(**given)
            try:
                return await super().execute(instance_id, parameters, **kwargs)
            finally:
                await super().release(instance_id)

        def _created(self) -> dict[str, dict[str, Any]]:
            return self.__dict__.setdefault("_tvcache_created", {})  # type: ignore[no-any-return]

    Cached.__name__ = Cached.__qualname__ = f"Cached{tool_class.__name__}"
    return Cached


def _runner(tool: Any, given: Any, agent_data: Any, kwargs: dict[str, Any]) -> Callable[[Any], Any]:
    """How a call is executed, now or later. Holds `agent_data` weakly: the rollout ends when verl drops it."""
    owner = weakref.ref(agent_data)
    others = {name: value for name, value in kwargs.items() if name != "agent_data"}

    async def run(parameters: dict[str, Any]) -> Any:
        return _packed(await tool._really(given, parameters, others | {"agent_data": owner()}))

    return run


def task_of(agent_data: Any) -> str:
    """A digest of what verl passes to the tools of a sample."""
    given = getattr(agent_data, "tools_kwargs", None) or {}
    return hashlib.sha256(canonical(given)).hexdigest()


def _store() -> CallStore | None:
    url = os.environ.get(URL_VARIABLE)
    return Client(url, os.environ.get(TOKEN_VARIABLE, "")) if url else None


def _packed(found: Any) -> Any:
    """(response, reward, metrics) as JSON; unchanged, and not storable, with images or video."""
    response, reward, metrics = found
    if getattr(response, "image", None) or getattr(response, "video", None):
        return found
    return {"text": response.text, "reward": reward, "metrics": metrics}


def _unpacked(found: Any, response_class: Any) -> tuple[Any, float, dict[str, Any]]:
    return response_class(text=found["text"]), found["reward"], found["metrics"]


def _response_class(tool_class: type[Any]) -> Any:
    """Verl's own class, from the module that the tool's base class is in: nothing of verl is imported here."""
    for base in tool_class.__mro__:
        if base.__name__ == "BaseTool":
            return sys.modules[base.__module__].ToolResponse
    raise TvcacheError(f"{tool_class.__name__} is not a verl BaseTool: derive it from verl.tools.base_tool.BaseTool")
