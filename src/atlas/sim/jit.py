"""`entry`, `njit` and `inlined` for this room: numba's, with a cache that notices a change in any of the room's files.

numba keys its cache by the file a function stands in; a function inlined from another file would go stale. So the
cache lies in a folder named after the digest of all the sources that end up in machine code.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import numba

_HERE = Path(__file__).parent
_SOURCES = ("jit", "future", "rows", "network", "compiled", "cell", "policy", "reprice", "lower", "reference_links")


def _cache_folder() -> Path | None:
    """Beside the sources where that can be written; else numba's own choice, a folder of the user."""
    digest = hashlib.sha256(numba.__version__.encode())
    for source in (*(_HERE / f"{name}.py" for name in _SOURCES), _HERE.parent / "ir" / "dispatch.py"):
        digest.update(source.read_bytes())
    folder = _HERE / "__pycache__" / f"numba-{digest.hexdigest()[:16]}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    return folder if os.access(folder, os.W_OK) else None


_folder = _cache_folder()
if _folder is not None and not os.environ.get("NUMBA_CACHE_DIR"):
    numba.config.CACHE_DIR = str(_folder)  # type: ignore[attr-defined]


_Function = TypeVar("_Function", bound=Callable[..., Any])

_PART: Any = {"no_cfunc_wrapper": True, "error_model": "numpy"}
"""Nobody calls from C, and nothing here divides by zero: what need not be compiled."""


def entry(function: _Function) -> _Function:
    """What Python calls: compiled on its first call, with all it calls, and kept for the next process."""
    return cast(_Function, numba.njit(**_PART | {"cache": True, "no_cpython_wrapper": False})(function))


def njit(function: _Function) -> _Function:
    """A part of an entry, never called from Python: no wrapper, no cache file of its own; compiles twice as fast."""
    return cast(_Function, numba.njit(**_PART | {"no_cpython_wrapper": True})(function))


def inlined(function: _Function) -> _Function:
    """A part that is called from one place: put there before anything is compiled, which saves a tenth of the time."""
    return cast(_Function, numba.njit(**_PART | {"no_cpython_wrapper": True, "inline": "always"})(function))
