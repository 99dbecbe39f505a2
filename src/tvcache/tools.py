"""The declared effect of a tool on its environment. The cache relies on it, and the audit checks it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

from tvcache.errors import TvcacheError

Effect = Literal["reads", "mutates", "volatile"]


@dataclass(frozen=True)
class Tool:
    """An undeclared tool is `Tool(name)`: it mutates."""

    name: str
    effect: Effect = "mutates"
    """`reads`: the output depends on arguments and state, and the state stays as it is. `mutates`: so does the output,
    and the next state depends on nothing else either. `volatile`: never cached."""
    version: str = ""
    errors: tuple[type[Exception], ...] = ()
    """Exceptions that are values: they follow from arguments and state, and are raised again on a hit."""
    accept: Callable[[Any], bool] | None = None
    """False for outputs that must not be stored, such as a report of a timeout."""
    changes_state: bool = True
    """For a volatile tool: False if it only reads (a clock). Otherwise the rest of the rollout is private."""

    def __post_init__(self) -> None:
        if self.effect not in get_args(Effect):
            raise TvcacheError(
                f"tool {self.name!r}: effect {self.effect!r} is not one of {', '.join(get_args(Effect))}. "
                "Leave it out if in doubt: a tool mutates by default"
            )

    @property
    def mutates(self) -> bool:
        return self.effect == "mutates" or (self.effect == "volatile" and self.changes_state)
