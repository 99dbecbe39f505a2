"""How a file is written whole or not at all. Imports nothing heavy: the commands that must be quick use it too."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from atlas.errors import AtlasError


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """A file to write to that takes the place of `path` when all went well, and vanishes when not.

    A link stays one, and what it points to is replaced. A device or a pipe is nobody's to replace: it is written to.
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
            with contextlib.suppress(OSError):  # where it could not even be made, the reason is told already
                temporary.unlink(missing_ok=True)


def write_whole(path: str | os.PathLike[str], data: bytes) -> None:
    """Write the file whole or not at all."""
    with replacing(path) as file:
        file.write(data)


def _is_special(path: Path) -> bool:
    """Whether there is something of this name that is no plain file."""
    try:
        return path.exists() and not path.is_file()
    except OSError:  # whoever opens it will hear why
        return False
