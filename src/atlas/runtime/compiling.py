"""Compiles functions by torch's compiler, if this host has what it needs; otherwise says once why not.

Compiled kernels are kept in a folder by the version of torch, so that a restart does not compile again. Knows torch and
the host; not models.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import logging
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from atlas.errors import AtlasError

log = logging.getLogger("atlas.compiling")
CACHE = "TORCHINDUCTOR_CACHE_DIR"
INDUCTOR, EAGER = "inductor", ""
"""Backends."""
ONCE = "once"
"""An attribute of log records: a warning that is the same on every host, and shown for the first one only."""
AUTOTUNE = ("TORCHINDUCTOR_MAX_AUTOTUNE", "TORCHINDUCTOR_MAX_AUTOTUNE_GEMM", "TORCHINDUCTOR_MAX_AUTOTUNE_POINTWISE")
MODULES = (
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "torch._dynamo.backends.inductor",
    "torch._inductor.codegen.cuda_combined_scheduling",
    "torch._inductor.runtime.triton_heuristics",
)
"""Of the compiler: two seconds and more. Not every build of torch has all of them."""
_loading: list[threading.Thread] = []


def available(backend: str, place: str, tp: int) -> str:
    """The backend that will be used: the given one, or EAGER, with a warning."""
    reason = _missing(backend, place, tp)
    if backend and reason:
        log.warning("compile: %s; layers run eagerly, which is slower", reason, extra={ONCE: True})
    return EAGER if reason else backend


def require_fixed_kernels(backend: str, sums: str) -> None:
    """Raise where the environment asks for kernels that are chosen by timing, and results must be equal to the bit."""
    found = [name for name in AUTOTUNE if os.environ.get(name, "0") != "0"]
    if backend == INDUCTOR and sums != "fast" and found:
        raise AtlasError(
            f"{found[0]}={os.environ[found[0]]} in the environment: kernels that are chosen by timing differ from host "
            f"to host, and sums: {sums} requires equal bits. Unset it, or train with sums: fast"
        )


def _missing(backend: str, place: str, tp: int) -> str:
    if backend and tp > 1:
        return "tensor-parallel layers are not compiled"
    if backend != INDUCTOR:
        return ""
    if place.startswith("cuda"):
        return "" if importlib.util.find_spec("triton") else "this host has no Triton"
    compiler = os.environ.get("CXX", "g++")
    return "" if shutil.which(compiler) else f"this host has no C++ compiler ({compiler})"


def load_ahead(backend: str) -> None:
    """Import the compiler on another thread, while this one builds a stage; `compiler` waits for it. This thread should
    import nothing of torch in between: two threads that import modules of one cycle may see a half-made one."""
    if backend == INDUCTOR and not _loading:
        _keep_kernels()
        _loading.append(threading.Thread(target=_load, daemon=True, name="load the compiler"))
        _loading[0].start()


def _load() -> None:
    for module in MODULES:
        with contextlib.suppress(ImportError):
            importlib.import_module(module)


def compiler(backend: str) -> Callable[[Callable[..., Any]], Callable[..., Any]] | None:
    """What compiles a function; None: run it eagerly."""
    if not backend:
        return None
    for thread in _loading:
        thread.join()
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
        text = "compile: kernels compiled with %s in %s are not used, because this is %s"
        log.warning(text, ", ".join(others), root, mine.name, extra={ONCE: True})
    os.environ[CACHE] = str(mine)
