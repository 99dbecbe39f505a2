"""The proxy emulator's process: listeners on loopback, the links of every node pair, and commands in JSON lines.

Runs as `python -m atlas.wan.emulator.proxy_server FD` and ends when the socket FD is closed. `loop` moves the bytes.
"""

from __future__ import annotations

import gc
import itertools
import os
import random
import socket
import sys
import time
from typing import Any

from atlas.lifetime import end_with_parent
from atlas.priority import raise_priority
from atlas.wan.emulator.emulated_net import answer
from atlas.wan.emulator.flows import LinkDirection, ProxiedConnection, TrunkDirection
from atlas.wan.emulator.lateness import Histogram
from atlas.wan.emulator.loop import RESET, ProxyLoop
from atlas.wan.emulator.paths import PathSpec, path_between

BACKLOG = 512
"""Connections that may wait to be accepted: more than any bench opens at once."""


class ProxyServer:
    """Paths, listeners and their commands around one ProxyLoop."""

    def __init__(self, control: socket.socket) -> None:
        self.loop = ProxyLoop()
        self.loop.on_end = lambda connection: self._pairs.pop(connection, None)
        self._control, self._commands = control, control.makefile("rb")
        self._paths: dict[tuple[str, str], PathSpec] = {}
        self._links: dict[tuple[str, str], LinkDirection] = {}
        self._trunks: dict[tuple[str, bool], TrunkDirection] = {}
        self._listeners: list[socket.socket] = []
        self._pairs: dict[ProxiedConnection, tuple[str, str]] = {}
        self._refused: set[frozenset[str]] = set()
        self._stalled: set[frozenset[str]] = set()
        self._numbers = itertools.count()
        self.loop.watch(control, self._on_command)

    def run(self) -> None:
        try:
            self.loop.run()
        finally:
            for sock in [*self._listeners, self._control]:
                sock.close()
            self.loop.close()

    # ---- commands ----------------------------------------------------------------------------------------------
    def _on_command(self) -> None:
        try:
            line = self._commands.readline()
            if line:
                self._control.sendall(answer(self, line))
        except OSError:
            line = b""
        if not line:
            self.loop.stop()

    def do_paths(
        self, nodes: list[str], paths: list[tuple[str, str, dict[str, Any]]], realtime: bool
    ) -> dict[str, Any]:
        self._paths = {(a, b): PathSpec.from_json(path) for a, b, path in paths}
        return {"priority": raise_priority(realtime=realtime)}

    def do_listen(self, src: str, dst: str, target: tuple[str, int]) -> dict[str, Any]:
        there, back = self._link(src, dst), self._link(dst, src)
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # A large receive buffer would take the sender's whole queue, and the sender could not reorder it any more.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, there.receive_buffer_bytes)
        listener.bind(("127.0.0.1", 0))
        listener.listen(BACKLOG)
        listener.setblocking(False)
        self._listeners.append(listener)
        address = (str(target[0]), int(target[1]))
        self.loop.watch(listener, lambda: self._accept(listener, address, (src, dst), there, back))
        return {"address": listener.getsockname()}

    def do_change(self, a: str, b: str, path: dict[str, Any]) -> None:
        path_between(self._paths, a, b)
        spec = PathSpec.from_json(path)
        self._paths[(a, b) if (a, b) in self._paths else (b, a)] = spec
        for src, dst in ((a, b), (b, a)):
            self._link(src, dst).shape(spec)

    def do_cut(self, a: str | None, b: str | None, number: int | None, refuse: bool) -> dict[str, Any]:
        found = self._chosen(a, b, number)
        for connection in found:
            self.loop.cut(connection)
        if refuse and a is not None and b is not None:
            self._refused.add(frozenset((a, b)))
        return {"count": len(found)}

    def do_stall(self, a: str | None, b: str | None, number: int | None) -> dict[str, Any]:
        found = self._chosen(a, b, number)
        for connection in found:
            connection.stalled = True
        if number is None and a is not None and b is not None:
            self._stalled.add(frozenset((a, b)))
        return {"count": len(found)}

    def do_resume(self, a: str | None, b: str | None) -> dict[str, Any]:
        """Stalled connections continue, and refused paths accept connections again."""
        for marked in (self._refused, self._stalled):
            if a is None or b is None:
                marked.clear()
            else:
                marked.discard(frozenset((a, b)))
        found = [c for c in self._chosen(a, b, None) if c.stalled]
        for connection in found:
            self.loop.resume(connection)
        return {"count": len(found)}

    def do_stats(self) -> dict[str, Any]:
        late = self.loop.lateness
        return {
            "bins": late.bins,
            "worst_ns": late.worst_ns,
            "cpu_s": sum(os.times()[:2]),
            "directions": [[*pair, link.num_bytes, link.num_pieces] for pair, link in self._links.items()],
            "connections": [
                {"number": c.number, "src": pair[0], "dst": pair[1], "peak_bytes": [f.peak_bytes for f in c.flows]}
                for c, pair in sorted(self._pairs.items(), key=lambda item: item[0].number)
            ],
        }

    def do_weather(self, at_ns: int | None = None) -> None:
        """Cross traffic starts again with its first value, which it also has before `at_ns`."""
        for link in self._links.values():
            link.cross_since_ns = time.monotonic_ns() if at_ns is None else at_ns

    def do_reset(self) -> None:
        self.loop.lateness = Histogram()

    # ---- what commands need ------------------------------------------------------------------------------------
    def _link(self, src: str, dst: str) -> LinkDirection:
        link = self._links.get((src, dst))
        if link is None:
            path = path_between(self._paths, src, dst)
            cross = path.cross if (src, dst) in self._paths else path.cross_back
            link = self._links[src, dst] = LinkDirection(path, self._trunk(src, dst, path), cross)
        return link

    def _trunk(self, src: str, dst: str, path: PathSpec) -> TrunkDirection:
        if path.trunk is None:
            return TrunkDirection(None)
        # The order of the names in a pair shows which end of the trunk a node is on.
        return self._trunks.setdefault((path.trunk.name, (src, dst) in self._paths), TrunkDirection(path.trunk.bps))

    def _chosen(self, a: str | None, b: str | None, number: int | None) -> list[ProxiedConnection]:
        """All connections, those of a pair, or one of them: by number, or -1 for a random one."""
        if a is not None and b is not None:
            path_between(self._paths, a, b)
        found = [c for c, pair in self._pairs.items() if a is None or b is None or set(pair) == {a, b}]
        if number is None:
            return found
        if number < 0:
            return random.sample(found, min(1, len(found)))
        return [c for c in found if c.number == number]

    def _accept(
        self,
        listener: socket.socket,
        target: tuple[str, int],
        pair: tuple[str, str],
        there: LinkDirection,
        back: LinkDirection,
    ) -> None:
        while True:
            try:
                near, _ = listener.accept()
            except OSError:
                return
            if frozenset(pair) in self._refused:
                near.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                near.close()
                continue
            far = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            far.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, back.receive_buffer_bytes)
            for sock in (near, far):
                sock.setblocking(False)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection = ProxiedConnection(next(self._numbers), near, far, there, back)
            connection.stalled = frozenset(pair) in self._stalled
            self._pairs[connection] = pair
            self.loop.open(connection, target)


if __name__ == "__main__":
    end_with_parent(os.getppid())  # also if a fork of the parent keeps the command socket open
    gc.disable()  # no cycles of any size are made here, and a collection would delay deliveries
    ProxyServer(socket.socket(fileno=int(sys.argv[1]))).run()
