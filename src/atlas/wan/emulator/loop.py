"""The proxy emulator's event loop: reads from senders when link and window have room, delays bytes until they are due,
and forwards them. One epoll, and one heap of everything that is scheduled.

Knows sockets, links and time. Paths and commands are in `proxy_server`.
"""

from __future__ import annotations

import contextlib
import ctypes
import heapq
import itertools
import os
import select
import socket
import struct
import time
from collections.abc import Callable
from typing import Any

from atlas.wan.emulator.flows import LOOKAHEAD_NS, DelayedBytes, Flow, LinkDirection, ProxiedConnection, TrunkDirection
from atlas.wan.emulator.lateness import Histogram

CHUNKS_PER_ROUND = 64
"""Chunks read before due deliveries are checked again."""
RESET = struct.pack("ii", 1, 0)
"""SO_LINGER with which close() sends a reset."""
_LIBC = ctypes.CDLL(None, use_errno=True)
_now_ns = time.monotonic_ns


class Timer:
    """A timerfd, because epoll's own timeout has a resolution of a millisecond."""

    def __init__(self) -> None:
        self.fd = _LIBC.timerfd_create(time.CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        if self.fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")
        self._spec = (ctypes.c_long * 4)()
        self._at_ns = -1

    def set(self, at_ns: int) -> None:
        if at_ns != self._at_ns:
            self._at_ns = at_ns
            self._spec[2], self._spec[3] = divmod(at_ns, 1_000_000_000)
            _LIBC.timerfd_settime(self.fd, 1, self._spec, None)


class ProxyLoop:
    """Runs until `stop`. Not thread-safe: commands arrive on a socket that it watches like the others."""

    def __init__(self) -> None:
        self.lateness = Histogram()
        self.connections: set[ProxiedConnection] = set()
        self.on_end: Callable[[ProxiedConnection], object] = lambda connection: None
        self._epoll = select.epoll()
        self._timer = Timer()
        self._epoll.register(self._timer.fd, select.EPOLLIN | select.EPOLLET)
        self._heap: list[tuple[int, int, Callable[..., None], Any]] = []
        self._number = itertools.count()
        self._watched: dict[int, Callable[[], None]] = {}
        self._ends: dict[int, tuple[Flow, Flow]] = {}
        """By descriptor: the flow that reads from it and the flow that writes to it."""
        self._busy: set[TrunkDirection] = set()
        self._running = True

    # ---- called by the server ----------------------------------------------------------------------------------
    def watch(self, sock: socket.socket, on_readable: Callable[[], None]) -> None:
        self._watched[sock.fileno()] = on_readable
        self._epoll.register(sock.fileno(), select.EPOLLIN)

    def at(self, due_ns: int, call: Callable[..., None], argument: Any) -> None:
        heapq.heappush(self._heap, (due_ns, next(self._number), call, argument))

    def stop(self) -> None:
        self._running = False

    def open(self, connection: ProxiedConnection, target: tuple[str, int]) -> None:
        """A connection was accepted. Its first bytes wait for the round trip of TCP's handshake."""
        self.connections.add(connection)
        latency_ns, now_ns = connection.there.link.latency_ns, _now_ns()
        # Bytes that are due before the far end is connected wait, which is not lateness.
        connection.there.held = True
        self.at(now_ns + 2 * latency_ns, self._listen_to_near, connection)
        self.at(now_ns + 3 * latency_ns, lambda c: self._connect_far(c, target), connection)

    def _listen_to_near(self, connection: ProxiedConnection) -> None:
        if not connection.dead:
            self._register(connection.near, connection.there, connection.back)

    def _connect_far(self, connection: ProxiedConnection, target: tuple[str, int]) -> None:
        if connection.dead:
            return
        connection.far.connect_ex(target)
        self._register(connection.far, connection.back, connection.there)

    def _register(self, sock: socket.socket, reads: Flow, writes: Flow) -> None:
        self._ends[sock.fileno()] = (reads, writes)
        self._epoll.register(sock.fileno(), select.EPOLLIN | select.EPOLLOUT | select.EPOLLRDHUP | select.EPOLLET)

    def cut(self, connection: ProxiedConnection) -> None:
        """Resets both ends at once. Bytes in transit are lost."""
        if connection.dead:
            return
        for sock in (connection.near, connection.far):
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        self._close(connection)

    def resume(self, connection: ProxiedConnection) -> None:
        """Lets a stalled connection continue."""
        connection.stalled = False
        now_ns = _now_ns()
        for flow in connection.flows:
            flow.held = flow.held or bool(flow.out)
            self._deliver(flow)
            self._offer(flow, now_ns)

    def close(self) -> None:
        for connection in list(self.connections):
            self._close(connection)
        self._epoll.close()
        os.close(self._timer.fd)

    # ---- the loop ----------------------------------------------------------------------------------------------
    def run(self) -> None:
        heap = self._heap
        while self._running:
            now_ns = _now_ns()
            while heap and heap[0][0] <= now_ns:
                _, _, call, argument = heapq.heappop(heap)
                call(argument)
            for trunk in list(self._busy):
                self._serve(trunk)
            if self._busy:
                wait_s = 0.0
            else:
                wait_s = -1.0
                if heap:
                    self._timer.set(heap[0][0])
            for fd, events in self._epoll.poll(wait_s):
                self._handle(fd, events)

    def _handle(self, fd: int, events: int) -> None:
        watcher = self._watched.get(fd)
        if watcher is not None:
            watcher()
            return
        ends = self._ends.get(fd)
        if ends is None:
            return
        reads, writes = ends
        connection = reads.connection
        if not connection.connected and fd == connection.far.fileno():
            self._on_connected(connection, events)
            return
        if events & select.EPOLLOUT and writes.held:
            self._deliver(writes)
        if events & (select.EPOLLIN | select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR):
            reads.readable = True
            self._offer(reads, _now_ns())

    def _on_connected(self, connection: ProxiedConnection, events: int) -> None:
        if connection.far.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.at(_now_ns() + connection.back.link.latency_ns, self.cut, connection)
        elif events & select.EPOLLOUT:
            connection.connected = True
            self._deliver(connection.there)
            connection.back.readable = True
            self._offer(connection.back, _now_ns())

    # ---- in ------------------------------------------------------------------------------------------------
    def _offer(self, flow: Flow, since_ns: int) -> None:
        """A flow has something to read: it joins the turns of its link."""
        if flow.queued or flow.waiting or flow.ended or not flow.readable:
            return
        flow.queued, flow.since_ns = True, since_ns
        link = flow.link
        # A flow that was idle goes first, so that a small message does not wait for bulk traffic.
        link.ready.appendleft(flow)
        self._enlist(link)

    def _enlist(self, link: LinkDirection) -> None:
        if link.ready and not link.queued and not link.paused:
            link.queued = True
            link.trunk.links.append(link)
            if not link.trunk.paused:
                self._busy.add(link.trunk)

    def _serve(self, trunk: TrunkDirection) -> None:
        """Reads for the links in turn until they are `LOOKAHEAD_NS` ahead, or nothing is left to read."""
        horizon_ns = _now_ns() + LOOKAHEAD_NS
        for _ in range(CHUNKS_PER_ROUND):
            if not trunk.links:
                self._busy.discard(trunk)
                return
            if trunk.free_ns > horizon_ns:
                trunk.paused = True
                self._busy.discard(trunk)
                self.at(int(trunk.free_ns) - LOOKAHEAD_NS, self._resume_trunk, trunk)
                return
            link = trunk.links.popleft()
            link.queued = False
            if link.free_ns > horizon_ns:
                link.paused = True
                self.at(int(link.free_ns) - LOOKAHEAD_NS, self._resume_link, link)
                continue
            if link.ready:
                self._read(link.ready.popleft())
                self._enlist(link)

    def _resume_trunk(self, trunk: TrunkDirection) -> None:
        trunk.paused = False
        if trunk.links:
            self._busy.add(trunk)

    def _resume_link(self, link: LinkDirection) -> None:
        link.paused = False
        self._enlist(link)

    def _read(self, flow: Flow) -> None:
        flow.queued = False
        connection = flow.connection
        if connection.dead or connection.stalled:
            return
        now_ns = _now_ns()
        left_bytes = flow.window_left_bytes(now_ns)
        if left_bytes <= 0:
            flow.waiting = True
            if flow.acks:
                self.at(flow.acks[0][0], self._open_window, flow)
            return
        try:
            data = flow.source.recv(min(left_bytes, flow.link.chunk_bytes))
        except BlockingIOError:
            flow.readable = False
            return
        except OSError:
            self.at(now_ns + flow.link.latency_ns, self.cut, connection)
            return
        piece = flow.accept(data, now_ns)
        flow.out.append(piece)
        self._arm(flow)
        if data:
            flow.queued = True
            flow.link.ready.append(flow)
        else:
            flow.ended = True

    def _open_window(self, flow: Flow) -> None:
        if flow.waiting and flow.acks:
            flow.waiting = False
            self._offer(flow, flow.acks[0][0])

    # ---- out -----------------------------------------------------------------------------------------------
    def _arm(self, flow: Flow) -> None:
        if not flow.armed:
            flow.armed = True
            self.at(flow.out[0].due_ns, self._on_due, flow)

    def _on_due(self, flow: Flow) -> None:
        flow.armed = False
        if not flow.held:
            self._deliver(flow)

    def _deliver(self, flow: Flow) -> None:
        """Forwards what is due, as far as the receiver accepts it."""
        out, connection = flow.out, flow.connection
        if connection.dead or connection.stalled or (flow is connection.there and not connection.connected):
            return
        while out:
            now_ns = _now_ns()
            piece = out[0]
            if piece.due_ns > now_ns:
                flow.held = False
                self._arm(flow)
                return
            if not flow.held:
                self.lateness.note(now_ns - piece.due_ns)
            try:
                done = self._hand_over(flow, piece)
            except BlockingIOError:
                flow.held = True
                return
            except OSError:
                self.at(now_ns + flow.link.latency_ns, self.cut, connection)
                return
            if not done:
                flow.held = True
                return
            self._acknowledge(flow, piece, now_ns)
        flow.held = False
        self._close_if_done(connection)

    def _hand_over(self, flow: Flow, piece: DelayedBytes) -> bool:
        """Returns False if the receiver accepted only a part; the rest stays at the head of the queue."""
        if not piece.num_bytes:
            flow.sink.shutdown(socket.SHUT_WR)
            flow.out.popleft()
            return True
        sent = flow.sink.send(piece.data)
        if sent < len(piece.data):
            flow.out[0] = piece._replace(data=memoryview(piece.data)[sent:])
            return False
        flow.out.popleft()
        return True

    def _acknowledge(self, flow: Flow, piece: DelayedBytes, now_ns: int) -> None:
        ack_ns = now_ns + flow.link.latency_ns if flow.held else piece.ack_ns
        flow.acks.append((ack_ns, piece.num_bytes))
        if flow.waiting and len(flow.acks) == 1:
            self.at(ack_ns, self._open_window, flow)

    def _close_if_done(self, connection: ProxiedConnection) -> None:
        if all(flow.ended and not flow.out for flow in connection.flows):
            self._close(connection)

    def _close(self, connection: ProxiedConnection) -> None:
        if connection.dead:
            return
        connection.dead = True
        self.connections.discard(connection)
        for sock in (connection.near, connection.far):
            self._ends.pop(sock.fileno(), None)
            sock.close()
        for flow in connection.flows:
            flow.out.clear()
            flow.acks.clear()
        self.on_end(connection)
