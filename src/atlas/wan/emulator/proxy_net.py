"""The unprivileged grade of the emulator: paths on loopback that anybody may open, shaped by a proxy.

    with ProxyNet({("east-0", "west-0"): PathSpec(latency_s=0.02, pair_bps=200e6)}) as net:
        host, port = net.listen("east-0", "west-0", target)   # what east-0 connects to, to reach west-0's service
        ...
        net.certify()                                         # raises where the proxy was late

The work is done by `proxy_server`, in a process of its own unless told otherwise. Listens on 127.0.0.1 only.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from atlas.wan.emulator.commander import Commander
from atlas.wan.emulator.lateness import P99_LIMIT_S, WORST_LIMIT_S, Lateness, summarize
from atlas.wan.emulator.paths import Paths, PathSpec, path_between

Address = tuple[str, int]


@dataclass(frozen=True)
class ProxyStats:
    """What went through, and how exactly."""

    lateness: Lateness
    sent_bytes: dict[tuple[str, str], int]
    """By (from node, to node)."""
    connections: list[dict[str, Any]]
    """Of those open now: number, src, dst, the most bytes each way had in flight."""
    cpu_s: float
    """Of the process that does it."""
    priority: str
    """What the kernel granted: "realtime", "short slice" or "ordinary"."""


class ProxyNet:
    """Emulated paths between named nodes. `process=False` runs the proxy in a thread, for a few slow paths."""

    def __init__(self, paths: Paths, *, process: bool = True, handshake: bool = True, realtime: bool = True) -> None:
        self.paths = dict(paths)
        self._worker = Commander("the proxy emulator")
        if process:
            self._worker.start_process("atlas.wan.emulator.proxy_server")
        else:
            from atlas.wan.emulator.proxy_server import serve

            self._worker.start_thread(serve)
        listed = [(a, b, path.as_json()) for (a, b), path in self.paths.items()]
        started = self._worker.ask("paths", paths=listed, handshake=handshake, hurried=process, realtime=realtime)
        self._priority = str(started["priority"])

    def listen(self, src: str, dst: str, target: Address, *, port: int = 0) -> Address:
        """The address at which `src` reaches the service that `dst` has at `target`."""
        return self._listen(src, dst, target, port)[0]

    def change(self, a: str, b: str, **figures: Any) -> PathSpec:
        """A path takes on other figures from now on: `change("east-0", "west-0", pair_bps=25e6)`."""
        path = dataclasses.replace(path_between(self.paths, a, b), **figures)
        self._worker.ask("change", a=a, b=b, path=path.as_json())
        self.paths[(a, b) if (a, b) in self.paths else (b, a)] = path
        return path

    def cut(
        self, a: str | None = None, b: str | None = None, *, number: int | None = None, refuse: bool = False
    ) -> int:
        """Resets connections: all, those of a pair, one (`number`, or -1 for any); how many. `refuse`: new ones too."""
        return int(self._worker.ask("cut", a=a, b=b, number=number, refuse=refuse)["count"])

    def stall(self, a: str | None = None, b: str | None = None, *, number: int | None = None) -> int:
        """Connections fall silent without an end; of a whole pair, new ones too. `resume` lets them go on."""
        return int(self._worker.ask("stall", a=a, b=b, number=number)["count"])

    def resume(self, a: str | None = None, b: str | None = None) -> int:
        """Undoes `stall` and `refuse`."""
        return int(self._worker.ask("resume", a=a, b=b)["count"])

    @property
    def stats(self) -> ProxyStats:
        raw = self._worker.ask("stats")
        lateness = summarize(raw["bins"], raw["total_ns"], raw["worst_ns"])
        sent = {tuple(name.split(">")): count for name, (count, _) in raw["lanes"].items()}
        return ProxyStats(lateness, sent, raw["connections"], raw["cpu_s"], self._priority)

    @property
    def lateness(self) -> Lateness:
        return self.stats.lateness

    def reset_lateness(self) -> None:
        """Forgets what was late so far: a run is judged by its own pieces."""
        self._worker.ask("reset")

    def certify(self, p99_s: float = P99_LIMIT_S, worst_s: float = WORST_LIMIT_S) -> None:
        """Raises EmulatorLateError if what was measured does not count."""
        self.lateness.certify(p99_s, worst_s)

    def close(self) -> None:
        """Ends every connection and the proxy itself."""
        self._worker.close()

    def __enter__(self) -> ProxyNet:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def retarget(self, listener: int, target: Address) -> None:
        """Callers from now on are connected to another."""
        self._worker.ask("retarget", listener=listener, target=target)

    def _listen(self, src: str, dst: str, target: Address, port: int) -> tuple[Address, int]:
        answer = self._worker.ask("listen", src=src, dst=dst, target=target, port=port)
        host, port = answer["address"]
        return (host, port), int(answer["listener"])
