"""The record that a Replicator keeps beside the checkpoints it copies: which parts are safe elsewhere, and where. It
lies in the store, so that every process that deletes there sees what must still stay. Knows stores and part names.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass

from atlas.errors import AtlasError
from atlas.runtime.checkpoint.manifest import SUFFIX, SaveId, ids, part_name
from atlas.runtime.checkpoint.store import BlobStore

RECORD_SUFFIX = ".replicated.json"


@dataclass(frozen=True)
class CopiedParts:
    """One Replicator's."""

    target: str
    writer: str | None
    """Whose parts it copies; None: everybody's."""
    parts: tuple[str, ...] = ()
    """Names of the parts that are whole in the target."""

    @property
    def name(self) -> str:
        return f"{self.writer or 'all'}.{hashlib.sha256(self.target.encode()).hexdigest()[:8]}{RECORD_SUFFIX}"

    def covers(self, id: SaveId, name: str) -> bool:
        """Whether the part is one that it copies."""
        return self.writer is None or name == part_name(id, self.writer)

    def save(self, store: BlobStore) -> None:
        store.write(self.name, [json.dumps(asdict(self), indent=1).encode()])


def read_records(store: BlobStore) -> list[CopiedParts]:
    """What the store's Replicators have noted."""
    records = []
    for name in store.names():
        if not name.endswith(RECORD_SUFFIX):
            continue
        try:
            with store.open(name) as file:
                data = json.loads(file.read())
            records.append(CopiedParts(data["target"], data["writer"], tuple(data["parts"])))
        except FileNotFoundError:
            continue
        except (ValueError, KeyError, TypeError) as error:
            raise AtlasError(f"{store}/{name}: not a record of replication ({error}). Delete it") from error
    return records


def forget_targets(store: BlobStore, writer: str, but: str | None = None) -> None:
    """Of a writer whose parts are copied nowhere any more, or only to one target: nothing waits for the others."""
    for record in read_records(store):
        if record.writer == writer and record.target != but:
            store.delete(record.name)


def not_copied(store: BlobStore) -> set[SaveId]:
    """Saves of which some part is still to be copied by some Replicator."""
    records = read_records(store)
    if not records:
        return set()
    waiting = set()
    for id in ids(store):
        names = [name for name in store.names(id.folder) if name.endswith(SUFFIX)]
        if any(r.covers(id, name) and name not in r.parts for r in records for name in names):
            waiting.add(id)
    return waiting
