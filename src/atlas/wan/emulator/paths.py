"""What lies between two nodes, as an emulator needs it: delay, the window of one connection, the caps of the node
pair and of the trunk. Made by hand, or from a cluster file by `cluster_paths`. Knows no sockets.

Rates are goodput: the bytes an application gets through; headers travel free, in both grades of the emulator.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from itertools import combinations
from typing import TYPE_CHECKING, Any

from atlas.errors import AtlasError

if TYPE_CHECKING:
    from atlas.spec.cluster import Cluster

WINDOW_BYTES = 3_000_000
"""One connection of a stock kernel: about 3 MB over the round trip."""
MAX_NODES = 64
"""More nodes than this on one machine emulate nothing but a queue for its cores."""
LOOKAHEAD_S = 0.001
"""How far ahead of a link the proxy reads. All of it is a queue for what comes next, so it is short."""
STOCK_S = 0.01
"""What the proxy lets a sender have in its receive buffer: so long may it be late and still keep the link busy."""


@dataclass(frozen=True)
class Trunk:
    """What all node pairs of two datacenters share, each way. Paths that name the same trunk share it."""

    name: str
    bps: float


@dataclass(frozen=True)
class PathSpec:
    """The path between two nodes, the same both ways."""

    latency_s: float = 0.0
    """One way."""
    window_bytes: int | None = WINDOW_BYTES
    """Bytes that one connection may have in flight. None: as many as fill the path."""
    pair_bps: float | None = None
    """The most the node pair gets each way, however many connections it opens."""
    trunk: Trunk | None = None
    jitter_s: float = 0.0
    """Extra one-way delay, drawn anew from 0 to this for each piece; nothing overtakes."""
    loss: float = 0.0
    """Share of packets that vanish. Namespace grade only: a proxy has no packets."""
    queue_bytes: int | None = None
    """Drop-tail queue before the pair's link. Namespace grade only. None: one round trip at the rate, >= 1 MB."""

    def __post_init__(self) -> None:
        for name, low, high in (("latency_s", 0.0, 60.0), ("jitter_s", 0.0, 60.0), ("loss", 0.0, 0.999)):
            value = getattr(self, name)
            if not low <= value <= high:
                raise AtlasError(f"path: {name} = {value!r}: must be from {low:g} to {high:g}. Check its unit")
        rates = {"pair_bps": self.pair_bps, "trunk": self.trunk_bps}
        sizes = {"window_bytes": self.window_bytes, "queue_bytes": self.queue_bytes}
        for name, amount in {**rates, **sizes}.items():
            if amount is not None and not 0 < amount < math.inf:
                raise AtlasError(f"path: {name} = {amount!r}: must be positive. Leave it out for no limit")

    @property
    def trunk_bps(self) -> float | None:
        return None if self.trunk is None else self.trunk.bps

    @property
    def rate_bps(self) -> float | None:
        """The most one pair alone can reach."""
        rates = [rate for rate in (self.pair_bps, self.trunk_bps) if rate is not None]
        return min(rates) if rates else None

    @property
    def flight_bytes(self) -> int:
        """The window, or where there is none a bound on what one connection may have in the emulator."""
        if self.window_bytes is not None:
            return self.window_bytes
        rate = self.rate_bps
        need = 16e6 if rate is None else 2 * rate / 8 * (2 * self.latency_s + self.jitter_s + 2 * STOCK_S)
        return max(4_000_000, round(need))

    @property
    def queue(self) -> int:
        if self.queue_bytes is not None:
            return self.queue_bytes
        rate = self.rate_bps
        return 64_000_000 if rate is None else max(1_000_000, round(rate / 8 * 2 * self.latency_s))

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> PathSpec:
        known = {field.name for field in fields(cls)}
        trunk = data.get("trunk")
        return cls(**{k: v for k, v in data.items() if k in known} | {"trunk": Trunk(**trunk) if trunk else None})


Paths = Mapping[tuple[str, str], PathSpec]
"""By node pair; the order of the two names does not matter."""


def path_between(paths: Paths, a: str, b: str) -> PathSpec:
    """The path of two nodes, or the error that names what there is."""
    found = paths.get((a, b)) or paths.get((b, a))
    if found is None:
        raise AtlasError(
            f"no path between {a!r} and {b!r}: there are {', '.join('-'.join(p) for p in paths) or 'none'}"
        )
    return found


def nodes_of(paths: Paths) -> list[str]:
    """Every node that a path names, in order of appearance."""
    return list(dict.fromkeys(name for pair in paths for name in pair))


def cluster_paths(
    cluster: Cluster, *, nodes_per_dc: int | None = None, lan: bool = False, jitter_s: float = 0.0
) -> dict[tuple[str, str], PathSpec]:
    """The paths of a cluster file. Nodes are called after their datacenter: `east-0`, `east-1`.

    With `lan`, nodes of one datacenter have paths too: their latency, no cap (no machine emulates 100 Gbit/s).
    """
    nodes = {dc.name: min(dc.nodes, nodes_per_dc or dc.nodes) for dc in cluster.datacenters}
    if sum(nodes.values()) > MAX_NODES:
        raise AtlasError(
            f"the cluster has {sum(nodes.values())} nodes: at most {MAX_NODES} are emulated. Lower --nodes-per-dc"
        )
    paths: dict[tuple[str, str], PathSpec] = {}
    for a, b in combinations(nodes, 2):
        route = cluster.route(a, b)
        if route is None:
            continue
        path = PathSpec(
            latency_s=route.latency_ms / 1e3,
            window_bytes=route.window_bytes,
            pair_bps=route.pair_gbps * 1e9,
            trunk=Trunk(f"{a}~{b}", route.trunk_gbps * 1e9) if route.trunk_gbps is not None else None,
            jitter_s=jitter_s,
        )
        paths |= {(f"{a}-{i}", f"{b}-{j}"): path for i in range(nodes[a]) for j in range(nodes[b])}
    for dc in cluster.datacenters if lan else ():
        near = PathSpec(latency_s=dc.net_latency_us / 1e6, window_bytes=None)
        paths |= dict.fromkeys(combinations(_names(dc.name, nodes[dc.name]), 2), near)
    return paths


def scaled(paths: Paths, factor: float) -> Paths:
    """The same world, slower: rates and windows times `factor`, so that transfers take the same number of trips."""
    if not 0 < factor <= 1000:
        raise AtlasError(f"scale {factor:g}: must be positive, at most 1000. 0.01 makes 5 Gbit/s 50 Mbit/s")
    return {
        pair: replace(
            path,
            pair_bps=path.pair_bps and path.pair_bps * factor,
            window_bytes=path.window_bytes and max(1, round(path.window_bytes * factor)),
            trunk=path.trunk and replace(path.trunk, bps=path.trunk.bps * factor),
        )
        for pair, path in paths.items()
    }


def _names(dc_name: str, num_nodes: int) -> Iterable[str]:
    return [f"{dc_name}-{i}" for i in range(num_nodes)]
