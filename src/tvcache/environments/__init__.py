"""What tools act on: `fork`, `execute`, `close`. The protocol is here; `memory`, `directory`, `sqlite` and `container`
are environments. Anything with these three methods is one."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable


class Environment(Protocol):
    def fork(self) -> Environment:
        """An independent copy. A fork that fails leaves nothing behind. CannotForkError: there is no such copy."""

    def execute(self, name: str, arguments: Any) -> Any:
        """Run a tool; its output."""

    def close(self) -> None:
        """Give back what it holds. May be called twice."""


@runtime_checkable
class Measured(Protocol):
    def size_bytes(self) -> int:
        """What a snapshot of it occupies; counted against the budget of bytes."""


@runtime_checkable
class Fingerprinted(Protocol):
    def fingerprint(self) -> str:
        """Differs when the state differs. With it, the audit finds tools that change the state but are declared
        `reads`, at the first such call that it executes again."""


def size_bytes(environment: Environment) -> int:
    return environment.size_bytes() if isinstance(environment, Measured) else 0
