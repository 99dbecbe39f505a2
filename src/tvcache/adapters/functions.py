"""Plain functions as tools, by a decorator.

    @tool(effect="reads")
    def search(query: str) -> str: ...

    with rollout_of(cache, "task 7"):
        search("x")

Outside of a rollout the function runs unchanged. Arguments are bound to their names first, so that `search("x")` and
`search(query="x")` are one call. Functions act on objects that cannot be copied, so there are no snapshots.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

from tvcache.cache import Cache
from tvcache.environments.live import LiveEnvironment
from tvcache.errors import TvcacheError
from tvcache.rollout import Rollout, current
from tvcache.tools import Effect, Tool

P = ParamSpec("P")
R = TypeVar("R")
_FUNCTIONS: dict[str, Callable[..., Any]] = {}
"""By tool name: used to execute calls that were hits before."""


def tool(
    *,
    effect: Effect = "mutates",
    name: str | None = None,
    version: str = "",
    errors: tuple[type[Exception], ...] = (),
    accept: Callable[[Any], bool] | None = None,
    changes_state: bool = True,
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Declare a function as a tool; the arguments are those of `Tool`."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        if inspect.iscoroutinefunction(function):
            raise TvcacheError(
                f"{function.__qualname__} is a coroutine function: decorate a plain function that awaits it"
            )
        declared = Tool(name or function.__qualname__, effect, version, errors, accept, changes_state)
        signature = inspect.signature(function)
        _FUNCTIONS[declared.name] = function

        @functools.wraps(function)
        def called(*args: P.args, **kwargs: P.kwargs) -> R:
            rollout = current.get()
            if rollout is None:
                return function(*args, **kwargs)
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            rollout.cache.declare_once(declared)
            return cast(R, rollout.call(declared.name, [list(bound.args), dict(bound.kwargs)]))

        return called

    return decorate


def rollout_of(cache: Cache, task: str, image: str = "") -> Rollout:
    """A rollout whose tools are decorated functions."""
    return cache.rollout(task, environment=LiveEnvironment(_execute), image=image)


def _execute(name: str, arguments: Any) -> Any:
    args, kwargs = arguments
    return _FUNCTIONS[name](*args, **kwargs)
