"""How the workers of a run find their service: a folder with one file for each datacenter, in which the service
writes its address and a token. Workers read it whenever they have no connection, so a service may start late, end,
and return at another address. Hosts without a shared file system get a copy of the file.

Files of other users are refused: workers connect to the address in the file. Knows files; connects to nothing but an
address that another service has left there.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from atlas.errors import AtlasError, WorkerError

ALL = "all"
"""The file of a service for every datacenter: of a run on one machine."""
MAX_FILE_BYTES = 4096
"""A file has an address and a token; more is not read."""
CONNECT_S = 1.0
"""Time limit for finding out whether the service of an existing file still listens."""


@dataclass(frozen=True)
class ServicePlace:
    """How to reach a service."""

    address: str
    """`unix:PATH` or `HOST:PORT`."""
    token: str
    tls: bool = False
    """Both ends prove their names with the run's certificates, and everything is encrypted."""


def service_folder(given: str | Path | None) -> Path:
    """The user's own on this host, unless another one is given."""
    return Path(given) if given else Path(tempfile.gettempdir()) / f"bubbletea-{os.getuid()}"


@contextmanager
def announced(folder: Path, datacenter: str | None, place: ServicePlace) -> Iterator[Path]:
    """The file exists inside the block; a killed service leaves it, and the next one replaces it."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _require_own(folder, folder.stat())
        file = folder / f"{datacenter or ALL}.json"
        _require_free(file, datacenter)
        new = file.with_suffix(f".{os.getpid()}")
        new.unlink(missing_ok=True)
        new.touch(mode=0o600)
        new.write_text(json.dumps(asdict(place)), encoding="utf-8")
        new.replace(file)
    except OSError as error:
        raise AtlasError(f"{folder}: {error.strerror or error}. Choose another --folder") from None
    try:
        yield file
    finally:
        with contextlib.suppress(OSError, WorkerError, AtlasError):
            if _read(file) == place:
                file.unlink()


def find(settings: Mapping[str, Any], datacenter: str) -> ServicePlace | None:
    """The service of a datacenter, by the settings of its filler; None: none has announced itself. Raises AtlasError
    for a file that cannot be trusted or read."""
    if "address" in settings:
        return ServicePlace(str(settings["address"]), Path(settings["token_file"]).read_text(encoding="utf-8").strip())
    folder = service_folder(settings.get("folder"))
    found = (_read(folder / f"{name}.json") for name in (datacenter, ALL))
    return next((place for place in found if place is not None), None)


def _read(file: Path) -> ServicePlace | None:
    try:
        with file.open("rb") as opened:
            _require_own(file, os.fstat(opened.fileno()))
            data = opened.read(MAX_FILE_BYTES)
    except FileNotFoundError:
        return None
    try:
        fields = json.loads(data)
        return ServicePlace(str(fields["address"]), str(fields["token"]), bool(fields["tls"]))
    except (ValueError, KeyError, TypeError):
        raise AtlasError(f"{file}: not a file of `bubbletea serve`. Delete it, and start the service again") from None


def _require_own(path: Path, found: os.stat_result) -> None:
    if found.st_uid not in (os.getuid(), 0) or found.st_mode & 0o022:
        raise AtlasError(
            f"{path}: belongs to another user, or others may write it (owner {found.st_uid}, mode "
            f"{found.st_mode & 0o777:o}). Choose another folder, or chmod it to 700"
        )


def _require_free(file: Path, datacenter: str | None) -> None:
    """Raises AtlasError if the service that announced itself here still listens."""
    place = _read(file)
    if place is None:
        return
    host, _, port = place.address.rpartition(":")
    with contextlib.suppress(OSError, ValueError), socket.create_connection((host, int(port)), timeout=CONNECT_S):
        where = f"datacenter {datacenter}" if datacenter else "all datacenters"
        raise AtlasError(
            f"{file}: a service of {where} listens at {place.address}. Stop it first, or choose another --folder here "
            "and --filler-folder in training"
        )
