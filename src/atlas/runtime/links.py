"""A worker's connections: one endpoint, on it a relay for each boundary that its cell shares, and direct links to
neighbours on its host. Sends and receives by purpose; `topology` says who the peer is.

Knows transports and names. Does not know tensors, nor when anything is sent.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterable
from dataclasses import replace
from pathlib import Path

from atlas.errors import WorkerError
from atlas.ir.program import BACKWARD, FORWARD
from atlas.runtime.assignment import Assignment
from atlas.runtime.topology import AFTER, BEFORE, CONTROL, GRADIENTS, MAIN, WorkerRole, is_along, lane_of
from atlas.wan.cell_relay.relay import SLICE_BYTES, Cell
from atlas.wan.cell_relay.slices import head_bytes
from atlas.wan.security.credentials import Credentials, Security
from atlas.wan.transport.base import Address, Buffer, Handle, Key, Tag, Transport
from atlas.wan.transport.direct import DirectTransport
from atlas.wan.transport.endpoint import Endpoint
from atlas.wan.transport.settings import TransportSettings
from atlas.wan.transport.wire import HEADER_BYTES

CONNECT_S = 20.0
"""Peers listen before any worker connects."""
HEARTBEAT_S = 3.0
"""A worker has dozens of streams, and each heartbeat takes CPU time from computation."""
RECORD_WAN = "ATLAS_RECORD_WAN"
"""The environment variable with the folder where workers record the packets of their WAN paths."""
SLICES_PER_NODE, MIN_SLICE_BYTES = 4, 16 * 1024
"""A slice costs milliseconds of CPU time however small it is."""
SENDS = {AFTER: FORWARD, BEFORE: BACKWARD}
"""The direction that each end of a shared boundary sends."""
WARM_UP = (-1, -1, -1, -1)
"""The tag of each channel's first message, which is not read."""

PeerAddress = tuple[str, str, int, str | None, int]
"""(end, peer, lane, host, port) of one connection. Without a host the peer dials."""


class WorkerLinks:
    """Listens at once; then `connect`, then use it."""

    def __init__(self, role: WorkerRole, assignment: Assignment, *, direct: bool = False) -> None:
        """`direct`: whether the waiting thread itself reads activations of neighbours on this host."""
        self.role, self.patience_s = role, assignment.patience_s
        settings = TransportSettings(deadline_s=assignment.patience_s + 5, heartbeat_s=HEARTBEAT_S)
        settings = replace(settings, record_folder=os.environ.get(RECORD_WAN, ""))
        if assignment.streams:
            settings = replace(settings, max_streams=assignment.streams)
        security = _security(assignment, role.node)
        where = (assignment.listen, assignment.port)
        self.main = Endpoint(role.node, where, epoch=assignment.epoch, security=security, settings=settings)
        self._direct: DirectTransport | None = None
        if direct and not assignment.certificates:
            patience_s = settings.deadline_s
            self._direct = DirectTransport(role.node, self.main.address, epoch=assignment.epoch, patience_s=patience_s)
        slice_bytes = slice_bytes_of(assignment.training.activation_bytes, role.program.num_pipelines)
        both = (FORWARD, BACKWARD)
        self._relays = {
            end: Cell(self.main, role.pairs(end), both, slice_bytes, (SENDS[end],), role.relay_lane(end))
            for end in role.ends
            if end != MAIN
        }

    def is_sending(self, besides: Collection[int] = ()) -> bool:
        """Whether a message on other lanes than these is unsent or unacknowledged."""
        direct = self._direct is not None and self._direct.is_sending
        return direct or self.main.is_sending(besides)

    @property
    def port(self) -> int:
        """The listening port."""
        return self.main.address[1]

    def connect(self, places: Iterable[PeerAddress], dial_for: Iterable[PeerAddress] = ()) -> None:
        """Open every connection and use it once: a first burst over a cold connection is several times slower.

        `dial_for`: the connections of peers that cannot dial this worker. Nothing may be sent or received through a
        relay before all peers have returned from this.
        """
        for end, peer, lane, host, port in dial_for:
            assert host is not None, "the launcher has refused pairs in which neither can dial"
            if end == MAIN:
                self.main.dial_for(peer, lane, (host, port))
            else:
                self._relays[end].dial_for({peer: (host, port)})
        main = self.main
        opened: dict[tuple[str, int], Address | None] = {}
        relayed: dict[str, dict[str, Address | None]] = {}
        for end, peer, lane, host, port in places:
            address = None if host is None else (host, port)
            if end == MAIN and address is not None and self._is_direct(peer, lane, address):
                continue
            if end == MAIN:
                opened[peer, lane] = address
            else:
                relayed.setdefault(end, {})[peer] = address
        kinds = [main.kind_of(peer, light=lane == CONTROL, mesh=lane == GRADIENTS) for peer, lane in opened]
        main.expect([*kinds, *(kind for end, peers in relayed.items() for kind in self._relays[end].kinds(peers))])
        channels = [
            main.open(peer, lane, address, light=lane == CONTROL, mesh=lane == GRADIENTS)
            for (peer, lane), address in opened.items()
        ]
        try:
            main.warm_up(channels, CONNECT_S)
            for end, peers in relayed.items():
                self._relays[end].connect(peers, CONNECT_S)
        except WorkerError as error:
            raise WorkerError(f"{error}. `atlas wan check` in every datacenter shows who reaches whom") from None
        sent = [
            main.send(Key(peer, lane, WARM_UP), b"0", what=f"{self.role.name} warms up the connection to {peer}")
            for (peer, lane), channel in zip(opened, channels, strict=True)
            if not channel.is_lazy
        ]
        for handle in sent:
            handle.wait(self.patience_s)

    def _is_direct(self, peer: str, lane: int, address: Address) -> bool:
        """Use a direct link if possible; whether it is. Never between datacenters, also when emulated on one host."""
        if self._direct is None or peer.partition("/")[0] != self.role.datacenter or not is_along(lane):
            return False
        return self._direct.dial(peer, lane, address)

    # ---- along the pipeline ------------------------------------------------------------------------------------------
    def send(self, direction: int, boundary: int, tag: Tag, buffer: Buffer, turn: int, what: str) -> Handle:
        """Send an activation or a gradient over a boundary; the smallest turn first where it is shared."""
        transport, key = self._channel(direction, boundary, tag, sends=True)
        return transport.send(key, buffer, turn if self.role.shares(boundary) else 0, what)

    def recv(self, direction: int, boundary: int, tag: Tag, buffer: Buffer, what: str) -> Handle:
        transport, key = self._channel(direction, boundary, tag, sends=False)
        return transport.recv(key, buffer, what)

    def _channel(self, direction: int, boundary: int, tag: Tag, *, sends: bool) -> tuple[Transport, Key]:
        role = self.role
        ahead = (direction == FORWARD) == sends
        peer = role.node_of(role.pipeline, role.program.stage_rank[boundary + 1 if ahead else boundary])
        end = role.end_of(boundary)
        if end != MAIN:
            return self._relays[end], Key(peer, direction, tag)
        lane, direct = lane_of(direction, boundary), self._direct
        if direct is not None and (direct.sends_to(peer, lane) if sends else direct.receives_from(peer, lane)):
            return direct, Key(peer, lane, tag)
        return self.main, Key(peer, lane, tag)

    # ---- across pipelines, and along the pipeline for what is not an activation --------------------------------------
    def send_to(self, lane: int, pipeline: int, rank: int, tag: Tag, buffer: Buffer, what: str) -> Handle:
        return self.main.send(Key(self.role.node_of(pipeline, rank), lane, tag), buffer, what=what)

    def recv_from(self, lane: int, pipeline: int, rank: int, tag: Tag, buffer: Buffer | None, what: str) -> Handle:
        return self.main.recv(Key(self.role.node_of(pipeline, rank), lane, tag), buffer, what)

    def close(self) -> None:
        """Close every connection at once."""
        if self._direct is not None:
            self._direct.close(0.0)
        for relay in self._relays.values():
            relay.close(0.0)
        self.main.close(0.0)


def slice_bytes_of(transfer_bytes: int, num_nodes: int) -> int:
    """Every node of a cell must get several slices of each transfer."""
    return max(MIN_SLICE_BYTES, min(SLICE_BYTES, transfer_bytes // (SLICES_PER_NODE * num_nodes)))


def sliced_bytes(transfer_bytes: int, num_nodes: int, hops: tuple[str, ...]) -> int:
    """Bytes of a transfer on the network where a cell shares the WAN: each slice has a header."""
    num_slices = math.ceil(transfer_bytes / slice_bytes_of(transfer_bytes, num_nodes))
    return transfer_bytes + num_slices * (HEADER_BYTES + head_bytes(hops))


def _security(assignment: Assignment, node: str) -> Security:
    if not assignment.certificates:
        return Security()
    credentials = Credentials.of_folder(Path(assignment.certificates), node)
    return Security(credentials, assignment.trusted_networks)
