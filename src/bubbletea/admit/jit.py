"""`njit` for admission: numba's, with machine code kept between processes.

numba keeps one index per function. The index names the classes of its arguments, and one that no longer exists makes
the index unreadable. So the cache is in a folder named after the digest of the compiled sources. Knows no admission.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import numba

_Function = TypeVar("_Function", bound=Callable[..., Any])


def cache_folder(source: Path) -> Path:
    """Where the machine code of one source file is kept; another text of the file has another folder."""
    known = hashlib.sha256(numba.__version__.encode() + source.read_bytes())
    return source.parent / "__pycache__" / f"numba-{known.hexdigest()[:16]}"


def njit(function: _Function) -> _Function:
    """Compiled on the first call. Cached only where the folder can be written, or where NUMBA_CACHE_DIR says."""
    folder, before = cache_folder(Path(function.__code__.co_filename)), numba.config.CACHE_DIR  # type: ignore[attr-defined]
    if not os.environ.get("NUMBA_CACHE_DIR") and os.access(folder.parent.parent, os.W_OK):
        numba.config.CACHE_DIR = str(folder)  # type: ignore[attr-defined]
    try:
        return cast(_Function, numba.njit(cache=True)(function))
    finally:
        numba.config.CACHE_DIR = before  # type: ignore[attr-defined]


def njit_uncached(function: _Function) -> _Function:
    """Not cached: for functions that call compiled functions of another file, whose changes numba would not notice."""
    return cast(_Function, numba.njit(function))
