"""What the tests of the commands share."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class Said(NamedTuple):
    """What a command answered."""

    code: int
    out: str
    err: str


Atlas = Callable[..., Said]
