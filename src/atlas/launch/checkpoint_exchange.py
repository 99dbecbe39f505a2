"""One launcher's checkpoints during an attempt: its own store, the copies that it keeps for other datacenters, and
access to the stores of the other launchers. Chooses what all resume from, and fetches what this launcher's workers
lack.

    PLACE/own        what this datacenter's workers save
    PLACE/of-west    copies of what west's workers save; also of a datacenter that is no longer in the run. In west
                     itself: of another host there, if there is no other datacenter
    PLACE/fetched    what workers of this launcher are about to read; deleted when they have. For an object store, a
                     folder in the host's folder of temporary files
    PLACE/folder.id  a random number, by which launchers find out that they have one place

Knows stores and checkpoint servers; not why an attempt began.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from atlas.errors import WorkerError
from atlas.launch.rendezvous import AgentName
from atlas.runtime.assignment import CopyChoice
from atlas.runtime.checkpoint.calls import OWN, copies_of
from atlas.runtime.checkpoint.client import CheckpointClient, RemoteStore
from atlas.runtime.checkpoint.fetch import FetchFolder
from atlas.runtime.checkpoint.load import Checkpoint, choose
from atlas.runtime.checkpoint.manifest import BlobCopies, next_attempt
from atlas.runtime.checkpoint.place import below, id_of, names_below, store_at
from atlas.runtime.checkpoint.server import CheckpointServer
from atlas.runtime.checkpoint.store import BlobStore, LocalStore, PlaceStore
from atlas.spec.recipe import OBJECT_STORE
from atlas.wan.security.credentials import Security
from atlas.wan.transport.base import Address, PeerRoute
from atlas.wan.transport.endpoint import Endpoint

FETCHED = "fetched"


class CheckpointExchange:
    """Open from the beginning of an attempt to its end."""

    def __init__(
        self, place: str, name: AgentName, datacenters: Sequence[str], where: Address, epoch: int, security: Security
    ) -> None:
        """`where`: the address to listen on."""
        self.place, self.name = place, name
        self.own = below(place, OWN)
        kept = {copies_of(dc) for dc in {*datacenters, name.datacenter}}
        kept |= {found for found in names_below(place) if found.startswith(copies_of(""))}
        self.local: dict[str, PlaceStore] = {store: store_at(below(place, store)) for store in (OWN, *sorted(kept))}
        self._remote_names: dict[str, Sequence[str]] = {}
        self._endpoint = Endpoint(name.node, where, epoch=epoch, security=security)
        self._server = CheckpointServer(self._endpoint, self.local)
        self._clients: dict[str, CheckpointClient] = {}
        self._fetched = FetchFolder(_fetch_folder(place) / name.node.replace("/", "."))

    @property
    def port(self) -> int:
        return self._endpoint.address[1]

    @property
    def folder_id(self) -> str:
        """The same for launchers that share a place; empty if it cannot be written."""
        return id_of(self.place)

    def connect(self, servers: Mapping[str, PeerRoute], stores: Mapping[str, Sequence[str]]) -> None:
        """The checkpoint servers of the other launchers and the names of their stores, by node."""
        self._remote_names = dict(stores)
        self.admit(servers)
        for node, route in servers.items():
            self._clients[node] = CheckpointClient(self._endpoint, node, route)

    def admit(self, nodes: Mapping[str, PeerRoute]) -> None:
        """Let these nodes use the checkpoint server."""
        self._server.admit(nodes)

    def choose(self) -> tuple[tuple[int, int] | None, int]:
        """(attempt, step) of the newest checkpoint that is complete over all connected stores; the next attempt."""
        stores = self._stores()
        try:
            found = choose(stores)
            number = next_attempt(stores)
        except OSError as error:  # of an object store that is out of reach for now
            raise WorkerError(f"the checkpoints cannot be read: {error.strerror or error}") from error
        return ((found.id.attempt, found.id.step) if found is not None else None), number

    def copy_choice(self, peer: str, servers: Mapping[str, PeerRoute]) -> CopyChoice:
        """For a worker of this launcher: where another launcher keeps this datacenter's copies."""
        return CopyChoice(peer, servers[peer], copies_of(self.name.datacenter))

    def fetch(self, step: int, layers: Iterable[str]) -> list[str]:
        """Folders that hold these layers of a step. Layers that no local store has are fetched over the network."""
        found = choose(self._stores(), step=step)
        assert found is not None, "`choose` finds a step or raises"
        wanted, here = list[BlobCopies](), list(self.local.values())
        for layer in dict.fromkeys(layers):
            weights, optimizer = found.copies(layer)
            if not any(store in here for store, _ in weights):
                wanted += [weights, optimizer] if optimizer else [weights]
        self._fetched.fetch(found.id, wanted)
        _write_parts(found, here, self._fetched.store)
        return [*(str(store) for store in self.local.values()), str(self._fetched.store)]

    def delete_fetched(self) -> None:
        self._fetched.delete()

    def close(self) -> None:
        self._server.close()
        self._endpoint.close(0.0)

    def _stores(self) -> list[BlobStore]:
        remote = [RemoteStore(client, s) for node, client in self._clients.items() for s in self._remote_names[node]]
        return [*self.local.values(), *remote]


def _fetch_folder(place: str) -> Path:
    if not place.startswith(OBJECT_STORE):
        return Path(place) / FETCHED
    return Path(tempfile.gettempdir()) / f"atlas-{FETCHED}-{hashlib.sha256(place.encode()).hexdigest()[:8]}"


def _write_parts(checkpoint: Checkpoint, local: Sequence[PlaceStore], target: LocalStore) -> None:
    """Manifests of the layers that no local store has, so that the checkpoint counts as complete here. Layers that no
    worker here needs have no files, and are never read."""
    here = {layer for store, part in checkpoint.parts if store in local for layer in part.weights}
    for _, part in checkpoint.parts:
        weights = {layer: blob for layer, blob in part.weights.items() if layer not in here}
        optimizer = {layer: blob for layer, blob in part.optimizer.items() if layer not in here}
        if weights:
            target.write(part.name, [replace(part, weights=weights, optimizer=optimizer).to_json()])
