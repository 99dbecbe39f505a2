"""One node of a bench as a process: takes orders as JSON lines on stdin, answers on stdout. See `net.Lab`."""

from __future__ import annotations

import json
import logging
import random
import socket
import sys
import threading
import time
from collections import deque
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from atlas.wan.cell_relay.relay import Cell
from atlas.wan.security.credentials import Credentials, Security
from atlas.wan.transport.base import Handle, Key, Transport
from atlas.wan.transport.endpoint import Endpoint
from atlas.wan.transport.settings import TransportSettings

EVERYWHERE = ("0.0.0.0/0",)


@cache
def _pattern(which: int, num_bytes: int) -> np.ndarray:
    return np.random.default_rng(which).integers(0, 256, num_bytes, np.uint8)


def pattern(number: int, num_bytes: int) -> np.ndarray:
    """One of four patterns, by the message's number."""
    return _pattern(number % 4, num_bytes)


class Actor:
    """Its methods are the commands of a node; return values are the replies."""

    def __init__(self) -> None:
        self.endpoint: Endpoint | None = None
        self.transport: Transport | None = None
        self.waiting: dict[str, list[Handle]] = {}
        self.buffers: list[np.ndarray] = []
        self.sockets: list[socket.socket] = []

    def open(self, name: str, host: str, certs: str | None, settings: dict[str, Any]) -> Any:
        credentials = Credentials.of_folder(Path(certs), name) if certs else None
        security = Security(credentials, () if certs else EVERYWHERE)
        if settings.pop("verbose", False):
            logging.basicConfig(level=logging.INFO)
        self.endpoint = Endpoint(name, (host, 0), security=security, settings=TransportSettings(**settings))
        self.transport = self.endpoint
        return self.endpoint.address

    def cell(self, pairs: dict[str, str]) -> None:
        self.shared = self.transport = Cell(self.endpoint, pairs)

    def use(self, which: str) -> None:
        self.transport = self.shared if which == "cell" else self.endpoint

    def connect(self, peers: dict[str, list[Any]], lanes: list[int]) -> None:
        self.endpoint.connect({peer: (host, port) for peer, (host, port) in peers.items()}, lanes)

    def join(self, peers: dict[str, list[Any]], lanes: list[int]) -> None:
        self.shared.connect({peer: (host, port) for peer, (host, port) in peers.items()})

    def recv(self, peer: str, numbers: list[int], num_bytes: int) -> None:
        if len(self.buffers) < len(numbers) or (self.buffers and len(self.buffers[0]) != num_bytes):
            self.buffers = [np.ones(num_bytes, np.uint8) for _ in numbers]
        self.waiting["recv"] = [
            self.transport.recv(Key(peer, 0, (n, 0, 0, 0)), b) for n, b in zip(numbers, self.buffers, strict=False)
        ]

    def prepare(self, num_bytes: int) -> None:
        """Touch the memory first: page faults would count as network delay."""
        if len(self.buffers) != 1 or len(self.buffers[0]) != num_bytes:
            self.buffers = [np.ones(num_bytes, np.uint8)]

    def send(self, peer: str, numbers: list[int], num_bytes: int, turns: list[int], at_ns: int) -> None:
        self.prepare(num_bytes)
        data = self.buffers[0]
        time.sleep(max(0, at_ns - time.monotonic_ns()) / 1e9)
        self.waiting["send"] = [
            self.transport.send(Key(peer, 0, (n, 0, 0, 0)), data, turn) for n, turn in zip(numbers, turns, strict=True)
        ]

    def wait(self, which: str, timeout_s: float) -> Any:
        """Start and end of each, on the machine's monotonic clock."""
        handles = self.waiting.pop(which)
        for handle in handles:
            handle.wait(timeout_s)
        return [(handle.start_ns, handle.end_ns) for handle in handles]

    def stats(self, peer: str, lane: int = 0) -> Any:
        channel = self.endpoint.channel(peer, lane)
        facts = [s.stream.facts() for s in channel._slots if s.stream]
        return {
            "rtt_ms": round(channel.tuner.rtt_s * 1e3, 2),
            "rate_mbps": round((channel.tuner.meter.rate_bps or 0) / 1e6),
            "choice": str(channel.tuner.choice),
            "inflight_kb": channel.outbox.inflight and channel.outbox.inflight.limit_bytes >> 10,
            "retransmits": [f.num_retransmits for f in facts if f],
            "cwnd_kb": [f.window_bytes >> 10 for f in facts if f],
            "control": [
                s.stream.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0").decode()
                for s in channel._slots
                if s.stream
            ],
            **channel.faults._asdict(),
        }

    def prepare_many(self, num_bytes: int) -> None:
        """Generate the messages in advance, so that it is not timed."""
        for n in range(4):
            pattern(n, num_bytes)

    def send_many(self, peer: str, count: int, num_bytes: int) -> list[int]:
        """Send with at most 64 in flight; the transport's counts of broken streams (`Faults`)."""
        handles: list[Handle] = []
        for n in range(count):
            handles.append(self.transport.send(Key(peer, 0, (n, 0, 0, 0)), pattern(n, num_bytes), n))
            if n >= 64:
                handles[n - 64].wait(60)
        for handle in handles:
            handle.wait(60)
        return list(self.endpoint.faults)

    def recv_many(self, peer: str, count: int, num_bytes: int, seed: int, ahead: int) -> tuple[int, int]:
        """Post receives in small groups while earlier messages arrive, like training, some `ahead` of the awaited ones.
        The number of wrong messages, and the arrival of the last one."""
        draw, wrong = random.Random(seed), 0
        waiting: deque[tuple[int, Handle]] = deque()
        posted = 0
        while posted < count or waiting:
            for _ in range(min(count - posted, draw.randint(1, 6))):
                waiting.append((posted, self.transport.recv(Key(peer, 0, (posted, 0, 0, 0)))))
                posted += 1
            while waiting and (len(waiting) > ahead or posted == count):
                number, handle = waiting.popleft()
                wrong += not np.array_equal(
                    np.frombuffer(handle.wait(60), np.uint64), pattern(number, num_bytes).view(np.uint64)
                )
        return wrong, time.monotonic_ns()

    def cpu(self) -> float:
        return time.process_time()

    def paths(self, peer: str) -> Any:
        return [
            (path.delivered_bytes, path.num_staged, round(path.latency_s, 3)) for path in self.transport.paths(peer)
        ]

    # ---- one TCP connection, for comparison --------------------------------------------------------------------
    def tcp_listen(self, host: str) -> Any:
        server = socket.create_server((host, 0))
        self.sockets.append(server)
        threading.Thread(target=self._tcp_serve, args=(server,), daemon=True).start()
        return server.getsockname()

    def _tcp_serve(self, server: socket.socket) -> None:
        sock, _ = server.accept()
        block = memoryview(bytearray(1 << 20))
        while head := sock.recv(8, socket.MSG_WAITALL):
            left = int.from_bytes(head, "big")
            while left:
                left -= sock.recv_into(block, min(left, len(block)))
            sock.sendall(b"k")

    def tcp_connect(self, address: list[Any], congestion: str) -> None:
        sock = socket.socket()
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, congestion.encode())
        sock.connect(tuple(address))
        self.sockets.append(sock)

    def tcp_send(self, num_bytes: int) -> float:
        sock, data = self.sockets[-1], bytes(num_bytes)
        begin = time.monotonic()
        sock.sendall(num_bytes.to_bytes(8, "big"))
        sock.sendall(data)
        sock.recv(1)
        return time.monotonic() - begin

    # ---- Gloo, for comparison ----------------------------------------------------------------------------------
    def gloo(self, rank: int, host: str, port: int, device: str) -> None:
        import os
        from datetime import timedelta

        import torch.distributed as dist

        os.environ["GLOO_SOCKET_IFNAME"] = device
        store = dist.TCPStore(host, port, 2, rank == 0, timeout=timedelta(seconds=30))
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2)

    def gloo_move(self, rank: int, num_bytes: int, count: int) -> tuple[float, float]:
        """Start and end, on the machine's monotonic clock."""
        import torch
        import torch.distributed as dist

        tensor = torch.zeros(num_bytes, dtype=torch.uint8)
        dist.barrier()
        begin = time.monotonic()
        for _ in range(count):
            if rank == 0:
                dist.send(tensor, 1)
            else:
                dist.recv(tensor, 0)
        return begin, time.monotonic()

    # ---- garbage connections ------------------------------------------------------------------------------------
    def flood(self, address: list[Any], count: int, corpus: str, per_s: float) -> int:
        """Open garbage connections in the background; every tenth stays half-open. `flooded` returns their number."""
        blobs = [file.read_bytes() for file in sorted(Path(corpus).iterdir())]
        self.num_flooded = 0

        def run(share: range) -> None:
            begin = time.monotonic()
            for n, i in enumerate(share):
                time.sleep(max(0.0, begin + n * len(crowd) / per_s - time.monotonic()))
                try:
                    sock = socket.create_connection(tuple(address), timeout=5)
                    sock.sendall(blobs[i % len(blobs)])
                except OSError:
                    continue
                self.num_flooded += 1
                if i % 10 == 0:
                    self.sockets.append(sock)
                    del self.sockets[:-500]
                else:
                    sock.close()

        crowd = [range(i, count, 24) for i in range(24)]
        for share in crowd:
            threading.Thread(target=run, args=(share,), daemon=True).start()
        return count

    def flooded(self) -> int:
        return self.num_flooded

    def close(self) -> None:
        if self.endpoint is not None:
            self.endpoint.close(1.0)


def main() -> None:
    sys.setswitchinterval(0.0005)
    actor = Actor()
    for line in sys.stdin:
        order = json.loads(line)
        try:
            answer = {"answer": getattr(actor, order.pop("do"))(**order)}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
