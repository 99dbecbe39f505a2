"""A text environment that counts what it executes, for tests of tvcache."""

from __future__ import annotations

from typing import Any

from tvcache.environments.memory import MemoryEnvironment


class Notebook(MemoryEnvironment):
    """A list of texts. Counts what is executed, in all copies together."""

    def __init__(self, state: list[str], executed: list[str], forks: list[int]) -> None:
        super().__init__(state, {"write": self.write, "read": self.read, "undo": self.undo})
        self.executed, self.forks = executed, forks

    @staticmethod
    def write(state: list[str], text: str) -> int:
        state.append(text)
        return len(state)

    @staticmethod
    def undo(state: list[str]) -> str:
        return state.pop()

    @staticmethod
    def read(state: list[str]) -> str:
        return "\n".join(state)

    def execute(self, name: str, arguments: Any) -> Any:
        self.executed.append(name if "text" not in arguments else f"{name} {arguments['text']}")
        return super().execute(name, arguments)

    def fork(self) -> Notebook:
        self.forks.append(1)
        return Notebook(list(self.state), self.executed, self.forks)
