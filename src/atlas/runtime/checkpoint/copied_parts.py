"""The record of copied parts that a Replicator keeps in the store that it copies: which parts are complete in which
target. Every process that deletes in the store reads it, and keeps what is still to be copied. Knows stores and part
names.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass

from atlas.errors import AtlasError
from atlas.runtime.checkpoint.manifest import SaveId, part_name, part_names
from atlas.runtime.checkpoint.store import BlobStore

RECORD_SUFFIX = ".replicated.json"


@dataclass(frozen=True)
class CopiedParts:
    """The record of one Replicator."""

    target: str
    writer: str | None
    """Whose parts it copies; None: of all writers."""
    parts: tuple[str, ...] = ()
    """Names of the parts that are complete in the target."""

    @property
    def name(self) -> str:
        return f"{self.writer or 'all'}.{hashlib.sha256(self.target.encode()).hexdigest()[:8]}{RECORD_SUFFIX}"

    def covers(self, id: SaveId, name: str) -> bool:
        """Whether this Replicator copies the part."""
        return self.writer is None or name == part_name(id, self.writer)

    def save(self, store: BlobStore) -> None:
        store.write(self.name, [json.dumps(asdict(self), indent=1).encode()])


def read_records(store: BlobStore) -> list[CopiedParts]:
    """The records of all Replicators of the store."""
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
    """Forget all targets of a writer but one, or all: nothing is kept for copies to them any more."""
    for record in read_records(store):
        if record.writer == writer and record.target != but:
            store.delete(record.name)


def not_copied(store: BlobStore) -> set[SaveId]:
    """Saves with a part that some Replicator has still to copy."""
    records = read_records(store)
    return {id for id, name in part_names(store) if any(r.covers(id, name) and name not in r.parts for r in records)}
