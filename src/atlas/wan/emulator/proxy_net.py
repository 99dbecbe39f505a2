"""The unprivileged grade of the emulator: paths on loopback, shaped by a proxy.

    with ProxyNet({("east-0", "west-0"): PathSpec(latency_s=0.02, pair_bps=200e6)}) as net:
        host, port = net.listen("east-0", "west-0", target)   # east-0 connects here to reach west-0's service
        ...
        net.certify()                                         # raises if the proxy was late

The proxy is `proxy_server`, in a process of its own. It listens on 127.0.0.1 only.
"""

from __future__ import annotations

from atlas.wan.emulator.emulated_net import EmulatedNet
from atlas.wan.emulator.paths import Paths
from atlas.wan.transport.base import Address


class ProxyNet(EmulatedNet):
    """Emulated paths between named nodes, reached through `listen`."""

    def __init__(self, paths: Paths, *, realtime: bool = True) -> None:
        super().__init__(paths)
        self._start("atlas.wan.emulator.proxy_server", self.paths, realtime=realtime)

    def listen(self, src: str, dst: str, target: Address) -> Address:
        """Returns the address at which `src` reaches the service that `dst` has at `target`."""
        host, port = self._ask("listen", src=src, dst=dst, target=target)["address"]
        return host, port

    def cut(
        self, a: str | None = None, b: str | None = None, *, number: int | None = None, refuse: bool = False
    ) -> int:
        """Resets connections and returns how many: all, those of a pair, or one (`number`; -1 picks one at random).
        `refuse` resets new connections of the pair too."""
        return int(self._ask("cut", a=a, b=b, number=number, refuse=refuse)["count"])

    def stall(self, a: str | None = None, b: str | None = None, *, number: int | None = None) -> int:
        """Stops connections without closing them, chosen as in `cut`; for a whole pair, new ones too."""
        return int(self._ask("stall", a=a, b=b, number=number)["count"])

    def resume(self, a: str | None = None, b: str | None = None) -> int:
        """Undoes `stall` and `refuse`."""
        return int(self._ask("resume", a=a, b=b)["count"])
