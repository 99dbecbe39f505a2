"""The process around the compiled forwarder: builds its tables from paths, lets it run, answers commands in JSON lines.

`python -m atlas.wan.emulator.forward_server CONTROL_FD TUN_FD...`; it ends with its commander's socket.
"""

from __future__ import annotations

import gc
import json
import os
import socket
import sys
from typing import Any

import numpy as np
from numba import njit

from atlas.wan.emulator import forward as f
from atlas.wan.emulator.lateness import NUM_BINS
from atlas.wan.emulator.paths import PathSpec
from atlas.wan.emulator.priority import end_with_parent, raise_priority

MAX_RING_BYTES = 256 * 1024 * 1024
SLACK_BYTES = 4 * 1024 * 1024
MAX_TOUCHED_BYTES, PAGE_BYTES = 1 << 30, 4096


class ForwardServer:
    """Nodes are numbers here: the commander keeps their names."""

    def __init__(self, control: socket.socket, tun_fds: list[int]) -> None:
        self._control = control
        self._heard = control.makefile("rb")
        num = len(tun_fds)
        self._fds = np.array(tun_fds, np.int32)
        self._lane_of = np.full((num, num), -1, np.int32)
        self._polls = np.zeros((num + 1, 2), np.int32)
        self._polls[:, 0] = [*tun_fds, control.fileno()]
        self._trunk_rows: dict[tuple[str, bool], int] = {}
        self._bins, self._totals = np.zeros(NUM_BINS, np.int64), np.zeros(2, np.int64)
        self._pairs: list[tuple[int, int]] = []

    def run(self) -> None:
        """The first command brings the paths; from then on packets flow between commands."""
        while line := self._heard.readline():
            command = json.loads(line)
            answer = getattr(self, "do_" + command.pop("do"))(**command) or {}
            self._control.sendall(json.dumps(answer).encode() + b"\n")
            f.forward(
                self._fds,
                self._lane_of,
                self._floats,
                self._ints,
                self._trunks,
                self._memory,
                self._memory.view(np.int64),
                self._bins,
                self._totals,
                self._polls,
            )

    def do_paths(self, paths: list[tuple[int, int, dict[str, Any]]], seed: int, realtime: bool) -> dict[str, Any]:
        lanes = [(a, b, PathSpec.from_json(path), True) for a, b, path in paths]
        lanes += [(b, a, path, False) for a, b, path, _ in lanes]
        self._floats = np.zeros((len(lanes), f.NUM_FLOATS))
        self._ints = np.zeros((len(lanes), f.NUM_INTS), np.int64)
        self._trunks = np.zeros((max(1, 2 * len(lanes)), f.NUM_TRUNK_FLOATS))
        base = 0
        for lane, (src, dst, path, there) in enumerate(lanes):
            self._lane_of[src, dst] = lane
            self._pairs.append((src, dst))
            size = _ring_bytes(path)
            self._ints[lane, [f.TRUNK, f.DST, f.BASE, f.SIZE, f.OPEN]] = self._trunk(path, there), dst, base, size, 1
            self._shape(lane, path)
            base += size
        self._memory = np.empty(base, np.uint8)
        self._memory[:MAX_TOUCHED_BYTES:PAGE_BYTES] = 0  # a first touch later may take milliseconds
        _seed(seed)
        self._compile()
        return {"priority": raise_priority(realtime=realtime)}

    def do_change(self, a: int, b: int, path: dict[str, Any]) -> None:
        spec = PathSpec.from_json(path)
        for lane in self._both(a, b):
            self._shape(lane, spec)

    def do_open(self, a: int, b: int, opened: bool, flush: bool) -> None:
        for lane in self._both(a, b):
            self._ints[lane, f.OPEN] = int(opened)
            if flush:
                self._ints[lane, [f.HEAD, f.TAIL, f.USED]] = 0

    def do_stats(self) -> dict[str, Any]:
        columns = [f.NUM_BYTES, f.NUM_PACKETS, f.DROPPED, f.LOST]
        return {
            "bins": self._bins.tolist(),
            "total_ns": int(self._totals[0]),
            "worst_ns": int(self._totals[1]),
            "cpu_s": sum(os.times()[:2]),
            "lanes": [[*pair, *row] for pair, row in zip(self._pairs, self._ints[:, columns].tolist(), strict=True)],
        }

    def do_reset(self) -> None:
        self._bins[:] = 0
        self._totals[:] = 0

    def _compile(self) -> None:
        """One empty round, so that the first packet does not wait for the compiler."""
        ours, theirs = socket.socketpair()
        with ours, theirs:
            theirs.sendall(b"!")
            polls = np.array([[ours.fileno(), 0]], np.int32)
            none = np.zeros((0, f.NUM_INTS), np.int64)
            words = self._memory.view(np.int64)
            tables = self._lane_of[:0], self._floats, none, self._trunks, self._memory, words
            f.forward(self._fds[:0], *tables, self._bins, self._totals, polls)

    def _trunk(self, path: PathSpec, there: bool) -> int:
        if path.trunk is None:
            return -1
        row = self._trunk_rows.setdefault((path.trunk.name, there), len(self._trunk_rows))
        queue_bytes = max(1_000_000, path.trunk.bps / 8 * 2 * path.latency_s)
        self._trunks[row, [f.TRUNK_NS_PER_BYTE, f.TRUNK_QUEUE_BYTES]] = 8e9 / path.trunk.bps, queue_bytes
        return row

    def _shape(self, lane: int, path: PathSpec) -> None:
        row = self._floats[lane]
        row[f.LATENCY_NS], row[f.JITTER_NS] = path.latency_s * 1e9, path.jitter_s * 1e9
        row[f.NS_PER_BYTE] = 8e9 / path.pair_bps if path.pair_bps else 0.0
        row[f.QUEUE_BYTES], row[f.LOSS] = path.queue, path.loss

    def _both(self, a: int, b: int) -> list[int]:
        return [int(self._lane_of[a, b]), int(self._lane_of[b, a])]


@njit(cache=True)
def _seed(seed: int) -> None:
    """The compiled code has a generator of its own."""
    np.random.seed(seed)


def _ring_bytes(path: PathSpec) -> int:
    """Room for what is queued and what is on its way, small packets' records included."""
    rate = path.rate_bps or 10e9
    flight = rate / 8 * (path.latency_s + path.jitter_s)
    need = round(1.25 * (flight + min(path.queue, 64_000_000))) + SLACK_BYTES
    return min(need, MAX_RING_BYTES) // 4096 * 4096


if __name__ == "__main__":
    end_with_parent()
    gc.disable()
    control_fd, *tuns = map(int, sys.argv[1:])
    ForwardServer(socket.socket(fileno=control_fd), tuns).run()
