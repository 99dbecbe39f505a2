"""Which checkpoints may go. Only what is older than the n-th newest that is known to be complete: a worker alone
cannot know that, since its peers in other datacenters may have failed to write theirs, so it is told (`confirm`).

Where a single store holds whole checkpoints, it sees for itself. What a Replicator has yet to copy stays. Nobody
told, nothing deleted.
"""

from __future__ import annotations

import threading

from atlas.runtime.checkpoint.copied_parts import not_copied
from atlas.runtime.checkpoint.manifest import SUFFIX, SaveId, complete_ids, ids
from atlas.runtime.checkpoint.store import BlobStore


class Retention:
    """Thread-safe; for the stores of one kind (the datacenters' own, or the replicas)."""

    def __init__(self, keep: int = 3) -> None:
        assert keep >= 1, "a run without any checkpoint cannot resume"
        self.keep = keep
        self._confirmed: set[SaveId] = set()
        self._lock = threading.Lock()

    def confirm(self, *complete: SaveId) -> None:
        """These are complete over all the stores of this kind (`complete_ids`)."""
        with self._lock:
            self._confirmed |= set(complete)

    def is_past(self, id: SaveId) -> bool:
        """Whether it is older than what is kept, as far as has been confirmed."""
        with self._lock:
            known = sorted(self._confirmed)
        return len(known) >= self.keep and id < known[-self.keep]

    def prune(self, store: BlobStore) -> list[SaveId]:
        """Delete what may go from `store`; what went."""
        present = ids(store)
        with self._lock:
            known = sorted((self._confirmed & present) | set(complete_ids([store])))
        if len(known) < self.keep:
            return []
        gone = sorted({id for id in present if id < known[-self.keep]} - not_copied(store))
        for id in gone:
            # Parts first: from then on the checkpoint is not there, and its files are only space.
            for name in sorted(store.names(id.folder), key=lambda name: not name.endswith(SUFFIX)):
                store.delete(name)
        return gone
