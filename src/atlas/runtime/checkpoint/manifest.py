"""The manifest of a checkpoint. Each worker writes its layers and then, last, a part: a small JSON file that names
them with sizes and hashes. A checkpoint exists when the parts of one save, over all stores, hold every layer.

So no process coordinates a save, and a crash leaves either a part or nothing. Knows JSON and stores; not tensors.
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
IMPORTED = "imported"
"""Key of a configuration that has only the model: a checkpoint that no run has written."""
_FOLDER = re.compile(r"step-(\d+)-a(\d+)/")


class SaveId(NamedTuple):
    """Orders saves: by attempt first, because a later attempt may have gone back to an earlier step on purpose."""

    attempt: int
    """The number of the run's start; the launcher counts (`next_attempt`)."""
    step: int
    """Optimizer steps done."""

    @property
    def folder(self) -> str:
        return f"step-{self.step:08}-a{self.attempt}/"

    def __str__(self) -> str:
        return f"step {self.step} (attempt {self.attempt})"


@dataclass(frozen=True)
class Meta:
    """What a run needs beside tensors to resume exactly. Random generators are keyed, so none is saved."""

    samples_seen: int
    """The position in the data."""
    seed: int
    schedule_step: int
    """The position in the learning-rate schedule."""
    dataset: str = ""
    """`Dataset.digest`."""
    config: dict[str, Any] = field(default_factory=dict)
    """What must not change between attempts: model, optimizer, batch. As JSON."""

    def require_same_run(self, config: dict[str, Any], dataset: str) -> None:
        """Raise if a run with this configuration and these data cannot resume from here."""
        now, then = _fixed(json.loads(_canonical(config))), _fixed(self.config)
        if IMPORTED in then:
            now, then = ({"model.config": found["model"]["config"]} for found in (now, then))
        for key in sorted(then.keys() | now.keys()):
            if then.get(key) != now.get(key):
                raise AtlasError(
                    f"the checkpoint was saved with {key} = {then.get(key)!r}, this run has "
                    f"{now.get(key)!r}. Resume with the saved value, or start a new run in another folder"
                )
        if self.dataset != dataset and IMPORTED not in self.config:
            raise AtlasError(
                f"the checkpoint was saved while training on other data (digest {self.dataset[:12]}, now "
                f"{dataset[:12]}). Resume with the same shards in the same order, or start a new run"
            )


@dataclass(frozen=True)
class Blob:
    """One file of a part."""

    name: str
    num_bytes: int
    sha256: str


BlobCopies = Sequence[tuple[BlobStore, Blob]]
"""The stores that have a blob: the original and replicas."""


@dataclass(frozen=True)
class CheckpointPart:
    """The part of a checkpoint that one worker saved."""

    id: SaveId
    writer: str
    model_layers: tuple[str, ...]
    """All layers of the model: the checkpoint is complete when the parts hold them."""
    weights: dict[str, Blob]
    """By layer."""
    optimizer: dict[str, Blob]
    """By layer; not for layers without optimizer state."""
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
    def from_json(cls, data: bytes, where: str) -> CheckpointPart:
        try:
            body = json.loads(data)
            check = body.pop("check")
            if (body.pop("format"), body.pop("version")) != (FORMAT, VERSION):
                raise ValueError(f"not version {VERSION} of {FORMAT}")
            if hashlib.sha256(_canonical({"format": FORMAT, "version": VERSION, **body})).hexdigest() != check:
                raise ValueError("its checksum does not match")
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
                f"{where}: not a complete checkpoint manifest ({error}). Restore the file from a replica, or delete "
                "its folder to resume from an earlier checkpoint"
            ) from error


def _fixed(config: dict[str, Any]) -> dict[str, Any]:
    """What a resumed run may not change: all but the learning rate and clipping, which a user lowers after a
    divergence."""
    found = {key: value for key, value in config.items() if key != "max_norm"}
    if isinstance(found.get("optimizer"), dict):
        found["optimizer"] = {key: value for key, value in found["optimizer"].items() if key != "learning_rate"}
    return found


def part_name(id: SaveId, writer: str) -> str:
    return f"{id.folder}{writer}{SUFFIX}"


def _canonical(data: Any) -> bytes:
    return json.dumps(data, sort_keys=True, separators=(",", ":")).encode()


# ---- existing saves --------------------------------------------------------------------------------------------------
def ids(store: BlobStore) -> set[SaveId]:
    """Every save with a blob in the store, complete or not."""
    found = (_FOLDER.match(name) for name in store.names("step-"))
    return {SaveId(int(match[2]), int(match[1])) for match in found if match}


def part_names(store: BlobStore) -> list[tuple[SaveId, str]]:
    """The parts in the store, those of the oldest save first."""
    names = [name for name in store.names("step-") if name.endswith(SUFFIX)]
    return sorted((SaveId(int(match[2]), int(match[1])), match.string) for match in map(_FOLDER.match, names) if match)


def read_part(store: BlobStore, name: str) -> CheckpointPart:
    with store.open(name) as file:
        return CheckpointPart.from_json(file.read(), f"{store}/{name}")


def parts_of(stores: Iterable[BlobStore], id: SaveId) -> list[tuple[BlobStore, CheckpointPart]]:
    """The parts of one save; the same part in two stores counts twice (a replica)."""
    found = []
    for store in stores:
        for name in store.names(id.folder):
            if name.endswith(SUFFIX):
                with contextlib.suppress(FileNotFoundError):  # deleted by a peer meanwhile
                    found.append((store, read_part(store, name)))
    return found


def missing_layers(parts: Sequence[CheckpointPart]) -> list[str]:
    """Layers that no part has; all parts are of one save."""
    held = {layer for part in parts for layer in part.weights}
    return [layer for layer in parts[0].model_layers if layer not in held]


def complete_ids(stores: Sequence[BlobStore]) -> list[SaveId]:
    """Every complete checkpoint over these stores, oldest first."""
    found = sorted(set().union(*(ids(store) for store in stores)))
    parts = {id: [part for _, part in parts_of(stores, id)] for id in found}
    return [id for id in found if parts[id] and not missing_layers(parts[id])]


def next_attempt(stores: Sequence[BlobStore]) -> int:
    """The number of a new attempt: one more than of any save in the stores."""
    return max((id.attempt for store in stores for id in ids(store)), default=-1) + 1
