"""A site's checkpoints in one life of the group: its own folder, the shelves on which it keeps other datacenters', and
the way to theirs. Chooses what all resume from, and fetches what this site's workers need of it and do not have.

    FOLDER/own        what this datacenter's workers save
    FOLDER/of-west    copies of what west's save; also of a datacenter that is no longer part of the run

Knows stores and keepers; not why a life began.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from atlas.errors import AtlasError
from atlas.launch.rendezvous import AgentName
from atlas.runtime.assignment import CopyChoice
from atlas.runtime.checkpoint import (
    OWN,
    BlobStore,
    CheckpointClient,
    CheckpointServer,
    LocalStore,
    RemoteStore,
    choose,
    next_attempt,
    shelf_of,
)
from atlas.runtime.checkpoint.load import Checkpoint
from atlas.runtime.checkpoint.manifest import Blob
from atlas.runtime.checkpoint.tensors import Tally, chunks_of
from atlas.wan.security.credentials import Security
from atlas.wan.transport.base import Address
from atlas.wan.transport.endpoint import Endpoint


class CheckpointExchange:
    """Open from the beginning of a life to its end."""

    def __init__(
        self, folder: Path, name: AgentName, datacenters: Sequence[str], host: str, epoch: int, security: Security
    ) -> None:
        self.folder, self.name = folder, name
        self.own = LocalStore(folder / OWN)
        kept = {shelf_of(dc) for dc in datacenters if dc != name.datacenter}
        kept |= {found.name for found in folder.glob(shelf_of("*")) if found.is_dir()}
        self.local: dict[str, LocalStore] = {shelf: LocalStore(folder / shelf) for shelf in (OWN, *sorted(kept))}
        self._theirs: dict[str, Sequence[str]] = {}
        self._endpoint = Endpoint(name.node, (host, 0), epoch=epoch, security=security)
        self._keeper = CheckpointServer(self._endpoint, self.local)
        self._lines: dict[str, CheckpointClient] = {}
        self._scratch: tempfile.TemporaryDirectory[str] | None = None

    @property
    def address(self) -> Address:
        return self._endpoint.address

    def meet(self, keepers: Mapping[str, Address], shelves: Mapping[str, Sequence[str]]) -> None:
        """The other sites' keepers and what they keep, by node."""
        self._theirs = dict(shelves)
        others = {node: (str(host), int(port)) for node, (host, port) in keepers.items() if node != self.name.node}
        self.admit(others)
        for node, address in others.items():
            self._lines[node] = CheckpointClient(self._endpoint, node, address)

    def admit(self, nodes: Mapping[str, Any]) -> None:
        """Nodes that may call."""
        self._keeper.admit({node: (str(host), int(port)) for node, (host, port) in nodes.items()})

    def choose(self) -> tuple[tuple[int, int] | None, int]:
        """(attempt, step) of the newest checkpoint that is complete over all that is left; the next attempt."""
        stores = self._stores()
        found = choose(stores)
        return ((found.id.attempt, found.id.step) if found is not None else None), next_attempt(stores)

    def copy_choice(self, peer: str, keepers: Mapping[str, Address]) -> CopyChoice:
        """For a worker of ours: our shelf at that keeper."""
        host, port = keepers[peer]
        return CopyChoice(peer, str(host), int(port), shelf_of(self.name.datacenter))

    def fetch(self, step: int, layers: Iterable[str]) -> list[str]:
        """Folders in which our workers find these layers of the chosen step; those of others come over the network."""
        found = choose(self._stores(), step=step)
        assert found is not None, "`choose` finds a step or raises"
        self._scratch = tempfile.TemporaryDirectory(prefix="atlas-fetched-")
        target = LocalStore(self._scratch.name)
        for layer in dict.fromkeys(layers):
            holders = found.holders(layer)
            if not any(isinstance(store, LocalStore) for store, _ in holders):
                for kind in ("weights", "optimizer"):
                    copies = [(s, getattr(part, kind)[layer]) for s, part in holders if layer in getattr(part, kind)]
                    _fetch_blob(copies, target)
        _write_parts(found, target)
        return [*(str(store) for store in self.local.values()), str(target)]

    def forget_fetched(self) -> None:
        if self._scratch is not None:
            self._scratch.cleanup()
            self._scratch = None

    def close(self) -> None:
        self.forget_fetched()
        self._keeper.close()
        self._endpoint.close(0.0)

    def _stores(self) -> list[BlobStore]:
        theirs = [RemoteStore(line, shelf) for node, line in self._lines.items() for shelf in self._theirs[node]]
        return [*self.local.values(), *theirs]


def _fetch_blob(copies: Sequence[tuple[BlobStore, Blob]], target: LocalStore) -> None:
    """From the first store that has it sound."""
    why = ""
    for store, blob in copies:
        tally = Tally()
        try:
            with store.open(blob.name) as file:
                target.write(blob.name, tally.through(chunks_of(file)))
        except OSError as error:
            why = f"{store}/{blob.name}: {error.strerror or error}"
            continue
        if tally.sha256 == blob.sha256:
            return
        target.delete(blob.name)
        why = f"{store}/{blob.name}: damaged"
    if copies:
        raise AtlasError(
            f"{why}. Copy the file back from a replica, or delete this checkpoint to resume from an earlier"
        )


def _write_parts(checkpoint: Checkpoint, target: LocalStore) -> None:
    """Manifests of what is not here already, so that the checkpoint is seen to be complete; layers that nobody here
    needs have no files, and are not read."""
    here = {layer for store, part in checkpoint.parts if isinstance(store, LocalStore) for layer in part.weights}
    for _, part in checkpoint.parts:
        weights = {layer: blob for layer, blob in part.weights.items() if layer not in here}
        optimizer = {layer: blob for layer, blob in part.optimizer.items() if layer not in here}
        if weights:
            target.write(part.name, [replace(part, weights=weights, optimizer=optimizer).to_json()])
