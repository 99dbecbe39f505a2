"""The grade of the emulator with real TCP: a network namespace and a TUN device per node, and a forwarder between them
with delay, rate, queue, loss and jitter. Needs root, or a user namespace.

    with NamespaceNet({("east-0", "west-0"): PathSpec(latency_s=0.02, pair_bps=2e9)}) as net:
        server = net.node("west-0").popen(["python", "serve.py", net.address("west-0")])
        net.node("east-0").run(lambda: fetch(net.address("west-0")))
        net.certify()

Addresses exist inside the namespaces only. With `gso`, packets have up to 64 KB, which is fast; one lost packet is then
up to 44 lost segments, so switch it off to study loss.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from atlas.errors import AtlasError
from atlas.wan.emulator.emulated_net import EmulatedNet
from atlas.wan.emulator.kernel_shaping import path_of_node, shape_in_kernel
from atlas.wan.emulator.netdev import Namespace, in_thread, make_namespace
from atlas.wan.emulator.paths import MAX_NODES, Paths, PathSpec, path_between
from atlas.weather.packets import LOST, PacketTable
from atlas.weather.tcp_window import STOCK_RMEM_BYTES, STOCK_WMEM_BYTES, WINDOW_BYTES

T = TypeVar("T")


class NamespaceNode:
    """One emulated machine."""

    def __init__(self, name: str, address: str, namespace: Namespace) -> None:
        self.name, self.address, self._namespace = name, address, namespace
        self._processes: list[subprocess.Popen[Any]] = []

    def run(self, call: Callable[[], T]) -> T:
        """Calls it in a thread on this node. Sockets, threads and processes that it makes are on the node too."""
        return in_thread(call, self._namespace.fd)

    def popen(self, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Starts a process on this node. It is killed when the net is closed."""
        process: subprocess.Popen[Any] = self.run(lambda: subprocess.Popen(list(command), **options))
        self._processes.append(process)
        return process

    def close(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.kill()
            process.wait()
        os.close(self._namespace.fd)


class NamespaceNet(EmulatedNet):
    """Named nodes and the paths between them, with the TCP buffers of a stock kernel.

    `kernel` leaves delay, rate and loss to the kernel's netem; lateness is then that of the kernel.
    """

    def __init__(self, paths: Paths, *, gso: bool = True, kernel: bool = False) -> None:
        super().__init__(paths)
        if not 0 < len(self.nodes) <= MAX_NODES:
            raise AtlasError(
                f"{len(self.nodes)} nodes: the namespace emulator takes 1 to {MAX_NODES}. Name fewer paths"
            )
        self._nodes: dict[str, NamespaceNode] = {}
        tun_fds: list[int] = []
        try:
            for i, name in enumerate(self.nodes):
                address = f"10.99.{(i + 1) >> 8}.{(i + 1) & 255}"
                namespace = make_namespace(address, gso=gso, sysctls=stock_sysctls(self._window_bytes(name)))
                tun_fds.append(namespace.tun_fd)
                self._nodes[name] = NamespaceNode(name, address, namespace)
                if kernel:
                    shape_in_kernel(namespace.fd, path_of_node(self.paths, name))
            shaped = dict.fromkeys(self.paths, PathSpec(window_bytes=None)) if kernel else self.paths
            self._start("atlas.wan.emulator.forward_server", shaped, tun_fds)
        except BaseException:
            self.close()
            raise
        finally:
            for fd in tun_fds:
                os.close(fd)

    def node(self, name: str) -> NamespaceNode:
        if name not in self._nodes:
            raise AtlasError(f"no node {name!r}: there are {', '.join(self.nodes)}")
        return self._nodes[name]

    def address(self, name: str) -> str:
        """The address at which other nodes reach this one."""
        return self.node(name).address

    def cut(self, a: str, b: str) -> None:
        """Drops all packets of a path, also those in transit. Neither end is notified: TCP has to find out."""
        self._open(a, b, opened=False, flush=True)

    def stall(self, a: str, b: str) -> None:
        """Drops packets that are sent from now on. Those in transit arrive."""
        self._open(a, b, opened=False, flush=False)

    def resume(self, a: str, b: str) -> None:
        """Undoes `cut` and `stall`."""
        self._open(a, b, opened=True, flush=False)

    def record_packets(self, max_packets: int) -> None:
        """Keeps what happens to the next packets, for `packets`."""
        self._ask("record", max_packets=max_packets)

    def packets(self) -> dict[tuple[str, str], PacketTable]:
        """Ground truth of what was recorded, by direction; a round trip includes the way back, without a queue."""
        with tempfile.TemporaryDirectory() as folder:
            self._ask("packets", file=f"{folder}/seen.npy")
            rows = np.load(f"{folder}/seen.npy", allow_pickle=False)
        found = {}
        for link, (src, dst) in enumerate([*self.paths, *((b, a) for a, b in self.paths)]):
            sent, _, num_bytes, due = rows[rows[:, 1] == link].T.copy()
            back_ns = round(path_between(self.paths, src, dst).latency_s * 1e9)
            rtt = np.where(due < 0, LOST, due - sent + back_ns)
            found[src, dst] = PacketTable(f"{src}>{dst}", sent, num_bytes, rtt, len(sent))
        return found

    def close(self) -> None:
        """Ends the processes on the nodes, the forwarder, and with their descriptors the namespaces."""
        for node in self._nodes.values():
            node.close()
        self._nodes = {}
        super().close()

    def _window_bytes(self, name: str) -> int:
        """TCP buffers belong to a node, not to a path: they follow the largest window of its paths."""
        windows = [path.window_bytes for pair, path in self.paths.items() if name in pair]
        return max((w for w in windows if w is not None), default=WINDOW_BYTES)

    def _open(self, a: str, b: str, *, opened: bool, flush: bool) -> None:
        path_between(self.paths, a, b)
        self._ask("open", a=a, b=b, opened=opened, flush=flush)


def stock_sysctls(window_bytes: int) -> dict[str, str]:
    """TCP buffers that give one connection this window. For 3 MB they are those of a stock kernel."""
    scale = window_bytes / WINDOW_BYTES
    return {
        "tcp_rmem": f"4096 131072 {max(131072, round(scale * STOCK_RMEM_BYTES))}",
        "tcp_wmem": f"4096 16384 {max(65536, round(scale * STOCK_WMEM_BYTES))}",
    }
