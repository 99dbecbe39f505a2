"""Compiles functions by torch's compiler, if this host has what it needs; otherwise says once why not.

`inductor` makes kernels; `aot_eager` only traces, for tests. Compiled kernels are kept in a folder by the version of
torch, so that a restart does not compile again. Knows torch and the host; not models.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

log = logging.getLogger("atlas.compiling")
CACHE = "TORCHINDUCTOR_CACHE_DIR"
INDUCTOR, TRACED, EAGER = "inductor", "aot_eager", ""
"""Backends."""


def available(backend: str, place: str, tp: int) -> str:
    """The backend that will be used: the given one, or EAGER, with a warning."""
    reason = _missing(backend, place, tp)
    if backend and reason:
        log.warning("compile: %s; layers run eagerly, which is slower", reason)
    return EAGER if reason else backend


def _missing(backend: str, place: str, tp: int) -> str:
    if backend and tp > 1:
        return "tensor-parallel layers are not compiled"
    if backend != INDUCTOR:
        return ""
    if place.startswith("cuda"):
        return "" if importlib.util.find_spec("triton") else "this host has no Triton"
    compiler = os.environ.get("CXX", "g++")
    return "" if shutil.which(compiler) else f"this host has no C++ compiler ({compiler})"


def compiler(backend: str) -> Callable[[Callable[..., Any]], Callable[..., Any]] | None:
    """What compiles a function; None: run it eagerly."""
    if not backend:
        return None
    if backend == INDUCTOR:
        _keep_kernels()
    return functools.partial(torch.compile, backend=backend, fullgraph=True, dynamic=False)


def _keep_kernels() -> None:
    if CACHE in os.environ:
        return
    root = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "atlas" / "compiled"
    mine = root / f"torch-{torch.__version__}"
    others = [folder.name for folder in root.glob("torch-*") if folder != mine]
    if others and not mine.exists():
        log.warning("compile: kernels of %s in %s are not used: this is %s", ", ".join(others), root, mine.name)
    os.environ[CACHE] = str(mine)
