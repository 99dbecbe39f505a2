"""Which checkpoints may be deleted: those older than the n-th newest that is known to be complete. A worker cannot
see the stores of other datacenters, so complete saves are confirmed to it (`confirm`).

If a single store holds complete checkpoints, no confirmation is needed. What a Replicator has yet to copy stays.
"""

from __future__ import annotations

import threading

from atlas.runtime.checkpoint.copied_parts import not_copied
from atlas.runtime.checkpoint.manifest import SUFFIX, SaveId, complete_ids, ids
from atlas.runtime.checkpoint.store import BlobStore


class Retention:
    """Thread-safe; for the stores of one kind (the datacenters' own, or the replicas)."""

    def __init__(self, keep: int = 3, *, prunes: bool = True) -> None:
        """`prunes`: whether this process deletes; one of those that write to a store suffices."""
        assert keep >= 1, "keep at least one checkpoint"
        self.keep, self.prunes = keep, prunes
        self._confirmed: set[SaveId] = set()
        self._lock = threading.Lock()

    def confirm(self, *complete: SaveId) -> None:
        """These are complete over all stores of this kind (`complete_ids`)."""
        with self._lock:
            self._confirmed |= set(complete)

    def is_past(self, id: SaveId) -> bool:
        """Whether it is older than the oldest confirmed save that is kept."""
        with self._lock:
            known = sorted(self._confirmed)
        return len(known) >= self.keep and id < known[-self.keep]

    def prune(self, store: BlobStore) -> list[SaveId]:
        """Delete old saves from `store`; returns them."""
        if not self.prunes:
            return []
        present = ids(store)
        if len(present) < self.keep:  # without reading any of them
            return []
        with self._lock:
            known = sorted((self._confirmed & present) | set(complete_ids([store])))
        if len(known) < self.keep:
            return []
        gone = sorted({id for id in present if id < known[-self.keep]} - not_copied(store))
        for id in gone:
            # Parts first: without them the checkpoint does not exist, and its files are unused.
            for name in sorted(store.names(id.folder), key=lambda name: not name.endswith(SUFFIX)):
                store.delete(name)
        return gone
