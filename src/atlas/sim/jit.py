"""`entry`, `njit` and `inlined` for this package: numba's, with a cache that notices a change in any source file.

numba keys its cache by the file of a function; a function or constant imported from another file would become stale. So
the cache is in a folder named after the digest of all sources that the compiled files import from.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import numba

_ROOT = Path(__file__).parents[1]
_IMPORT = re.compile(r"^\s*(?:from (atlas[\w.]*) import (\([^)]*\)|[^\n]*)|import (atlas[\w.]*))", re.MULTILINE)


def sources(root: Path) -> list[Path]:
    """The files in `sim` that compile anything, and every file of the package that they import from, directly or not:
    a constant of any of them may end up in machine code."""
    found: set[Path] = set()
    room = [path for path in (root / "sim").glob("*.py") if "atlas.sim.jit" in path.read_text()]
    waiting = [root / "sim" / "jit.py", *room]
    while waiting:
        path = waiting.pop()
        if path in found:
            continue
        found.add(path)
        for source, names, plain in _IMPORT.findall(path.read_text()):
            module = root.joinpath(*(source or plain).split(".")[1:])
            members = [module / f"{name}.py" for name in re.findall(r"\w+", names)]
            waiting += [file for file in (module.with_suffix(".py"), *members) if file.is_file()]
    return sorted(found)


def digest(root: Path) -> str:
    """Of everything that ends up in machine code, and of the compiler."""
    known = hashlib.sha256(numba.__version__.encode())
    for source in sources(root):
        known.update(source.read_bytes())
    return known.hexdigest()[:16]


def _cache_folder() -> Path | None:
    """Beside the sources where that can be written; else numba's own choice, a folder of the user."""
    folder = _ROOT / "sim" / "__pycache__" / f"numba-{digest(_ROOT)}"
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
"""Not called from C, and no division by zero: code that need not be compiled."""


def entry(function: _Function) -> _Function:
    """What Python calls: compiled on its first call, with all it calls, and kept for the next process."""
    return cast(_Function, numba.njit(**_PART | {"cache": True, "no_cpython_wrapper": False})(function))


def njit(function: _Function) -> _Function:
    """A part of an entry, never called from Python: no wrapper, no cache file of its own; compiles twice as fast."""
    return cast(_Function, numba.njit(**_PART | {"no_cpython_wrapper": True})(function))


def inlined(function: _Function) -> _Function:
    """A part that is called from one place: put there before anything is compiled, which saves a tenth of the time."""
    return cast(_Function, numba.njit(**_PART | {"no_cpython_wrapper": True, "inline": "always"})(function))
