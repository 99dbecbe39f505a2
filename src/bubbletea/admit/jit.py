"""`njit` for this room: numba's, kept between processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba

_Function = TypeVar("_Function", bound=Callable[..., Any])


def njit(function: _Function) -> _Function:
    """Compiled on its first call."""
    return cast(_Function, numba.njit(cache=True)(function))


def njit_anew(function: _Function) -> _Function:
    """The same, not kept: for what calls another file's functions, whose changes numba would not notice."""
    return cast(_Function, numba.njit(function))
