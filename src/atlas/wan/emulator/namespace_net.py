"""The grade of the emulator in which real TCP meets real delay: a network namespace per node, a TUN device in each,
and a forwarder between them with delay, rate, queue, loss and jitter. Needs root, or a user namespace of one's own.

    with NamespaceNet({("east-0", "west-0"): PathSpec(latency_s=0.02, pair_bps=2e9)}) as net:
        server = net.node("west-0").popen(["python", "serve.py", net.address("west-0")])
        net.node("east-0").run(lambda: fetch(net.address("west-0")))
        net.certify()

Addresses exist inside the namespaces only. With `gso` packets are up to 64 KB, which is fast; one loss is then
that of up to 44 segments, so switch it off for studies of loss.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from atlas.errors import AtlasError
from atlas.wan.emulator.commander import Commander
from atlas.wan.emulator.kernel_shaping import path_of_node, shape_in_kernel
from atlas.wan.emulator.lateness import P99_LIMIT_S, WORST_LIMIT_S, Lateness, summarize
from atlas.wan.emulator.netdev import Namespace, entered, in_thread, make_namespace
from atlas.wan.emulator.paths import MAX_NODES, WINDOW_BYTES, Paths, PathSpec, nodes_of, path_between

T = TypeVar("T")


@dataclass(frozen=True)
class LaneStats:
    """One way between two nodes."""

    num_bytes: int
    """Payload."""
    num_packets: int
    dropped: int
    """By a full queue."""
    lost: int
    """By chance, or because the path was cut."""


@dataclass(frozen=True)
class ForwardStats:
    """What went through, and how exactly."""

    lateness: Lateness
    lanes: dict[tuple[str, str], LaneStats]
    cpu_s: float
    priority: str


class Node:
    """One machine of the emulated world."""

    def __init__(self, name: str, address: str, namespace: Namespace) -> None:
        self.name, self.address, self._namespace = name, address, namespace
        self._processes: list[subprocess.Popen[Any]] = []

    def run(self, call: Callable[[], T]) -> T:
        """Calls it in a thread that is on this node: its sockets, threads and processes are, too."""
        return in_thread(call, self._namespace.fd)

    def entered(self) -> contextlib.AbstractContextManager[None]:
        """This very thread is on the node inside the block."""
        return entered(self._namespace.fd)

    def popen(self, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """A process on this node. It is ended with the net, if not before."""
        process: subprocess.Popen[Any] = self.run(lambda: subprocess.Popen(list(command), **options))
        self._processes.append(process)
        return process

    def close(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.kill()
            process.wait()
        os.close(self._namespace.fd)


class NamespaceNet:
    """Named nodes and the paths between them. `sysctls` are of net.ipv4; None: a stock kernel's TCP buffers.

    With `kernel` the delay, rate and loss are netem's, where the kernel has it; lateness is then the kernel's own.
    """

    def __init__(
        self,
        paths: Paths,
        *,
        gso: bool = True,
        mtu: int = 1500,
        sysctls: Mapping[str, str] | None = None,
        seed: int = 0,
        realtime: bool = True,
        kernel: bool = False,
    ) -> None:
        self.paths = dict(paths)
        self._names = nodes_of(paths)
        if not 0 < len(self._names) <= MAX_NODES:
            raise AtlasError(
                f"{len(self._names)} nodes: the namespace emulator takes 1 to {MAX_NODES}. Name fewer paths"
            )
        self._nodes: dict[str, Node] = {}
        self._worker = Commander("the forwarder")
        tun_fds: list[int] = []
        try:
            for i, name in enumerate(self._names):
                address = f"10.99.{(i + 1) >> 8}.{(i + 1) & 255}"
                own = stock_sysctls(self._window_bytes(name)) if sysctls is None else sysctls
                namespace = make_namespace(address, gso=gso, mtu=mtu, sysctls=own)
                tun_fds.append(namespace.tun_fd)
                self._nodes[name] = Node(name, address, namespace)
                if kernel:
                    shape_in_kernel(namespace.fd, path_of_node(self.paths, name))
            self._worker.start_process("atlas.wan.emulator.forward_server", tun_fds)
            plain = PathSpec(window_bytes=None).as_json()
            listed = [
                (*self._numbers(a, b), plain if kernel else path.as_json()) for (a, b), path in self.paths.items()
            ]
            self._priority = str(self._worker.ask("paths", paths=listed, seed=seed, realtime=realtime)["priority"])
        except BaseException:
            self.close()
            raise
        finally:
            for fd in tun_fds:
                os.close(fd)

    @property
    def nodes(self) -> list[str]:
        return list(self._names)

    def node(self, name: str) -> Node:
        if name not in self._nodes:
            raise AtlasError(f"no node {name!r}: there are {', '.join(self._names)}")
        return self._nodes[name]

    def address(self, name: str) -> str:
        """Where the others reach a node."""
        return self.node(name).address

    def change(self, a: str, b: str, **figures: Any) -> PathSpec:
        """A path takes on other figures from now on; its trunk stays."""
        path = dataclasses.replace(path_between(self.paths, a, b), **figures)
        first, second = self._numbers(a, b)
        self._worker.ask("change", a=first, b=second, path=path.as_json())
        self.paths[(a, b) if (a, b) in self.paths else (b, a)] = path
        return path

    def cut(self, a: str, b: str) -> None:
        """Nothing gets through any more, and what was on its way is lost. A path says no goodbye: TCP finds out."""
        self._open(a, b, opened=False, flush=True)

    def stall(self, a: str, b: str) -> None:
        """Packets sent from now on vanish; those on their way arrive."""
        self._open(a, b, opened=False, flush=False)

    def resume(self, a: str, b: str) -> None:
        self._open(a, b, opened=True, flush=False)

    @property
    def stats(self) -> ForwardStats:
        raw = self._worker.ask("stats")
        lanes = {(self._names[s], self._names[d]): LaneStats(*counts) for s, d, *counts in raw["lanes"]}
        lateness = summarize(raw["bins"], raw["total_ns"], raw["worst_ns"])
        return ForwardStats(lateness, lanes, raw["cpu_s"], self._priority)

    @property
    def lateness(self) -> Lateness:
        return self.stats.lateness

    def reset_lateness(self) -> None:
        self._worker.ask("reset")

    def certify(self, p99_s: float = P99_LIMIT_S, worst_s: float = WORST_LIMIT_S) -> None:
        """Raises EmulatorLateError if what was measured does not count."""
        self.lateness.certify(p99_s, worst_s)

    def close(self) -> None:
        """Ends the processes on the nodes, the forwarder, and with their descriptors the namespaces."""
        for node in self._nodes.values():
            node.close()
        self._nodes = {}
        self._worker.close()

    def __enter__(self) -> NamespaceNet:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _numbers(self, a: str, b: str) -> tuple[int, int]:
        path_between(self.paths, a, b)
        return self._names.index(a), self._names.index(b)

    def _window_bytes(self, name: str) -> int:
        """Buffers are a node's, not a path's: the largest window of its paths."""
        windows = [path.window_bytes for pair, path in self.paths.items() if name in pair]
        return max((w for w in windows if w is not None), default=WINDOW_BYTES)

    def _open(self, a: str, b: str, *, opened: bool, flush: bool) -> None:
        first, second = self._numbers(a, b)
        self._worker.ask("open", a=first, b=second, opened=opened, flush=flush)


def stock_sysctls(window_bytes: int) -> dict[str, str]:
    """TCP buffers that give one connection this window; for 3 MB they are those of a stock kernel (6 MB and 4 MB)."""
    return {
        "tcp_rmem": f"4096 131072 {max(131072, round(window_bytes * 6_291_456 / WINDOW_BYTES))}",
        "tcp_wmem": f"4096 16384 {max(65536, round(window_bytes * 4_194_304 / WINDOW_BYTES))}",
    }
