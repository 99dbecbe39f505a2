"""Measures all paths between datacenters through agents: round trips, the goodput of 1, 2, 4, ... streams until more
bring no gain, the same in the other direction, and several node pairs at once. If pairs get together what they get
alone, the cap is that of the pair; if not, that of the trunk. Knows agents' addresses and rates, no files (`links`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

from atlas.errors import AtlasError
from atlas.wan.probe.agent import ask
from atlas.wan.probe.measure import Goodput, RoundTrips
from atlas.wan.probe.packet_series import MAX_ROWS
from atlas.wan.transport.base import Address

STREAMS = (1, 2, 4, 8, 16, 32)
GAIN = 1.05
"""More streams count as a gain if they carry at least this many times as much."""
TOGETHER = 0.9
"""Pairs share a trunk if together they get less than this share of the sum of what they get alone."""
MAX_PAIRS = 4
"""Node pairs that are measured at once."""
LIMITED = 0.9
"""One stream is limited by its window if it gets less than this share of what the best number of streams gets."""
MIN_S, MAX_S, TRIPS = 0.8, 4.0, 25
"""A transfer takes 25 round trips, of which slow start takes about ten; in seconds, at least and at most."""
OVERLAP, START_DELAY_S = 1.3, 0.5
"""Transfers of several pairs take this much longer and start together after a delay, so that they overlap although the
requests are sent one after the other."""

Reach = Callable[[str, str], Address]
"""(source, destination) -> the address at which the source reaches the destination's agent."""


@dataclass(frozen=True)
class LinkMeasurement:
    """What was measured between two datacenters."""

    between: tuple[str, str]
    rtt: RoundTrips
    sweep: tuple[Goodput, ...]
    """By number of streams: one pair alone, from the first datacenter to the second."""
    back: tuple[Goodput, ...]
    """In the other direction: one stream, and as many as filled the path."""
    alone_bps: tuple[float, ...]
    together_bps: tuple[float, ...]
    """By node pair, with the number of streams that fills the path. Empty if there is only one pair."""
    at: float = field(default_factory=time.time)
    """Unix time at the end of the measurement."""

    @property
    def streams(self) -> int:
        """The smallest number that fills the path."""
        return next(g.streams for g in self.sweep if g.bps * GAIN >= self.sweep_bps)

    @property
    def sweep_bps(self) -> float:
        return max(g.bps for g in self.sweep)

    @property
    def there_bps(self) -> float:
        """What one pair gets alone, from the first datacenter to the second."""
        return max(self.sweep_bps, sum(self.alone_bps) / len(self.alone_bps)) if self.alone_bps else self.sweep_bps

    @property
    def back_bps(self) -> float:
        return max(g.bps for g in self.back)

    @property
    def pair_bps(self) -> float:
        """What one pair gets alone, in the slower direction."""
        return min(self.there_bps, self.back_bps)

    @property
    def window_limited(self) -> bool:
        return self.sweep[0].bps < LIMITED * self.sweep_bps

    @property
    def window_bytes(self) -> int:
        """Of one connection, in the slower direction. If one connection fills the path, a lower bound."""
        return max(1, round(min(self.sweep[0].bps, self.back[0].bps) / 8 * self.rtt.min_s))

    @property
    def cap(self) -> str:
        """Which cap binds: "pair", "trunk", or "unknown" if only one pair was measured."""
        if len(self.together_bps) < 2:
            return "unknown"
        return "trunk" if sum(self.together_bps) < TOGETHER * sum(self.alone_bps) else "pair"

    @property
    def trunk_bps(self) -> float | None:
        return sum(self.together_bps) if self.cap == "trunk" else None


@dataclass(frozen=True)
class Survey:
    """Where the agents are, and how long and how much to measure."""

    agents: Mapping[str, Address]
    """By node (`east-0`): the address at which this process reaches its agent."""
    token: str
    reach: Reach | None = None
    """The address at which one node reaches another's agent. None: the same as in `agents`."""
    max_streams: int = 32
    max_bytes: int = 1_000_000_000
    """Per transfer."""
    pings: int = 40
    min_s: float = MIN_S
    """The shortest transfer."""

    def rtt(self, src: str, dst: str) -> RoundTrips:
        found = ask(self.agents[src], self.token, {"do": "rtt", "address": self._at(src, dst), "count": self.pings})
        return RoundTrips(**found)

    def goodput(self, src: str, dst: str, streams: int, seconds: float, wait_s: float = 0.0) -> Goodput:
        request = {
            "do": "goodput",
            "address": self._at(src, dst),
            "streams": streams,
            "seconds": seconds,
            "max_bytes": self.max_bytes,
            "wait_s": wait_s,
        }
        return Goodput(**ask(self.agents[src], self.token, request))

    def packets(self, link: LinkMeasurement, seconds: float) -> dict[str, Any]:
        """Packets of the first node pair of a link, from its first datacenter to the second."""
        src, dst = (self._nodes(dc)[0] for dc in link.between)
        block_bytes = round(link.there_bps / 8 * seconds / MAX_ROWS)
        request = {"do": "packets", "address": self._at(src, dst), "seconds": seconds, "block_bytes": block_bytes}
        return ask(self.agents[src], self.token, request)

    def link(self, a: str, b: str) -> LinkMeasurement:
        """Measures one pair of datacenters."""
        pairs = list(zip(self._nodes(a), self._nodes(b), strict=False))[:MAX_PAIRS]
        rtt = self.rtt(*pairs[0])
        seconds = min(MAX_S, max(self.min_s, TRIPS * rtt.median_s))
        sweep = self._sweep(*pairs[0], seconds)
        best = max(g.bps for g in sweep)
        streams = next(g.streams for g in sweep if g.bps * GAIN >= best)
        back = tuple(self.goodput(pairs[0][1], pairs[0][0], k, seconds) for k in sorted({1, streams}))
        alone: list[float] = []
        together: list[float] = []
        if len(pairs) > 1:
            alone = [self.goodput(*pair, streams, seconds).bps for pair in pairs]
            together = self._together(pairs, streams, seconds)
        return LinkMeasurement((a, b), rtt, sweep, back, tuple(alone), tuple(together))

    def _sweep(self, src: str, dst: str, seconds: float) -> tuple[Goodput, ...]:
        found: list[Goodput] = []
        for streams in (k for k in STREAMS if k <= self.max_streams):
            found.append(self.goodput(src, dst, streams, seconds))
            # Stop after two steps without a gain: one may be noise.
            if len(found) > 2 and max(g.bps for g in found[-2:]) < GAIN * max(g.bps for g in found[:-2]):
                break
        return tuple(found)

    def _together(self, pairs: Sequence[tuple[str, str]], streams: int, seconds: float) -> list[float]:
        with ThreadPoolExecutor(len(pairs)) as pool:
            jobs = [pool.submit(self.goodput, *pair, streams, OVERLAP * seconds, START_DELAY_S) for pair in pairs]
            return [job.result().bps for job in jobs]

    def _nodes(self, dc: str) -> list[str]:
        return [name for name in self.agents if datacenter(name) == dc]

    def _at(self, src: str, dst: str) -> Address:
        return self.reach(src, dst) if self.reach is not None else self.agents[dst]


def survey(how: Survey) -> list[LinkMeasurement]:
    """Measures every pair of datacenters with agents, one after the other."""
    names = list(dict.fromkeys(datacenter(name) for name in how.agents))
    if len(names) < 2:
        raise AtlasError(
            f"agents in {', '.join(names) or 'no datacenter'}: a survey needs two datacenters. Name more nodes"
        )
    return [how.link(a, b) for a, b in combinations(names, 2)]


def datacenter(node: str) -> str:
    """The datacenter in a node's name: `us-east-3` is in us-east."""
    dc, _, number = node.rpartition("-")
    if not dc or not number.isdigit():
        raise AtlasError(f"node {node!r}: the name must be a datacenter and a number, like east-0. Rename it")
    return dc
