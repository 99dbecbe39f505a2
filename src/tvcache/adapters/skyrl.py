"""SkyRL-gym: a `ToolGroup` whose tools go through the cache. Three lines in an environment's code:

    from tvcache.adapters.skyrl import wrap
    rollout = wrap(env.tool_group, cache, task=f"spider/{question_id}", reads={"sql"})
    ... the rollout as before ...; rollout.close()

The group stays the same object, so existing references work. Tools that are not named in `reads` or `volatile`
mutate. A tool group cannot be copied: mutating calls that hit are executed when a later call misses.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, Protocol

from tvcache.cache import Cache
from tvcache.environments.live import LiveEnvironment
from tvcache.errors import TvcacheError
from tvcache.rollout import Rollout
from tvcache.tools import Tool


class ToolGroup(Protocol):
    """The used part of `skyrl_gym.tools.core.ToolGroup`: `execute_tool` calls `get_tool`."""

    get_tool: Callable[[str], Callable[..., Any] | None]

    def get_tool_names(self) -> list[str]: ...


def wrap(
    group: ToolGroup,
    cache: Cache,
    *,
    task: str,
    image: str = "",
    reads: Collection[str] = (),
    volatile: Collection[str] = (),
    version: str = "",
    accept: Callable[[Any], bool] | None = None,
) -> Rollout:
    """One rollout over all tools of a group. `accept`: False for outputs that are not stored (see `is_value`)."""
    names = group.get_tool_names()
    for name in (*reads, *volatile):
        if name not in names:
            raise TvcacheError(f"the tool group has no {name!r}: there are {', '.join(names)}")
    original = group.get_tool
    for name in names:
        effect = "volatile" if name in volatile else "reads" if name in reads else "mutates"
        cache.declare(Tool(name, effect, version, accept=accept))  # type: ignore[arg-type]

    def execute(name: str, arguments: Any) -> Any:
        args, kwargs = arguments
        function = original(name)
        if function is None:
            raise ValueError(f"Tool '{name}' not found in group.")
        return function(*args, **kwargs)

    rollout = cache.rollout(task, environment=LiveEnvironment(execute), image=image)

    def get_tool(name: str) -> Callable[..., Any] | None:
        if original(name) is None:
            return None
        return lambda *args, **kwargs: rollout.call(name, [list(args), kwargs])

    group.get_tool = get_tool
    return rollout


def is_value(output: Any) -> bool:
    """For `SQLCodeExecutorToolGroup`: a timeout depends on the machine's load, not on the query."""
    return not (isinstance(output, str) and "SQL Timeout" in output)
