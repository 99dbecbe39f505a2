"""Write a file or a folder whole or not at all. Imports nothing heavy."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from atlas.errors import AtlasError


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """A temporary file that replaces `path` at the end, or is removed after an error.

    Of a symbolic link, the target is replaced. A device or a pipe is written to directly.
    """
    is_special = _is_special(Path(path))
    target = Path(path) if is_special else Path(os.path.realpath(path))
    temporary = target if is_special else target.with_name(f".{target.name[:50]}.{os.getpid()}.part")
    try:
        with temporary.open("wb") as file:
            yield file
        if not is_special:
            temporary.replace(target)
    except OSError as error:
        raise AtlasError(
            f"{path}: cannot be written: {error.strerror}. Free some space or choose another place"
        ) from error
    finally:
        if not is_special:
            with contextlib.suppress(OSError):  # if it could not be created, that error is raised already
                temporary.unlink(missing_ok=True)


def write_whole(path: str | os.PathLike[str], data: bytes) -> None:
    """Write the file whole or not at all."""
    with replacing(path) as file:
        file.write(data)


def _is_special(path: Path) -> bool:
    """Whether the path exists and is not a regular file."""
    try:
        return path.exists() and not path.is_file()
    except OSError:  # opening it raises the same error
        return False


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
