"""Write a folder whole or not at all. Knows paths only; loads no torch."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from atlas.errors import AtlasError


@contextlib.contextmanager
def new_folder(folder: Path, *, may_be_empty: bool = False) -> Iterator[Path]:
    """A temporary folder that becomes `folder` at the end, or is removed after an error.

    Raises AtlasError if `folder` exists, with `may_be_empty` only if it has something in it.
    """
    if folder.exists() and not (may_be_empty and folder.is_dir() and not any(folder.iterdir())):
        raise AtlasError(f"{folder}: exists already. Choose another folder, or delete it first")
    part = folder.with_name(f".{folder.name}.{os.getpid()}.part")
    try:
        part.mkdir(parents=True)
        yield part
        part.replace(folder)
    except OSError as error:
        raise AtlasError(
            f"{error.filename or folder}: {error.strerror or error}. Check the path, free some space or choose another"
        ) from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
