"""Where a run keeps its checkpoints, as the user writes it: a folder, or `s3://bucket/prefix`. Several stores lie below
one place, each under a name.

Knows which kind of store a place has; not what is in it.
"""

from __future__ import annotations

import contextlib
import re
import secrets
from pathlib import Path

from atlas.errors import AtlasError
from atlas.runtime.checkpoint.object_store import S3BlobStore, require_object_store
from atlas.runtime.checkpoint.store import LocalStore, PlaceStore
from atlas.spec.recipe import OBJECT_STORE

ID_FILE = "folder.id"
_SAVE = re.compile(r"(^|/)step-\d+-a\d+/")


def store_at(place: str) -> PlaceStore:
    """The store of a place, or of one below it."""
    return S3BlobStore(place) if place.startswith(OBJECT_STORE) else LocalStore(place)


def below(place: str, name: str) -> str:
    """The place of a store with this name."""
    return f"{place.rstrip('/')}/{name}" if place.startswith(OBJECT_STORE) else str(Path(place) / name)


def names_below(place: str) -> list[str]:
    """Of the stores at a place. Raises AtlasError for a file."""
    if place.startswith(OBJECT_STORE):
        return S3BlobStore(place).folders()
    folder = Path(place)
    if folder.exists() and not folder.is_dir():
        raise AtlasError(f"{folder}: not a folder. Choose another place for checkpoints")
    return sorted(path.name for path in folder.iterdir() if path.is_dir()) if folder.exists() else []


def saves_under(place: str) -> list[PlaceStore]:
    """Every store with a save in it, at this place or anywhere below."""
    if place.startswith(OBJECT_STORE):
        require_object_store(place, "checkpoints at")
    elif not Path(place).is_dir():
        raise AtlasError(f"{place}: no such folder. Name the one that `atlas train` saves to")
    names = store_at(place).names()
    above = {name[: found.start()] for name in names if (found := _SAVE.search(name))}
    return [store_at(below(place, name) if name else place) for name in sorted(above)]


def id_of(place: str) -> str:
    """The same number for all that have this place, however they call it; empty if it cannot be written."""
    number = secrets.token_hex(8)
    with contextlib.suppress(OSError):
        if place.startswith(OBJECT_STORE):
            return S3BlobStore(place).write_once(ID_FILE, number.encode()).decode()
        folder = Path(place)
        folder.mkdir(parents=True, exist_ok=True)
        file, new = folder / ID_FILE, folder / f"{ID_FILE}.{number}"
        new.write_text(number)
        with contextlib.suppress(FileExistsError):
            file.hardlink_to(new)  # at once, with its content, and only by the first
        new.unlink()
        return file.read_text()
    return ""
