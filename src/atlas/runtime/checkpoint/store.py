"""Where checkpoints are stored: named blobs that appear complete or not at all. Here a folder; `object_store` has S3,
whose puts are atomic by nature.

Knows names and bytes, not what they mean. Failures are OSErrors; the caller decides what they mean.
"""

from __future__ import annotations

import contextlib
import errno
import io
import itertools
import os
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO, Protocol

Chunk = bytes | memoryview


class BlobStore(Protocol):
    """Names are relative paths with `/`. Implementations may be called from several threads at once."""

    def write(self, name: str, chunks: Iterable[Chunk]) -> None:
        """Put a blob, durably, in place of any other of this name; a failure leaves the other unchanged."""

    def open(self, name: str) -> BinaryIO:
        """Open a blob for reading. Raises FileNotFoundError if it does not exist."""
        raise NotImplementedError

    def names(self, prefix: str = "") -> list[str]:
        """Every complete blob whose name begins with `prefix`, sorted."""
        raise NotImplementedError

    def delete(self, name: str) -> None:
        """Remove a blob, if there is one."""


class BlobWriter(Protocol):
    """A blob that is being written. It appears with `commit`; `close` without it discards it."""

    def write(self, chunk: Chunk) -> None: ...

    def commit(self) -> None: ...

    def close(self) -> None: ...


class PlaceStore(BlobStore, Protocol):
    """A store that this host can write to by itself: a folder or an object store."""

    def create(self, name: str) -> BlobWriter:
        """A blob to be written piece by piece."""
        raise NotImplementedError


class BlobFile(io.RawIOBase):
    """A blob that is read from any position on; `readinto` is left to the kinds of stores."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes, self._at = num_bytes, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self.num_bytes}[whence]
        return self._at


def write_blob(writer: BlobWriter, chunks: Iterable[Chunk]) -> None:
    """All of it, or nothing."""
    try:
        for chunk in chunks:
            writer.write(chunk)
        writer.commit()
    finally:
        writer.close()


def checked(name: str) -> str:
    """The name of a blob; raises PermissionError for one outside its store."""
    if {"", ".", ".."} & set(name.split("/")):
        raise PermissionError(errno.EACCES, f"{name!r} is outside the store")
    return name


class LocalStore:
    """A folder. Writes go to a hidden file beside the target, which is flushed to the disk and renamed."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root)

    def __str__(self) -> str:
        return str(self.root)

    def write(self, name: str, chunks: Iterable[Chunk]) -> None:
        write_blob(self.create(name), chunks)

    def create(self, name: str) -> FileWriter:
        """A blob to be written piece by piece."""
        return FileWriter(self.root, self._path(name))

    def open(self, name: str) -> BinaryIO:
        return self._path(name).open("rb")

    def names(self, prefix: str = "") -> list[str]:
        inside = prefix.rpartition("/")[0]
        top = self._path(inside) if inside else self.root
        # Another process may delete old saves meanwhile; os.walk skips a folder that is gone.
        files = (Path(folder, name) for folder, _, names in os.walk(top) for name in names)
        found = (path.relative_to(self.root).as_posix() for path in files)
        return sorted(name for name in found if name.startswith(prefix) and not _is_unfinished(name))

    def delete(self, name: str) -> None:
        """Also removes leftovers of a killed writer in the blob's folder, and the folder, when no blob is left."""
        path = self._path(name)
        path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            left = list(path.parent.iterdir())
            if path.parent != self.root and all(_is_unfinished(file.name) for file in left):
                for file in left:
                    file.unlink(missing_ok=True)
                path.parent.rmdir()

    def _path(self, name: str) -> Path:
        return self.root / checked(name)


class FileWriter:
    """A blob of a LocalStore that is being written."""

    def __init__(self, root: Path, target: Path) -> None:
        self._root, self._target = root, target
        target.parent.mkdir(parents=True, exist_ok=True)
        self._temporary = target.with_name(f".{target.name}.{os.getpid()}.{next(_numbers)}.part")
        self._file = self._temporary.open("wb")

    def write(self, chunk: Chunk) -> None:
        self._file.write(chunk)

    def commit(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._temporary.replace(self._target)
        # The name is on the disk once its folder is, and the folder's name once the root is.
        for folder in {self._target.parent, self._root}:
            _flush(folder)

    def close(self) -> None:
        with contextlib.suppress(OSError):  # buffered bytes do not fit: `write` or `commit` has failed already
            self._file.close()
        self._temporary.unlink(missing_ok=True)


_numbers = itertools.count()
"""Of this process's temporary files."""


def _is_unfinished(name: str) -> bool:
    file = name.rpartition("/")[2]
    return file.startswith(".") and file.endswith(".part")


def _flush(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
