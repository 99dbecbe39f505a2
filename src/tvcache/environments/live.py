"""Tools that act on something the cache cannot copy: the rollout's own functions or objects.

Mutating calls that hit are not executed at once; they are executed in order when a call misses. Without copies there
are no snapshots, and the audit executes only tools declared `reads`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvcache.errors import CannotForkError


class LiveEnvironment:
    """`run(name, arguments)` executes a tool."""

    def __init__(self, run: Callable[[str, Any], Any]) -> None:
        self._run = run

    def fork(self) -> LiveEnvironment:
        raise CannotForkError("a live environment cannot be copied: give the rollout `make`, not `environment`")

    def execute(self, name: str, arguments: Any) -> Any:
        return self._run(name, arguments)

    def close(self) -> None:
        pass
