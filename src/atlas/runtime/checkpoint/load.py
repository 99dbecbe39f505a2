"""Finds and reads checkpoints: any worker takes the layers it needs from whatever parts, stores and replicas have them,
whatever plan wrote them.

Every byte is hashed before it is used. A damaged file is an error that names it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

from atlas.errors import AtlasError
from atlas.runtime.checkpoint.checkpointer import Report, log
from atlas.runtime.checkpoint.manifest import (
    Blob,
    BlobCopies,
    CheckpointPart,
    Meta,
    SaveId,
    ids,
    missing_layers,
    parts_of,
)
from atlas.runtime.checkpoint.state import LayerState
from atlas.runtime.checkpoint.store import BlobStore
from atlas.runtime.checkpoint.tensors import Tally, chunks_of, parse


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint, found by `choose`. Only requested layers are read."""

    id: SaveId
    meta: Meta
    layers: tuple[str, ...]
    parts: tuple[tuple[BlobStore, CheckpointPart], ...]

    @property
    def step(self) -> int:
        return self.id.step

    def copies(self, layer: str) -> tuple[BlobCopies, BlobCopies]:
        """Copies of a layer's weights, and of its optimizer state. A list is empty if no part has them."""
        weights = [(store, part.weights[layer]) for store, part in self.parts if layer in part.weights]
        return weights, [(store, part.optimizer[layer]) for store, part in self.parts if layer in part.optimizer]


def choose(stores: Sequence[BlobStore], *, step: int | None = None, report: Report = log) -> Checkpoint | None:
    """The newest complete checkpoint in all `stores`, or the newest of `step`. None if no checkpoint is complete.

    A save with missing parts (after a crash or the loss of a datacenter) is skipped. A damaged manifest is an error.
    """
    found = sorted(set().union(*(ids(store) for store in stores)), reverse=True)
    for id in (id for id in found if step is None or id.step == step):
        checkpoint = _assemble(stores, id, report)
        if checkpoint is not None:
            return checkpoint
    if step is None:
        return None
    there = ", ".join(str(id.step) for id in found) or "none"
    where = ", ".join(map(str, stores)) or "no store"
    raise AtlasError(f"{where}: no complete checkpoint of step {step}. Saves found: {there}")


def _assemble(stores: Sequence[BlobStore], id: SaveId, report: Report) -> Checkpoint | None:
    parts = parts_of(stores, id)
    if not parts:
        return None
    missing = missing_layers([part for _, part in parts])
    if missing:
        report(f"checkpoint of {id} is incomplete and skipped: no layer {', '.join(missing[:5])} in any store")
        return None
    first_store, first = parts[0]
    for store, part in parts:
        if (part.meta, part.model_layers) != (first.meta, first.model_layers):
            raise AtlasError(
                f"{store}/{part.name}: it belongs to another run than {first_store}/{first.name}. "
                "Keep the checkpoints of each run in a separate folder"
            )
    return Checkpoint(id, first.meta, first.model_layers, tuple(parts))


def load_layers(
    checkpoint: Checkpoint, names: Iterable[str], *, optimizer: bool = True, report: Report = log
) -> dict[str, LayerState]:
    """The states of some layers. A replica is used in place of a damaged copy."""
    return {name: _load_layer(checkpoint, name, optimizer, report) for name in names}


def _load_layer(checkpoint: Checkpoint, layer: str, optimizer: bool, report: Report) -> LayerState:
    of_weights, of_optimizer = checkpoint.copies(layer)
    if not of_weights:
        raise AtlasError(
            f"checkpoint of {checkpoint.id}: it has no layer {layer!r}; its layers are "
            f"{', '.join(checkpoint.layers[:8])}... Resume with the model that was saved"
        )
    weights = _load_blob(of_weights, report)
    entries: dict[str, dict[str, Tensor]] = {}
    if optimizer and of_optimizer:
        for key, tensor in _load_blob(of_optimizer, report).items():
            entry, _, name = key.partition("/")
            entries.setdefault(name, {})[entry] = tensor
    return LayerState(weights, entries)


def _load_blob(copies: BlobCopies, report: Report) -> dict[str, Tensor]:
    for number, (store, blob) in enumerate(copies):
        try:
            return parse(_read(store, blob), f"{store}/{blob.name}")
        except AtlasError as error:
            if number + 1 == len(copies):
                raise
            report(f"{error} Its replica in {copies[number + 1][0]} is used instead")
    raise AssertionError("a layer without a holder")


def _read(store: BlobStore, blob: Blob, *, at_once: bool = True) -> bytes:
    """The content of a blob; raises an error that names the file. Not `at_once`: only verified, piece by piece."""
    where, tally, data = f"{store}/{blob.name}", Tally(), b""
    try:
        with store.open(blob.name) as file:
            if at_once:
                data = file.read()
            for chunk in [data] if at_once else chunks_of(file):
                tally.add(chunk)
    except OSError as error:
        raise AtlasError(f"{where}: cannot be read: {error.strerror or error}. {_REMEDY}") from error
    if (tally.num_bytes, tally.sha256) != (blob.num_bytes, blob.sha256):
        raise AtlasError(
            f"{where}: damaged: {tally.num_bytes:,} bytes with another checksum than the {blob.num_bytes:,} that were "
            f"written. {_REMEDY}"
        )
    return data


_REMEDY = "Copy the file back from a replica, or delete this checkpoint to resume from an earlier one."


def verify(checkpoint: Checkpoint) -> list[str]:
    """Read every layer's files; one sentence for each layer without an undamaged copy."""
    problems = []
    for layer in checkpoint.layers:
        for copies in checkpoint.copies(layer):
            errors = [error for store, blob in copies if (error := _error_of(store, blob))]
            if copies and len(errors) == len(copies):
                problems.append(errors[0])
    return problems


def _error_of(store: BlobStore, blob: Blob) -> str | None:
    try:
        _read(store, blob, at_once=False)
    except AtlasError as error:
        return str(error)
    return None
