"""Checkpoints in an object store: `s3://bucket/prefix`, at AWS or at any service with S3's protocol, by the package
obstore. A put is atomic: a writer that is killed leaves the whole object or none.

Credentials, region and endpoint come from the environment (AWS_ACCESS_KEY_ID, AWS_REGION, AWS_ENDPOINT_URL, ...) or
from the cloud's metadata service. Knows names and bytes. Failures are OSErrors, as of a folder.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import re
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import Any, BinaryIO, cast

from atlas.errors import AtlasError, MissingExtraError
from atlas.runtime.checkpoint.store import BlobFile, Chunk, checked, write_blob

_URL = re.compile(r"s3://(?P<bucket>[a-z0-9][a-z0-9.-]{1,61}[a-z0-9])(?P<prefix>(/[^/]+)*)")
PUT_BYTES, PUTS_AT_ONCE = 16 << 20, 4
"""Of a multipart upload. They bound a worker's memory for it, and a blob to 160 GB (10,000 parts)."""
READ_BYTES = 8 << 20
"""One request of a reader that does not read all at once."""
NUM_RETRIES, RETRY = 6, timedelta(seconds=60)
"""Of one request: tries after the first, and the time for all."""


def require_object_store(url: str, flag: str) -> None:
    """Raise AtlasError if this URL is wrong, obstore is not installed, or the bucket cannot be listed."""
    try:
        S3BlobStore(url).folders()
    except ModuleNotFoundError as error:
        raise MissingExtraError.of(error, f"{flag} {url}") or error from None
    except OSError as error:
        raise AtlasError(
            f"{flag} {url}: the bucket cannot be read: {error.strerror or error}. Check its name, AWS_REGION, "
            "AWS_ENDPOINT_URL and the credentials (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY)"
        ) from error


class S3BlobStore:
    """A prefix of a bucket."""

    def __init__(self, url: str) -> None:
        import obstore  # of the extra s3, which few runs need
        from obstore.store import S3Store

        self.url = url.rstrip("/")
        found = _URL.fullmatch(self.url)
        if found is None or ".." in self.url:
            raise AtlasError(f"{url}: not the URL of an object store. Write s3://BUCKET/PREFIX, without `..`")
        self._api: Any = obstore
        self._objects: Any = S3Store(
            found["bucket"],
            prefix=found["prefix"].lstrip("/") or None,
            client_options={
                "connect_timeout": "5s",
                "timeout": "120s",
                "allow_http": os.environ.get("AWS_ALLOW_HTTP", "").lower() in ("1", "true"),
            },
            retry_config={"max_retries": NUM_RETRIES, "retry_timeout": RETRY},
        )

    def __str__(self) -> str:
        return self.url

    def write(self, name: str, chunks: Iterable[Chunk]) -> None:
        write_blob(self.create(name), chunks)

    def create(self, name: str) -> ObjectWriter:
        """A blob to be written piece by piece."""
        return ObjectWriter(self, checked(name))

    def open(self, name: str) -> BinaryIO:
        with _os_errors():
            num_bytes = int(self._api.head(self._objects, checked(name))["size"])
        return cast(BinaryIO, io.BufferedReader(ObjectReader(self, name, num_bytes), READ_BYTES))

    def names(self, prefix: str = "") -> list[str]:
        folder = prefix.rpartition("/")[0]  # a listing takes whole folders, not the beginning of a name
        with _os_errors():
            pages = self._api.list(self._objects, prefix=folder or None)
            found = [str(entry["path"]) for page in pages for entry in page]
        return sorted(name for name in found if name.startswith(prefix))

    def delete(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError), _os_errors():
            self._api.delete(self._objects, checked(name))

    def folders(self) -> list[str]:
        """Names of what lies directly below, and has objects in it."""
        with _os_errors():
            return sorted(map(str, self._api.list_with_delimiter(self._objects)["common_prefixes"]))

    def write_once(self, name: str, data: bytes) -> bytes:
        """Put a blob unless there is one of this name. Returns the content that the store then has."""
        with _os_errors():
            with contextlib.suppress(self._api.exceptions.AlreadyExistsError):
                self._api.put(self._objects, name, data, mode="create")
            return bytes(self._api.get(self._objects, name).bytes())

    def read(self, name: str, offset: int, num_bytes: int) -> memoryview:
        """Of a blob."""
        with _os_errors():
            return memoryview(self._api.get_range(self._objects, name, start=offset, length=num_bytes))

    def upload(self, name: str) -> Any:
        """A file of obstore, which appears when it is closed."""
        with _os_errors():
            return self._api.open_writer(self._objects, name, buffer_size=PUT_BYTES, max_concurrency=PUTS_AT_ONCE)


class ObjectWriter:
    """An object that is being written. It appears with `commit`; `close` without it discards it. Parts of an upload
    that was never completed stay in the bucket, invisible, until a lifecycle rule deletes them."""

    def __init__(self, store: S3BlobStore, name: str) -> None:
        self._file: Any = store.upload(name)

    def write(self, chunk: Chunk) -> None:
        with _os_errors():
            self._file.write(memoryview(chunk).cast("B"))

    def commit(self) -> None:
        with _os_errors():
            self._file.close()

    def close(self) -> None:
        self._file = None


class ObjectReader(BlobFile):
    """An object that is read by ranges; `readall` takes one request."""

    def __init__(self, store: S3BlobStore, name: str, num_bytes: int) -> None:
        super().__init__(num_bytes)
        self.store, self.object = store, name

    def readinto(self, buffer: Any) -> int:
        data = self._next(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def readall(self) -> bytes:
        return bytes(self._next(self.num_bytes))

    def _next(self, most: int) -> memoryview:
        count = max(0, min(most, self.num_bytes - self._at))
        data = self.store.read(self.object, self._at, count) if count else memoryview(b"")
        self._at += len(data)
        return data


@contextlib.contextmanager
def _os_errors() -> Iterator[None]:
    """Errors of obstore as OSErrors, in one line. A missing object is a FileNotFoundError already."""
    from obstore import exceptions  # as above

    try:
        yield
    except (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError) as error:
        raise PermissionError(errno.EACCES, f"access denied ({_line(error)})") from error
    except exceptions.BaseError as error:
        raise OSError(errno.EIO, _line(error)) from error


def _line(error: Exception) -> str:
    """What the service said; without obstore's record of its retries."""
    text = str(error).partition("\n\nDebug source")[0]
    said = re.search(r"<Message>(.*?)</Message>", text)
    return said[1] if said else " ".join(text.split())
