"""What lies between two nodes, as an emulator needs it: delay, the window of one connection, the caps of the node pair
and of the trunk. Knows no sockets and no cluster files.

Rates are goodput, the bytes that an application gets through: headers cost nothing in both grades of the emulator.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from atlas.errors import AtlasError
from atlas.weather.path_model import MAX_RIVALS
from atlas.weather.tcp_window import WINDOW_BYTES

MIN_QUEUE_BYTES, UNCAPPED_QUEUE_BYTES = 1_000_000, 64_000_000
"""Queue of a short or slow path at least, and of a path without a cap."""
MIN_WINDOW_BYTES, UNCAPPED_WINDOW_BYTES = 4_000_000, 16_000_000
"""The same for what one connection may have in the proxy when its path sets no window."""
MAX_NODES = 64
"""With more nodes on one machine, the nodes would wait for its cores instead of for the paths."""


@dataclass(frozen=True)
class Trunk:
    """A cap that all node pairs of two datacenters share, in each direction. Paths with the same name share it."""

    name: str
    bps: float


@dataclass(frozen=True)
class PathSpec:
    """The path between two nodes, the same in both directions."""

    latency_s: float = 0.0
    """One way."""
    window_bytes: int | None = WINDOW_BYTES
    """Bytes that one connection may have in flight. None: as many as fill the path."""
    pair_bps: float | None = None
    """The most that the node pair gets in each direction, with any number of connections."""
    trunk: Trunk | None = None
    jitter_s: float = 0.0
    """Extra one-way delay, drawn from 0 to this for each piece. The order is kept."""
    loss: float = 0.0
    """Share of packets that are lost. Namespace grade only: a proxy has no packets."""
    queue_bytes: int | None = None
    """Drop-tail queue before the pair's link, or before the trunk of a pair without a rate. None: one round trip at the
    rate, >= 1 MB. A proxy has no queue: if this is given, it bounds the delay where cross traffic exceeds the rate."""
    cross: tuple[float, ...] = ()
    """Cross traffic from the first node to the second: the share of the pair's and the trunk's rate it takes, by tenths
    of a second from the start, again and again."""
    cross_back: tuple[float, ...] = ()
    """The same in the other direction."""
    rivals: int = 0
    """Competing TCP flows from the first node to the second, from the start on: they share the queue with the pair's
    packets and react to them. Namespace grade only: a proxy has no queue."""
    rivals_back: int = 0
    """The same in the other direction."""

    def __post_init__(self) -> None:
        for name, low, high in (("latency_s", 0.0, 60.0), ("jitter_s", 0.0, 60.0), ("loss", 0.0, 0.999)):
            value = getattr(self, name)
            if not low <= value <= high:
                raise AtlasError(f"path: {name} = {value!r}: must be from {low:g} to {high:g}. Check its unit")
        num_rivals = max(self.rivals, self.rivals_back)
        if (self.cross or self.cross_back or num_rivals) and self.pair_bps is None:
            raise AtlasError("path: cross traffic needs pair_bps, of which it takes a share. Give it")
        if not 0 <= min(self.rivals, self.rivals_back) <= num_rivals <= MAX_RIVALS:
            raise AtlasError(
                f"path: {num_rivals} competing flows: rivals must be 0 to {MAX_RIVALS}. Use `cross` for more"
            )
        if wrong := [share for share in (*self.cross, *self.cross_back) if not 0 <= share <= 100]:
            raise AtlasError(f"path: cross traffic {wrong[0]!r}: must be from 0 to 100 times pair_bps. Check its unit")
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
        """The most that one pair alone can reach."""
        return min((rate for rate in (self.pair_bps, self.trunk_bps) if rate is not None), default=None)

    @property
    def queue(self) -> int:
        if self.queue_bytes is not None:
            return self.queue_bytes
        rate = self.rate_bps
        return UNCAPPED_QUEUE_BYTES if rate is None else round_trip_bytes(rate, self.latency_s)

    def unlimited_window_bytes(self, buffered_s: float) -> int:
        """Bounds one connection of a path without a window: twice what fills the path and the proxy's buffers."""
        rate = self.rate_bps
        need = UNCAPPED_WINDOW_BYTES if rate is None else rate / 4 * (2 * self.latency_s + self.jitter_s + buffered_s)
        return max(MIN_WINDOW_BYTES, round(need))

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> PathSpec:
        trunk = Trunk(**data["trunk"]) if data["trunk"] else None
        return cls(**data | {"trunk": trunk, "cross": tuple(data["cross"]), "cross_back": tuple(data["cross_back"])})


Paths = Mapping[tuple[str, str], PathSpec]
"""By node pair. The order of the two names does not matter."""


def round_trip_bytes(bps: float, latency_s: float) -> int:
    """What fills a link for one round trip, at least `MIN_QUEUE_BYTES`."""
    return max(MIN_QUEUE_BYTES, round(bps / 8 * 2 * latency_s))


def path_between(paths: Paths, a: str, b: str) -> PathSpec:
    """The path between two nodes. If they have no path, the error lists the nodes that have paths."""
    found = paths.get((a, b)) or paths.get((b, a))
    if found is None:
        nodes = ", ".join(sorted({node for pair in paths for node in pair})) or "none"
        raise AtlasError(f"no path between {a!r} and {b!r}: nodes with paths are {nodes}. Name two that a link joins")
    return found


def nodes_of(paths: Paths) -> list[str]:
    """Every node that a path names, in order of appearance."""
    return list(dict.fromkeys(name for pair in paths for name in pair))


def scaled(paths: Paths, factor: float) -> Paths:
    """The same paths with rates and windows times `factor`, so that transfers take as many round trips as before."""
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
