"""What makes a checkpoint exist. Each worker writes its layers and then, last, a part: a small JSON file that names
them with sizes and hashes. A checkpoint is there when the parts of one save, over all stores, hold every layer.

So nobody coordinates a save, and a crash leaves either a part or nothing. Knows JSON and stores; not tensors.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from atlas.errors import AtlasError
from atlas.runtime.checkpoint.store import BlobStore

FORMAT, VERSION = "atlas-checkpoint-part", 1
SUFFIX = ".part.json"
_FOLDER = re.compile(r"step-(\d+)-a(\d+)/")


class SaveId(NamedTuple):
    """The order of saves: a later attempt goes before a later step, as it may have gone back on purpose."""

    attempt: int
    """How often the run was started again; the launcher counts (`next_attempt`)."""
    step: int
    """Optimizer steps done."""

    @property
    def folder(self) -> str:
        return f"step-{self.step:08}-a{self.attempt}/"

    def __str__(self) -> str:
        return f"step {self.step} (attempt {self.attempt})"


@dataclass(frozen=True)
class Meta:
    """What a run needs beside tensors to go on as if nothing had happened. Generators are keyed, so none is saved."""

    samples_seen: int
    """Where the data goes on."""
    seed: int
    schedule_step: int
    """Where the learning-rate schedule goes on."""
    dataset: str = ""
    """`Dataset.digest`."""
    config: dict[str, Any] = field(default_factory=dict)
    """What must not change for the state to mean the same: model, optimizer, batch. JSON-able."""

    @property
    def config_digest(self) -> str:
        return hashlib.sha256(_canonical(self.config)).hexdigest()

    def require_same_run(self, config: dict[str, Any], dataset: str) -> None:
        """Raise where a run with this configuration and these data cannot go on from here."""
        config = json.loads(_canonical(config))
        for key in sorted(self.config.keys() | config.keys()):
            if self.config.get(key) != config.get(key):
                raise AtlasError(
                    f"checkpoint: it was saved with {key} = {self.config.get(key)!r}, this run has "
                    f"{config.get(key)!r}. Resume with the saved value, or start a new run in another folder"
                )
        if self.dataset != dataset:
            raise AtlasError(
                f"checkpoint: it was saved while training on other data (digest {self.dataset[:12]}, now "
                f"{dataset[:12]}). Resume with the same shards in the same order, or start a new run"
            )


@dataclass(frozen=True)
class Blob:
    """One file of a part."""

    name: str
    num_bytes: int
    sha256: str


@dataclass(frozen=True)
class Part:
    """What one worker saved."""

    id: SaveId
    writer: str
    model_layers: tuple[str, ...]
    """All layers of the model: the checkpoint is complete when the parts hold them."""
    weights: dict[str, Blob]
    """By layer."""
    optimizer: dict[str, Blob]
    """By layer; a layer without optimizer state has none."""
    meta: Meta

    @property
    def name(self) -> str:
        return part_name(self.id, self.writer)

    @property
    def blobs(self) -> list[Blob]:
        return [*self.weights.values(), *self.optimizer.values()]

    def to_json(self) -> bytes:
        body = {"format": FORMAT, "version": VERSION, **asdict(self), "id": self.id._asdict()}
        return _canonical({**body, "check": hashlib.sha256(_canonical(body)).hexdigest()})

    @classmethod
    def from_json(cls, data: bytes, where: str) -> Part:
        try:
            body = json.loads(data)
            check = body.pop("check")
            if (body.pop("format"), body.pop("version")) != (FORMAT, VERSION):
                raise ValueError(f"not version {VERSION} of {FORMAT}")
            if hashlib.sha256(_canonical({"format": FORMAT, "version": VERSION, **body})).hexdigest() != check:
                raise ValueError("its checksum does not fit")
            return cls(
                id=SaveId(**body["id"]),
                writer=body["writer"],
                model_layers=tuple(body["model_layers"]),
                weights={layer: Blob(**blob) for layer, blob in body["weights"].items()},
                optimizer={layer: Blob(**blob) for layer, blob in body["optimizer"].items()},
                meta=Meta(**body["meta"]),
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise AtlasError(
                f"{where}: not a whole checkpoint manifest ({error}). Restore the file from a replica, or delete its "
                "folder to resume from an earlier checkpoint"
            ) from error


def part_name(id: SaveId, writer: str) -> str:
    return f"{id.folder}{writer}{SUFFIX}"


def _canonical(data: Any) -> bytes:
    return json.dumps(data, sort_keys=True, separators=(",", ":")).encode()


# ---- what is there ---------------------------------------------------------------------------------------------------
def ids(store: BlobStore) -> set[SaveId]:
    """Every save that left anything whole in the store, finished or not."""
    found = (_FOLDER.match(name) for name in store.names("step-"))
    return {SaveId(int(match[2]), int(match[1])) for match in found if match}


def read_part(store: BlobStore, name: str) -> Part:
    with store.open(name) as file:
        return Part.from_json(file.read(), f"{store}/{name}")


def parts_of(stores: Iterable[BlobStore], id: SaveId) -> list[tuple[BlobStore, Part]]:
    """The parts of one save; the same part in two stores counts twice (a replica)."""
    found = []
    for store in stores:
        for name in store.names(id.folder):
            if name.endswith(SUFFIX):
                with contextlib.suppress(FileNotFoundError):  # deleted by a peer since we looked
                    found.append((store, read_part(store, name)))
    return found


def missing_layers(parts: Sequence[Part]) -> list[str]:
    """What no part holds; all parts are of one save."""
    held = {layer for part in parts for layer in part.weights}
    return [layer for layer in parts[0].model_layers if layer not in held]


def complete_ids(stores: Sequence[BlobStore]) -> list[SaveId]:
    """Every complete checkpoint over these stores, oldest first. Whoever sees all stores confirms them to the rest."""
    found = sorted(set().union(*(ids(store) for store in stores)))
    parts = {id: [part for _, part in parts_of(stores, id)] for id in found}
    return [id for id in found if parts[id] and not missing_layers(parts[id])]


def next_attempt(stores: Sequence[BlobStore]) -> int:
    """The number of a run that starts now: one above all that have left anything."""
    return max((id.attempt for store in stores for id in ids(store)), default=-1) + 1
