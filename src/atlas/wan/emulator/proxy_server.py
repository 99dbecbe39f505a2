"""The proxy emulator's other half of the table: listeners on loopback, the lanes of every node pair, and commands in
JSON lines over one socket. Runs in a process of its own (`python -m atlas.wan.emulator.proxy_server FD`) or in a
thread; it ends when its commander's socket does.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import os
import random
import socket
import sys
from typing import Any

from atlas.errors import AtlasError
from atlas.wan.emulator.flows import LinkDirection, ProxiedConnection, TrunkDirection
from atlas.wan.emulator.lateness import Histogram
from atlas.wan.emulator.loop import RESET, Loop
from atlas.wan.emulator.paths import PathSpec, path_between
from atlas.wan.emulator.priority import end_with_parent, raise_priority

BACKLOG = 512
MAX_COMMAND_BYTES = 64 * 1024 * 1024


class ProxyServer:
    """Paths, listeners and their commands around one Loop."""

    def __init__(self, control: socket.socket) -> None:
        self.loop = Loop()
        self.loop.on_end = self._forget
        self._control, self._heard = control, b""
        self._paths: dict[tuple[str, str], PathSpec] = {}
        self._lanes: dict[tuple[str, str], LinkDirection] = {}
        self._trunks: dict[tuple[str, str, str], TrunkDirection] = {}
        self._listeners: dict[int, socket.socket] = {}
        self._targets: dict[int, tuple[str, int]] = {}
        self._pairs: dict[ProxiedConnection, tuple[str, str]] = {}
        self._refused: set[frozenset[str]] = set()
        self._stalled: set[frozenset[str]] = set()
        self._numbers = itertools.count()
        self._handshake = True
        control.setblocking(False)
        self.loop.watch(control, self._hear)

    def run(self) -> None:
        try:
            self.loop.run()
        finally:
            for listener in self._listeners.values():
                listener.close()
            self.loop.close()
            self._control.close()

    # ---- commands ----------------------------------------------------------------------------------------------
    def _hear(self) -> None:
        try:
            data = self._control.recv(1 << 20)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data or len(self._heard) > MAX_COMMAND_BYTES:
            self.loop.stop()
            return
        *lines, self._heard = (self._heard + data).split(b"\n")
        for line in lines:
            self._answer(json.loads(line))

    def _answer(self, command: dict[str, Any]) -> None:
        try:
            answer = getattr(self, "do_" + command.pop("do"))(**command) or {}
        except (AtlasError, OSError) as error:
            answer = {"error": str(error)}
        self._control.setblocking(True)
        with contextlib.suppress(OSError):
            self._control.sendall(json.dumps(answer).encode() + b"\n")
        self._control.setblocking(False)

    def do_paths(
        self, paths: list[tuple[str, str, dict[str, Any]]], handshake: bool, hurried: bool, realtime: bool
    ) -> dict[str, Any]:
        self._handshake = handshake
        self._paths = {(a, b): PathSpec.from_json(path) for a, b, path in paths}
        return {"priority": raise_priority(realtime=realtime) if hurried else "ordinary"}

    def do_listen(self, src: str, dst: str, target: tuple[str, int], port: int) -> dict[str, Any]:
        there, back = self._lane(src, dst), self._lane(dst, src)
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # A large receive buffer would take in the sender's whole queue, and with it the choice of what goes next.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, there.receive_buffer_bytes)
        try:
            listener.bind(("127.0.0.1", port))
        except OSError:
            listener.close()
            raise
        listener.listen(BACKLOG)
        listener.setblocking(False)
        fd = listener.fileno()
        self._listeners[fd], self._targets[fd] = listener, (str(target[0]), int(target[1]))
        self.loop.watch(listener, lambda: self._accept(listener, (src, dst), there, back))
        return {"address": listener.getsockname(), "listener": fd}

    def do_retarget(self, listener: int, target: tuple[str, int]) -> None:
        self._targets[listener] = (target[0], target[1])

    def do_change(self, a: str, b: str, path: dict[str, Any]) -> None:
        spec = PathSpec.from_json(path)
        key = (a, b) if (a, b) in self._paths else (b, a)
        path_between(self._paths, a, b)
        self._paths[key] = spec
        for src, dst in ((a, b), (b, a)):
            self._lane(src, dst).shape(spec)

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
            self.loop.stall(connection, stalled=True)
        if number is None and a is not None and b is not None:
            self._stalled.add(frozenset((a, b)))
        return {"count": len(found)}

    def do_resume(self, a: str | None, b: str | None) -> dict[str, Any]:
        """Stalled connections go on, refused paths take callers again."""
        for marked in (self._refused, self._stalled):
            if a is None or b is None:
                marked.clear()
            else:
                marked.discard(frozenset((a, b)))
        found = [c for c in self._chosen(a, b, None) if c.stalled]
        for connection in found:
            self.loop.stall(connection, stalled=False)
        return {"count": len(found)}

    def do_stats(self) -> dict[str, Any]:
        late = self.loop.lateness
        return {
            "bins": late.bins,
            "total_ns": late.total_ns,
            "worst_ns": late.worst_ns,
            "cpu_s": sum(os.times()[:2]),
            "lanes": {f"{a}>{b}": [lane.num_bytes, lane.num_pieces] for (a, b), lane in self._lanes.items()},
            "connections": [
                {"number": c.number, "src": pair[0], "dst": pair[1], "peak_bytes": [f.peak_bytes for f in c.flows]}
                for c, pair in sorted(self._pairs.items(), key=lambda item: item[0].number)
            ],
        }

    def do_reset(self) -> None:
        self.loop.lateness = Histogram()

    # ---- what commands need ------------------------------------------------------------------------------------
    def _lane(self, src: str, dst: str) -> LinkDirection:
        lane = self._lanes.get((src, dst))
        if lane is None:
            path = path_between(self._paths, src, dst)
            lane = self._lanes[src, dst] = LinkDirection(path, self._trunk(src, dst, path))
        return lane

    def _trunk(self, src: str, dst: str, path: PathSpec) -> TrunkDirection:
        if path.trunk is None:
            return TrunkDirection(None)
        # A trunk has two ways; which end of it a node is on shows in the order of its pair's names.
        way = "there" if (src, dst) in self._paths else "back"
        key = (path.trunk.name, way, "")
        return self._trunks.setdefault(key, TrunkDirection(path.trunk.bps))

    def _chosen(self, a: str | None, b: str | None, number: int | None) -> list[ProxiedConnection]:
        """All connections, those of a pair, or one of them: by number, or -1 for any."""
        if a is not None and b is not None:
            path_between(self._paths, a, b)
        found = [c for c, pair in self._pairs.items() if a is None or b is None or set(pair) == {a, b}]
        if number is None:
            return found
        if number < 0:
            return random.sample(found, min(1, len(found)))
        return [c for c in found if c.number == number]

    def _accept(
        self, listener: socket.socket, pair: tuple[str, str], there: LinkDirection, back: LinkDirection
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
            self.loop.open(connection, self._targets[listener.fileno()], handshake=self._handshake)

    def _forget(self, connection: ProxiedConnection) -> None:
        self._pairs.pop(connection, None)


def serve(control: socket.socket) -> None:
    """Until the commander hangs up."""
    ProxyServer(control).run()


if __name__ == "__main__":
    end_with_parent()
    gc.disable()  # nothing here makes cycles that matter, and a collection is a late delivery
    serve(socket.socket(fileno=int(sys.argv[1])))
