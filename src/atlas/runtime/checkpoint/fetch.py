"""Fetches blobs of other stores into a folder here. A fetch that was cut off continues where it stopped, from the same
store or from a replica: what has arrived is kept under the blob's hash, and is hashed again before it is used.

Several blobs are fetched at once, so that a long path is never idle between two of them. Knows stores and blobs; not
which layers are needed.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from atlas.errors import AtlasError, WorkerError
from atlas.runtime.checkpoint.manifest import Blob, BlobCopies, SaveId
from atlas.runtime.checkpoint.store import BlobStore, LocalStore
from atlas.runtime.checkpoint.tensors import Tally, chunks_of

PARTIAL = "partial"
NUM_AT_ONCE = 4
"""Blobs fetched at the same time."""


class FetchFolder:
    """Of one launcher. It survives a restart of the launcher; `delete` it when its blobs are read."""

    def __init__(self, root: Path) -> None:
        self.store = LocalStore(root)
        self._partial = root / PARTIAL

    def fetch(self, id: SaveId, wanted: Sequence[BlobCopies]) -> None:
        """Have one copy of each. Raises WorkerError if a store is out of reach, AtlasError if all are damaged."""
        self._keep_only(id, {blob.sha256 for copies in wanted for _, blob in copies})
        self._partial.mkdir(parents=True, exist_ok=True)
        with ThreadPoolExecutor(NUM_AT_ONCE, "fetch") as pool:
            list(pool.map(self._fetch, wanted))

    def delete(self) -> None:
        shutil.rmtree(self.store.root, ignore_errors=True)

    def _keep_only(self, id: SaveId, hashes: Collection[str]) -> None:
        """Delete what an earlier attempt has fetched of another save."""
        if not self.store.root.exists():
            return
        for found in self.store.root.iterdir():
            if found.name.startswith("step-") and f"{found.name}/" != id.folder:
                shutil.rmtree(found, ignore_errors=True)
        for file in self._partial.glob("*"):
            if file.name not in hashes:
                file.unlink(missing_ok=True)

    def _fetch(self, copies: BlobCopies) -> None:
        why, is_damaged = "", True
        for store, blob in copies:
            target = self.store.root / blob.name
            if target.exists():
                return  # it was hashed before it got its name
            try:
                if self._continue(store, blob, target):
                    return
                why = f"{store}/{blob.name}: damaged"
            except OSError as error:
                why, is_damaged = f"{store}/{blob.name}: {error.strerror or error}", False
        if is_damaged:
            raise AtlasError(
                f"{why}. Copy the file back from a replica, or delete this checkpoint to resume from an earlier one"
            )
        raise WorkerError(f"{why}. The next attempt fetches the rest")

    def _continue(self, store: BlobStore, blob: Blob, target: Path) -> bool:
        """Fetch what is missing; whether all of it, what was there included, has the blob's hash."""
        partial, tally = self._partial / blob.sha256, Tally()
        with partial.open("a+b") as out:
            out.seek(0)
            for chunk in chunks_of(out):
                tally.add(chunk)
            with store.open(blob.name) as file:
                file.seek(out.tell())
                out.writelines(tally.through(chunks_of(file)))
            out.flush()
            os.fsync(out.fileno())
        if tally.sha256 != blob.sha256:
            partial.unlink()
            return False
        target.parent.mkdir(parents=True, exist_ok=True)
        partial.replace(target)
        return True
