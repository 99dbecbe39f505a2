"""The environments of tools: `fork`, `execute`, `close`. The protocol is here; `memory`, `directory`, `sqlite` and
`container` implement it. Any object with these three methods is an environment.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Protocol, runtime_checkable

from tvcache.errors import TvcacheError


class Environment(Protocol):
    def fork(self) -> Environment:
        """An independent copy. Raises CannotForkError if there is none. A fork that fails leaves nothing behind."""

    def execute(self, name: str, arguments: Any) -> Any:
        """Run a tool; its output."""

    def close(self) -> None:
        """Release all resources. May be called twice."""


@runtime_checkable
class Sized(Protocol):
    def size_bytes(self) -> int:
        """Size of a snapshot, counted against the byte budget."""


@runtime_checkable
class Fingerprinted(Protocol):
    def fingerprint(self) -> str:
        """Differs when the state differs. With it, the audit finds tools that change the state but are declared
        `reads`, at the first such call that it executes again."""


def require_tool(name: str, tools: Collection[str]) -> None:
    if name not in tools:
        raise TvcacheError(f"no tool {name!r}: this environment has {', '.join(sorted(tools))}")


def size_bytes(environment: Environment) -> int:
    return environment.size_bytes() if isinstance(environment, Sized) else 0
