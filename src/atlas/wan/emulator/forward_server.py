"""The namespace emulator's process: builds tables from paths, runs the compiled forwarder, answers commands.

Runs as `python -m atlas.wan.emulator.forward_server CONTROL_FD TUN_FD...` and ends when the socket is closed.
"""

from __future__ import annotations

import gc
import os
import socket
import sys
import time
from typing import Any

import numpy as np

from atlas.jit import entry
from atlas.lifetime import end_with_parent
from atlas.priority import raise_priority
from atlas.wan.emulator import forward as f
from atlas.wan.emulator.emulated_net import answer
from atlas.wan.emulator.lateness import NUM_BINS
from atlas.wan.emulator.paths import UNCAPPED_QUEUE_BYTES, PathSpec, round_trip_bytes
from atlas.wan.emulator.rivals import rival_tables, segment_bytes, start_rivals

MAX_RING_BYTES = 256 << 20
RING_SLACK_BYTES = 4 << 20
"""Added to each ring for the records of small packets."""
MAX_TOUCHED_BYTES, PAGE_BYTES = 1 << 30, 4096
"""Pages of the rings are touched at the start: a first touch later takes milliseconds on a virtual machine."""
UNCAPPED_BPS = 10e9
"""What one core forwards at most: bounds the ring of a path without a cap."""


class ForwardServer:
    """Tables of links and trunks. Nodes are numbered in the order of their TUN devices."""

    def __init__(self, control: socket.socket, tun_fds: list[int]) -> None:
        self._control, self._commands = control, control.makefile("rb")
        num = len(tun_fds)
        self._nodes: dict[str, int] = {}
        self._fds = np.array(tun_fds, np.int32)
        self._link_of = np.full((num, num), -1, np.int32)
        self._polls = np.zeros((num + 1, 2), np.int32)
        self._polls[:, 0] = [*tun_fds, control.fileno()]
        self._trunk_rows: dict[tuple[str, bool], int] = {}
        self._bins, self._worst = np.zeros(NUM_BINS, np.int64), np.zeros(1, np.int64)
        self._pairs: list[tuple[str, str]] = []
        self._cross, self._rivals = np.zeros(0), rival_tables(0)
        self._seen, self._num_seen = np.zeros((0, 4), np.int64), np.zeros(1, np.int64)

    def run(self) -> None:
        """The first command brings the paths. Between commands, packets are forwarded."""
        while line := self._commands.readline():
            self._control.sendall(answer(self, line))
            self._forward(self._fds, self._link_of, self._ints, self._polls)

    def _forward(self, fds: Any, link_of: Any, ints: Any, polls: Any) -> None:
        """Forwards until there is a command."""
        memory, weather = self._memory, (self._cross, self._rivals, self._seen, self._num_seen)
        tables = f.ForwardTables(link_of, self._floats, ints, self._trunks, memory, memory.view(np.int64), *weather)
        f.forward(fds, tables, self._bins, self._worst, polls)

    def do_paths(self, nodes: list[str], paths: list[tuple[str, str, dict[str, Any]]]) -> dict[str, Any]:
        self._nodes = {name: i for i, name in enumerate(nodes)}
        links = [(a, b, PathSpec.from_json(path), True) for a, b, path in paths]
        links += [(b, a, path, False) for a, b, path, _ in links]
        self._floats = np.zeros((len(links), f.NUM_FLOATS))
        self._ints = np.zeros((len(links), f.NUM_INTS), np.int64)
        self._trunks = np.zeros((max(1, 2 * len(links)), f.NUM_TRUNK_FLOATS))
        self._rivals = rival_tables(sum(path.rivals if there else path.rivals_back for _, _, path, there in links))
        base = 0
        for link, (src, dst, path, there) in enumerate(links):
            to = self._nodes[dst]
            self._link_of[self._nodes[src], to] = link
            self._pairs.append((src, dst))
            size = _ring_bytes(path)
            self._ints[link, [f.TRUNK, f.DST, f.BASE, f.SIZE, f.OPEN]] = self._trunk(path, there), to, base, size, 1
            self._shape(link, path)
            base += size
            cross = path.cross if there else path.cross_back
            self._ints[link, [f.CROSS, f.CROSS_END]] = len(self._cross), len(self._cross) + len(cross)
            self._cross = np.concatenate([self._cross, cross])
            first, num = int(self._ints[:, f.RIVALS_END].max()), path.rivals if there else path.rivals_back
            segment = segment_bytes(path.latency_s * (path.pair_bps or 0.0) / 4, path.queue)
            self._ints[link, [f.RIVALS, f.RIVALS_END, f.SEGMENT_BYTES]] = first, first + num, segment
        self.do_weather()
        self._memory = np.empty(base, np.uint8)
        self._memory[:MAX_TOUCHED_BYTES:PAGE_BYTES] = 0
        _seed(0)
        self._compile()
        return {"priority": raise_priority()}

    def do_change(self, a: str, b: str, path: dict[str, Any]) -> None:
        spec = PathSpec.from_json(path)
        for link in self._both(a, b):
            self._shape(link, spec)

    def do_open(self, a: str, b: str, opened: bool, flush: bool) -> None:
        for link in self._both(a, b):
            self._ints[link, f.OPEN] = int(opened)
            if flush:
                self._ints[link, [f.HEAD, f.TAIL, f.USED]] = 0

    def do_stats(self) -> dict[str, Any]:
        columns = [f.NUM_BYTES, f.NUM_PACKETS, f.DROPPED, f.LOST]
        return {
            "bins": self._bins.tolist(),
            "worst_ns": int(self._worst[0]),
            "cpu_s": sum(os.times()[:2]),
            "directions": [
                [*pair, *row] for pair, row in zip(self._pairs, self._ints[:, columns].tolist(), strict=True)
            ],
        }

    def do_weather(self) -> None:
        """Cross traffic starts again with its first value, and competing flows with a handshake."""
        now_ns = time.monotonic_ns()
        self._floats[:, [f.CROSS_SINCE, f.CROSS_AT]] = now_ns
        for row, link in zip(self._floats, self._ints, strict=True):
            own = slice(link[f.RIVALS], link[f.RIVALS_END])
            floats, ints, ring = self._rivals
            start_rivals((floats[own], ints[own], ring[own]), now_ns, 2 * row[f.LATENCY_NS])

    def do_record(self, max_packets: int) -> None:
        """Keeps the next packets: when they came, and when they are due."""
        self._seen, self._num_seen = np.zeros((max_packets, 4), np.int64), np.zeros(1, np.int64)

    def do_packets(self, file: str) -> None:
        """Writes them as rows of time, index of the direction, bytes, due (-1: dropped)."""
        np.save(file, self._seen[: self._num_seen[0]])
        self.do_record(0)

    def do_reset(self) -> None:
        self._bins[:] = 0
        self._worst[:] = 0

    def _compile(self) -> None:
        """Runs one empty round, so that the first packet does not wait for the compiler."""
        ours, theirs = socket.socketpair()
        with ours, theirs:
            theirs.sendall(b"!")
            polls = np.array([[ours.fileno(), 0]], np.int32)
            self._forward(self._fds[:0], self._link_of[:0], self._ints[:0], polls)

    def _trunk(self, path: PathSpec, there: bool) -> int:
        if path.trunk is None:
            return -1
        row = self._trunk_rows.setdefault((path.trunk.name, there), len(self._trunk_rows))
        queue_bytes = round_trip_bytes(path.trunk.bps, path.latency_s)
        if path.pair_bps is None and path.queue_bytes is not None:
            queue_bytes = path.queue_bytes  # the pair has no link of its own
        self._trunks[row, [f.TRUNK_NS_PER_BYTE, f.TRUNK_QUEUE_BYTES]] = 8e9 / path.trunk.bps, queue_bytes
        return row

    def _shape(self, link: int, path: PathSpec) -> None:
        row = self._floats[link]
        row[f.LATENCY_NS], row[f.JITTER_NS] = path.latency_s * 1e9, path.jitter_s * 1e9
        row[f.NS_PER_BYTE] = 8e9 / path.pair_bps if path.pair_bps else 0.0
        row[f.QUEUE_BYTES], row[f.LOSS] = path.queue, path.loss

    def _both(self, a: str, b: str) -> list[int]:
        first, second = self._nodes[a], self._nodes[b]
        return [int(self._link_of[first, second]), int(self._link_of[second, first])]


@entry
def _seed(seed: int) -> None:
    """The compiled code has a random generator of its own."""
    np.random.seed(seed)


def _ring_bytes(path: PathSpec) -> int:
    """Room for the queue and for what is in transit, with a quarter to spare for the records of packets."""
    transit_bytes = (path.rate_bps or UNCAPPED_BPS) / 8 * (path.latency_s + path.jitter_s)
    need = round(1.25 * (transit_bytes + min(path.queue, UNCAPPED_QUEUE_BYTES))) + RING_SLACK_BYTES
    return min(need, MAX_RING_BYTES) // PAGE_BYTES * PAGE_BYTES


if __name__ == "__main__":
    end_with_parent(os.getppid())  # also if a fork of the parent keeps the command socket open
    gc.disable()
    control_fd, *tuns = map(int, sys.argv[1:])
    ForwardServer(socket.socket(fileno=control_fd), tuns).run()
