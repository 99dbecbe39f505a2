"""What a tool does to its environment, as its owner declares it. The cache trusts it, and the audit checks it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

from tvcache.errors import TvcacheError

Effect = Literal["reads", "mutates", "volatile"]


@dataclass(frozen=True)
class Tool:
    """A tool that nobody declared is `Tool(name)`: it mutates."""

    name: str
    effect: Effect = "mutates"
    """`reads`: the output depends on arguments and state, and the state stays as it is. `mutates`: so does the output,
    and the next state depends on nothing else either. `volatile`: never cached."""
    version: str = ""
    errors: tuple[type[Exception], ...] = ()
    """Exceptions that are values: they follow from arguments and state, and are raised again on a hit."""
    accept: Callable[[Any], bool] | None = None
    """False for outputs that are no values, such as a text that reports a timeout."""
    changes_state: bool = True
    """Of a volatile tool: False for one that only looks (a clock). Otherwise the rest of the rollout is private."""

    def __post_init__(self) -> None:
        if self.effect not in get_args(Effect):
            raise TvcacheError(
                f"tool {self.name!r}: effect {self.effect!r} is none of {', '.join(get_args(Effect))}. "
                "Leave it out if in doubt: a tool mutates by default"
            )

    @property
    def mutates(self) -> bool:
        return self.effect == "mutates" or (self.effect == "volatile" and self.changes_state)
