"""A node's end of the WAN: sends to and receives from other nodes by key. The `Transport` that uses sockets.

The sender connects: a channel of several streams to every peer and lane; acknowledgements return on them. Where it
cannot, the receiver dials for it (`dial_for`). Names are `datacenter/worker`. An epoch ends when the group restarts; an
endpoint belongs to one epoch, and refuses connections of other epochs and of other processes with the same name. Knows
no tensors and no Programs.
"""

from __future__ import annotations

import logging
import secrets
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from atlas.errors import AtlasError, WorkerError
from atlas.lifetime import Closing, Repeating
from atlas.wan.security.credentials import Security, datacenter_of
from atlas.wan.transport.acceptor import Acceptor
from atlas.wan.transport.base import Address, Buffer, Handle, Key, Transport, view_of, writable_view_of
from atlas.wan.transport.channel import Channel
from atlas.wan.transport.handshake import GreetingAnswer, receive
from atlas.wan.transport.inbound import Inbound
from atlas.wan.transport.inbound_dialer import InboundDialer
from atlas.wan.transport.inbound_streams import InboundStreams
from atlas.wan.transport.inbox import Inbox
from atlas.wan.transport.settings import CONNECT_S, TransportSettings
from atlas.wan.transport.shared_channel import SharedChannel
from atlas.wan.transport.shared_threads import SharedThreads
from atlas.wan.transport.stream import SocketStream, broken
from atlas.wan.transport.stream_budget import ChannelKind, StreamBudget
from atlas.wan.transport.stream_slot import Faults
from atlas.wan.transport.unix_sockets import BACKLOG, listen_unix
from atlas.wan.transport.wire import MAX_CHUNK_BYTES, Greeting, RecordKind

log = logging.getLogger("atlas.wan")
WATCH_S = 0.2
"""How often channels, inboxes and the senders of cells are checked for their deadlines."""
MAX_OWN_DIALERS = 8
"""Channels of peers that this node dials for with threads of their own."""
Consumer = Callable[[Key, memoryview], None]


class Endpoint(Transport, Closing):
    """Listens from the start, at `address`. Then `connect` to peers, `send`, `recv`, `close`."""

    def __init__(
        self,
        name: str,
        listen: Address = ("127.0.0.1", 0),
        *,
        epoch: int = 0,
        security: Security | None = None,
        settings: TransportSettings | None = None,
    ) -> None:
        self.name, self.epoch = name, epoch
        self.security, self.settings = security or Security(), settings or TransportSettings()
        self.instance = secrets.randbits(63) | 1
        self._lock = threading.Lock()
        self._channels: dict[tuple[str, int], Channel] = {}
        self._inboxes: dict[tuple[str, int], Inbox] = {}
        self._instances: dict[str, int] = {}
        self._dialers: dict[tuple[str, int], InboundDialer] = {}
        self._consumers: dict[int, Consumer] = {}
        self._threads: dict[threading.Thread, bool] = {}
        """Threads of connections to this node, and whether the peer was accepted: those count against `max_inbound`, as
        streams without a thread do."""
        self._closing = threading.Event()
        family = socket.AF_INET6 if ":" in listen[0] else socket.AF_INET
        server = socket.create_server(listen, family=family, backlog=BACKLOG)
        self.address: Address = server.getsockname()[:2]
        self._shared = SharedThreads(f"atlas wan {name}")
        self._budget = StreamBudget(self.settings.max_streams)
        self._inbound = InboundStreams(self.settings, self._shared.readers, self.kind_of)
        listeners = [sock for sock in (server, listen_unix(self.address)) if sock is not None]
        self._acceptor = Acceptor(listeners, self.settings, self._admit)
        self._watcher = Repeating(f"atlas wan {name} watch", WATCH_S, self._watch)

    # ---- the transport -----------------------------------------------------------------------------------------
    def connect(
        self,
        peers: Mapping[str, Address | None],
        lanes: Iterable[int] = (0,),
        timeout_s: float = CONNECT_S,
        *,
        light: bool = False,
    ) -> None:
        """Opens channels to all peers and warms them up: the first burst on a cold path is two to three times
        slower. None in place of an address: the peer calls `dial_for`."""
        lanes = list(lanes)
        places = [(peer, lane, address) for peer, address in peers.items() for lane in lanes]
        self.warm_up([self.open(*place, light=light) for place in places], timeout_s)

    def warm_up(self, channels: Iterable[Channel], timeout_s: float = CONNECT_S) -> None:
        """Returns when all are connected and warmed up. Raises WorkerError if one cannot be reached in time."""
        channels, deadline = list(channels), time.monotonic() + timeout_s
        shared = [channel for channel in channels if isinstance(channel, SharedChannel)]
        own = [channel for channel in channels if not isinstance(channel, SharedChannel)]
        with ThreadPoolExecutor(max(1, len(own))) as pool:
            for warmed in [pool.submit(channel.warm, deadline) for channel in own]:
                warmed.result()
        for channel in shared:
            channel.warm(deadline)

    def send(
        self,
        key: Key,
        buffer: Buffer,
        turn: int = 0,
        what: str = "",
        on_start: Callable[[], None] | None = None,
        *,
        whole: bool = False,
    ) -> Handle:
        """`on_start` is called when it leaves the queue. `whole`: send one chunk, if MAX_CHUNK_BYTES allow it."""
        handle = Handle(what or f"{key} to {key.peer}")
        handle.on_start = on_start
        channel = self._channels.get((key.peer, key.lane))
        if channel is None:
            raise ValueError(f"{self.name} is not connected to {key.peer} on lane {key.lane}: call connect first")
        view = view_of(buffer)
        channel.outbox.put(key.tag, view, turn, handle, whole=whole and len(view) <= MAX_CHUNK_BYTES)
        return handle

    def recv(self, key: Key, buffer: Buffer | None = None, what: str = "") -> Handle:
        handle = Handle(what or f"{key} from {key.peer}")
        self._inbox(key.peer, key.lane).post(key.tag, writable_view_of(buffer), handle)
        return handle

    def consume(self, lane: int, consumer: Consumer) -> None:
        """Passes all messages of a lane to `consumer`, on the thread that received them. Call it before `connect`."""
        self._consumers[lane] = consumer

    def save_records(self) -> None:
        """Writes what channels have recorded of their paths."""
        for channel in list(self._channels.values()):
            if channel.outbox.packets is not None:
                channel.outbox.packets.close()

    def close(self, timeout_s: float = 5.0) -> None:
        """Ends all connections. Raises nothing: the handles of what was not delivered have failed."""
        if self._closing.is_set():
            return
        deadline = time.monotonic() + timeout_s
        for channel in list(self._channels.values()):
            channel.close(max(0.0, deadline - time.monotonic()))
        self._closing.set()
        self._watcher.close()
        self._acceptor.close()
        dialers = list(self._dialers.values())
        for dialer in dialers:
            dialer.close()
        self._inbound.close()
        self._acceptor.join(self.settings.handshake_s)
        for dialer in dialers:
            dialer.join(self.settings.handshake_s)
        self._shared.close(self.settings.handshake_s)
        for inbox in list(self._inboxes.values()):
            inbox.fail(WorkerError(f"{self.name} was closed"))

    def is_sending(self, besides: Collection[int] = ()) -> bool:
        """Whether anything is to be sent or acknowledged on lanes other than these."""
        return any(not c.outbox.is_empty for (_, lane), c in list(self._channels.items()) if lane not in besides)

    def channel(self, peer: str, lane: int = 0) -> Channel:
        """For measurements and tests."""
        return self._channels[peer, lane]

    @property
    def faults(self) -> Faults:
        """Of all channels since they were opened."""
        return Faults.sum(channel.faults for channel in list(self._channels.values()))

    @property
    def num_retransmits(self) -> int:
        """Segments that the kernel sent again, on the connections that are open now."""
        return sum(channel.tuner.num_retransmits for channel in list(self._channels.values()))

    # ---- sending side ------------------------------------------------------------------------------------------
    def open(
        self, peer: str, lane: int, address: Address | None, *, light: bool = False, mesh: bool = False
    ) -> Channel:
        """Opens a channel that connects in the background. `light`: for small messages only. `mesh`: one of perhaps
        many like it. Without an address the peer calls `dial_for`."""
        with self._lock:
            if self._closing.is_set():
                raise WorkerError(f"{self.name} is closed")
            if (peer, lane) not in self._channels:
                mine = Greeting(self.name, peer, lane, self.epoch, self.instance)
                places = (mine, address, self.security, self.settings)
                self._channels[peer, lane] = self._channel(self.kind_of(peer, light=light, mesh=mesh), *places)
            return self._channels[peer, lane]

    def _channel(self, kind: ChannelKind, *arguments: Any) -> Channel:
        light = kind is ChannelKind.LIGHT
        if self.settings.num_streams is not None and not light:
            return Channel(*arguments)
        if not (num_streams := self._budget.outgoing(kind)):
            return SharedChannel(*arguments, threads=self._shared)
        return Channel(*arguments, light=light, num_streams=num_streams)

    def kind_of(self, peer: str, *, light: bool = False, mesh: bool = False) -> ChannelKind:
        if light:
            return ChannelKind.LIGHT
        if datacenter_of(peer) != datacenter_of(self.name):
            return ChannelKind.FAR
        return ChannelKind.MESH if mesh else ChannelKind.NEAR

    def expect(self, kinds: Iterable[ChannelKind]) -> None:
        """The channels that will be opened: they share the streams that a node may have."""
        with self._lock:
            self._budget.expect(Counter(kinds))

    # ---- receiving side ----------------------------------------------------------------------------------------
    def dial_for(self, peer: str, lane: int, address: Address) -> None:
        """Dials, in the background, the connections on which a peer that cannot dial this node sends on a lane. A lane
        with a consumer must have it by now."""
        inbox = self._inbox(peer, lane)
        mine = Greeting(self.name, peer, lane, self.epoch, self.instance, self.settings.staging_bytes, reverse=True)
        with self._lock:
            if not self._closing.is_set() and (peer, lane) not in self._dialers:
                shared = self._shared.dialers if len(self._dialers) >= MAX_OWN_DIALERS else None
                self._dialers[peer, lane] = InboundDialer(
                    mine, address, self.security, self.settings, self._serve_dialled, inbox.fail, shared
                )

    def _serve_dialled(self, stream: SocketStream, theirs: Greeting, on_end: Callable[[], None] | None) -> None:
        with self._lock:
            known = self._instances.setdefault(theirs.name, theirs.instance) == theirs.instance
        inbox = self._inbox(theirs.name, theirs.lane)
        if known:
            inbound = Inbound(stream, theirs, inbox, self.settings)
            if on_end is None:
                self._inbound.serve(inbound)
            else:
                self._inbound.serve_shared(inbound, on_end)
            return
        stream.close()
        inbox.fail(WorkerError(f"{theirs.name} has restarted: a restart needs a new epoch"))

    def _inbox(self, peer: str, lane: int) -> Inbox:
        with self._lock:
            if (peer, lane) not in self._inboxes:
                inbox = Inbox(peer, lane, self.settings.staging_bytes, self._consumers.get(lane))
                place, send_record = (peer, lane), self._inbound.send_record
                inbox.on_posted = lambda tag: send_record(place, RecordKind.POSTED, tag=tag)
                inbox.on_freed = lambda total: send_record(place, RecordKind.FREED, total)
                self._inbound.add_place(place)
                self._inboxes[peer, lane] = inbox  # last, because the watcher reads it without the lock
                if self._closing.is_set():
                    inbox.fail(WorkerError(f"{self.name} is closed"))
            return self._inboxes[peer, lane]

    def _answer(self, theirs: Greeting) -> tuple[GreetingAnswer, Greeting]:
        mine = Greeting(self.name, theirs.name, theirs.lane, self.epoch, self.instance, self.settings.staging_bytes)
        if theirs.peer != self.name:
            return GreetingAnswer.OTHER_NODE, mine
        if theirs.epoch != self.epoch:
            return (GreetingAnswer.OLD_EPOCH if theirs.epoch < self.epoch else GreetingAnswer.NEW_EPOCH), mine
        with self._lock:
            if self._instances.get(theirs.name, theirs.instance) != theirs.instance:
                return GreetingAnswer.OTHER_LIFE, mine
            channel = self._channels.get((theirs.name, theirs.lane))
            if theirs.reverse:
                if channel is None or not channel.may_adopt(theirs.slot):
                    return GreetingAnswer.NOT_READY, mine
                mine = mine._replace(slot=channel.num_slots)
            elif sum(self._threads.values()) + self._inbound.num_shared >= self.settings.max_inbound:
                return GreetingAnswer.FULL, mine
            self._instances[theirs.name] = theirs.instance
            self._threads[threading.current_thread()] = not theirs.reverse
        return GreetingAnswer.WELCOME, mine

    def _admit(self, sock: socket.socket, mode: int) -> None:
        """Runs on a thread of its own, from the preamble to the end of the stream, or until a channel or the shared
        threads have it."""
        me = threading.current_thread()
        with self._lock:
            self._threads[me] = False
        accepted, has_owner = None, False
        try:
            accepted = self._shake_hands(sock, mode)
            if accepted is not None and accepted[1].reverse:
                has_owner = self._channels[accepted[1].name, accepted[1].lane].adopt(*accepted)
            elif accepted is not None:
                has_owner = True
                stream, theirs = accepted
                serves = self._inbound.serve_shared if self._inbound.is_crowded(theirs.name) else self._inbound.serve
                serves(Inbound(stream, theirs, self._inbox(theirs.name, theirs.lane), self.settings))
        finally:
            if not has_owner:
                sock.close()
            with self._lock:
                del self._threads[me]

    def _shake_hands(self, sock: socket.socket, mode: int) -> tuple[SocketStream, Greeting] | None:
        """None if the peer was refused, or did not prove its name."""
        try:
            if not self._closing.is_set():
                return receive(sock, mode, self.security, self._answer, self.settings.handshake_s)
        except (OSError, AtlasError, ValueError) as error:
            log.info("%s: refused a connection: %s", self.name, broken(error))
        finally:
            self._acceptor.handshake_done(sock)
        return None

    def _watch(self) -> None:
        for channel in list(self._channels.values()):
            channel.watch()
        now = time.monotonic()
        for dialer in list(self._dialers.values()):
            dialer.watch(now)
        self._inbound.watch(now)
        for place, inbox in list(self._inboxes.items()):
            gone_s = self._inbound.gone_s(place, now)
            if inbox.waits and gone_s > self.settings.deadline_s and not self._may_be_lazy(place):
                dialed = self._dialers.get(place)
                why = f"; dialled for it at {dialed.address}: {dialed.last_error}" if dialed is not None else ""
                inbox.fail(WorkerError(f"no connection from {place[0]} to {self.name} for {gone_s:.1f} s{why}"))

    def _may_be_lazy(self, place: tuple[str, int]) -> bool:
        """Whether the peer may connect only when it sends: it has as many peers as this node."""
        if self.kind_of(place[0]) is not ChannelKind.NEAR or self._inbound.has_come(place):
            return False
        return any(channel.is_lazy for channel in list(self._channels.values()))
