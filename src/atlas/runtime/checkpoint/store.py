"""Where checkpoints lie: named blobs that appear whole or not at all. A folder here; an object store has the same
four verbs, and its puts are atomic by nature.

Knows names and bytes, not what they mean. Failures are OSErrors: who writes decides what they are worth.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import BinaryIO, Protocol

Chunk = bytes | memoryview


class BlobStore(Protocol):
    """Names are relative paths with `/`. Implementations may be called from several threads at once."""

    def write(self, name: str, chunks: Iterable[Chunk]) -> None:
        """Put a blob, durably, in place of any other of this name; a failure leaves the other as it was."""

    def open(self, name: str) -> BinaryIO:
        """A blob to read from; FileNotFoundError where there is none."""
        raise NotImplementedError

    def names(self, prefix: str = "") -> list[str]:
        """Every whole blob whose name begins with `prefix`, sorted."""
        raise NotImplementedError

    def delete(self, name: str) -> None:
        """Remove a blob; none of this name is as good."""


class LocalStore:
    """A folder. Writes go to a hidden file beside the target, are flushed to the disk, and take its name."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root)

    def __str__(self) -> str:
        return str(self.root)

    def write(self, name: str, chunks: Iterable[Chunk]) -> None:
        target = self._path(name)
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f".{target.name}.{os.getpid()}.{threading.get_ident()}.part")
        try:
            with temporary.open("wb") as file:
                for chunk in chunks:
                    file.write(chunk)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(target)
            # The name is on the disk once its folder is, and the folder's name once the root is.
            for folder in {target.parent, self.root}:
                _flush(folder)
        finally:
            temporary.unlink(missing_ok=True)

    def open(self, name: str) -> BinaryIO:
        return self._path(name).open("rb")

    def names(self, prefix: str = "") -> list[str]:
        # A folder may go while we look (os.walk then passes over it): another process clears old saves away.
        files = (Path(folder, name) for folder, _, names in os.walk(self.root) for name in names)
        found = (path.relative_to(self.root).as_posix() for path in files)
        return sorted(name for name in found if name.startswith(prefix) and not _is_unfinished(name))

    def delete(self, name: str) -> None:
        """Also takes away what a killed writer left in the blob's folder, and the folder, when nothing else is left."""
        path = self._path(name)
        path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            left = list(path.parent.iterdir())
            if path.parent != self.root and all(_is_unfinished(file.name) for file in left):
                for file in left:
                    file.unlink(missing_ok=True)
                path.parent.rmdir()

    def _path(self, name: str) -> Path:
        parts = PurePosixPath(name).parts
        if not parts or PurePosixPath(name).is_absolute() or ".." in parts:
            raise PermissionError(f"{name!r} lies outside {self.root}")
        return self.root.joinpath(*parts)


def _is_unfinished(name: str) -> bool:
    file = name.rpartition("/")[2]
    return file.startswith(".") and file.endswith(".part")


def _flush(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
