"""numba's `njit`, with machine code that is kept between processes and never stale.

numba keys its cache by the file of a function; a function or constant imported from another file would become stale,
and an index that names a class which no longer exists cannot be read. So the cache is in a folder named after the
digest of all sources that the compiled file imports from.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

import numba

_ROOT = Path(__file__).parents[1]
_OURS = r"(?:atlas|bubbletea)[\w.]*"
_IMPORT = re.compile(rf"^\s*(?:from ({_OURS}) import (\([^)]*\)|[^\n]*)|import ({_OURS}))", re.MULTILINE)
_Function = TypeVar("_Function", bound=Callable[..., Any])
_PART: Any = {"no_cfunc_wrapper": True, "error_model": "numpy", "_nrt": False}
"""Not called from C, no division by zero, and no arrays made inside, so none are counted: code that need not be
compiled."""


def sources(file: Path, root: Path = _ROOT) -> list[Path]:
    """The file, and every file of our packages below `root` that it imports from, directly or not: a constant of any
    of them may end up in machine code."""
    found, waiting = set[Path](), [file]
    while waiting:
        path = waiting.pop()
        if path in found:
            continue
        found.add(path)
        for source, names, plain in _IMPORT.findall(path.read_text()):
            module = root.joinpath(*(source or plain).split("."))
            members = [module / f"{name}.py" for name in re.findall(r"\w+", names)]
            waiting += [file for file in (module.with_suffix(".py"), *members) if file.is_file()]
    return sorted(found)


def digest(file: Path, root: Path = _ROOT) -> str:
    """Of everything that ends up in machine code, and of the compiler."""
    known = hashlib.sha256(numba.__version__.encode())
    for source in sources(file, root):
        known.update(source.read_bytes())
    return known.hexdigest()[:16]


@cache
def cache_folder(file: Path) -> Path:
    """Where the machine code of one source file is kept."""
    return file.parent / "__pycache__" / f"numba-{digest(file)}"


def kept(function: _Function, **options: Any) -> _Function:
    """Compiled on its first call, and kept for the next process: beside the source where that can be written, or where
    NUMBA_CACHE_DIR says; else in a folder of the user."""
    folder, before = cache_folder(Path(function.__code__.co_filename)), numba.config.CACHE_DIR  # type: ignore[attr-defined]
    if not os.environ.get("NUMBA_CACHE_DIR") and os.access(folder.parent.parent, os.W_OK):
        numba.config.CACHE_DIR = str(folder)  # type: ignore[attr-defined]
    try:
        return cast(_Function, numba.njit(cache=True, **options)(function))
    finally:
        numba.config.CACHE_DIR = before  # type: ignore[attr-defined]


def entry(function: _Function) -> _Function:
    """What Python calls: kept, with all it calls."""
    return kept(function, **_PART)


def njit(function: _Function) -> _Function:
    """A part of an entry, never called from Python: no wrapper, no cache file of its own; compiles twice as fast."""
    return cast(_Function, numba.njit(**_PART | {"no_cpython_wrapper": True})(function))


def inlined(function: _Function) -> _Function:
    """A part that is called from one place: put there before anything is compiled, which saves a tenth of the time."""
    return cast(_Function, numba.njit(**_PART | {"no_cpython_wrapper": True, "inline": "always"})(function))
