"""The links of one DP-cell: who competes for what, at which rate, from a job's cluster.

Inside a datacenter every channel has its worker's share of the node's network. Between datacenters:

    alone      each node pair has its own path: a window per round trip (one connection) or its cap (many)
    trunk      where all pairs together would exceed the trunk, they divide it fairly
    sharing    the cell's pipelines take turns with the paths of all C nodes: slices go to the peers over the
               intra-DC network, cross, and are gathered, chunk after chunk

D identical cells run the same timeline at the same moment, so each has exactly 1/D of a trunk. Where more workers
than nodes sit at a boundary, they divide their node's pair cap. Knows bytes and rates, not order.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atlas.cost.arrange import Arrangement, route_between
from atlas.cost.runtimes import RUNTIMES
from atlas.cost.table import FAIR, MAX_NS, PRIVATE, TURNS, LinkCost, Trace
from atlas.cost.tcp import many_bps, stream_bps
from atlas.errors import InfeasibleError
from atlas.ir.dispatch import QUANTUM_NS
from atlas.ir.program import Ints
from atlas.spec.cluster import DataCenter, Route
from atlas.spec.job import Job
from atlas.spec.trace import read_trace


@dataclass
class Links:
    """The link half of `Costs`, being filled. Arrays are [direction, pipeline, boundary]."""

    channel: NDArray[np.int32]
    work_ns: Ints
    before_ns: Ints
    latency_ns: Ints
    costs: list[LinkCost] = field(default_factory=list)

    def add(self, link: LinkCost) -> int:
        self.costs.append(link)
        return len(self.costs) - 1


@dataclass(frozen=True)
class Hop:
    """One boundary in one direction: from one worker of a pipeline to another."""

    direction: int
    boundary: int
    src_rank: int
    dst_rank: int
    src: DataCenter
    dst: DataCenter

    @property
    def arrow(self) -> str:
        return f"{self.boundary}>{self.boundary + 1}" if self.direction == 0 else f"{self.boundary + 1}>{self.boundary}"

    @property
    def ranks(self) -> tuple[int, int]:
        return self.src_rank, self.dst_rank


def build_links(job: Job, arrangement: Arrangement, *, tcp: str, sharing: bool, overlap_servers: int) -> Links:
    """Every channel of one cell on its link."""
    shape = (2, arrangement.num_pipelines, job.num_stages - 1)
    work_ns, before_ns, latency_ns = np.zeros((3, *shape), np.int64)
    links = Links(np.zeros(shape, np.int32), work_ns, before_ns, latency_ns)
    lanes: dict[tuple[str, str], list[Hop]] = {}
    for hop in _hops(job, arrangement):
        if hop.src.name == hop.dst.name:
            _add_lan(job, links, hop, overlap_servers)
        else:
            lanes.setdefault((hop.src.name, hop.dst.name), []).append(hop)
    for (src, dst), hops in lanes.items():
        lane = Lane(job, arrangement.num_pipelines, route_between(job, src, dst), hops, tcp)
        if sharing:
            lane.add_turns(links)
        else:
            lane.add_own_paths(links, overlap_servers)
    return links


def _hops(job: Job, arrangement: Arrangement) -> list[Hop]:
    hops = []
    for direction in range(2):
        for boundary in range(job.num_stages - 1):
            ranks = (boundary % job.pp, (boundary + 1) % job.pp)
            src, dst = ranks if direction == 0 else ranks[::-1]
            dcs = [job.cluster.dc(arrangement.rank_dc[rank]) for rank in (src, dst)]
            hops.append(Hop(direction, boundary, src, dst, *dcs))
    return hops


# ---- inside a datacenter -----------------------------------------------------------------------------------
def worker_bps(job: Job, dc: DataCenter) -> float:
    """A worker's share of its node's network; all of it of several nodes, where its tp group fills them."""
    return float(share_of_node(job.tp, dc.gpus_per_node, dc.node_gbps * 1e9))


def share_of_node(tp: int, gpus_per_node: Any, net_bps: Any) -> Any:
    """Numbers or arrays of them."""
    return net_bps * np.maximum(1, tp // gpus_per_node) / np.maximum(1, gpus_per_node // tp)


def sent_bytes(job: Job) -> int:
    """What a worker sends for one microbatch: the activation, once or from every GPU of its tp group."""
    return job.activation_bytes * (job.tp if RUNTIMES[job.runtime].sends_whole else 1)


def _add_lan(job: Job, links: Links, hop: Hop, servers: int) -> None:
    same_worker = hop.src_rank == hop.dst_rank
    rate_bps = worker_bps(job, hop.src)
    if RUNTIMES[job.runtime].uses_peer_links and hop.src.nodes == 1:
        rate_bps = job.tp * job.cluster.gpu(hop.src.name).peer_gbps * 1e9
    seconds = 0.0 if same_worker else sent_bytes(job) * 8 / rate_bps
    for c in range(links.channel.shape[1]):
        at = (hop.direction, c, hop.boundary)
        links.channel[at] = links.add(LinkCost(f"lan {hop.arrow} p{c}", PRIVATE, servers))
        links.work_ns[at] = to_ns(job, seconds, f"transfer {hop.arrow}")
        links.latency_ns[at] = 0 if same_worker else round(hop.src.net_latency_us * 1000)


# ---- between two datacenters, one way ------------------------------------------------------------------------
@dataclass(frozen=True)
class Lane:
    """All of a cell's traffic from one datacenter to another: the boundaries that share a trunk."""

    job: Job
    num_pipelines: int
    route: Route
    hops: list[Hop]
    tcp: str

    @property
    def rank_pairs(self) -> list[tuple[int, int]]:
        """Boundaries of an interleaved pipeline come back to the same two workers."""
        return list(dict.fromkeys(hop.ranks for hop in self.hops))

    @property
    def trunk_bps(self) -> float:
        """This cell's part of the trunk."""
        return math.inf if self.route.trunk_gbps is None else self.route.trunk_gbps * 1e9 / self.job.cells

    @property
    def net_bps(self) -> float:
        """The slower end's network."""
        return min(worker_bps(self.job, self.hops[0].src), worker_bps(self.job, self.hops[0].dst))

    @property
    def pair_bps(self) -> float:
        """What one worker reaches over its own node's path."""
        src, dst = self.hops[0].src, self.hops[0].dst
        crowd = math.ceil(self.num_pipelines * self.job.cells / min(src.nodes, dst.nodes))
        cap_bps = min(self.route.pair_gbps * 1e9 / crowd, self.net_bps)
        rate = stream_bps if self.tcp == "one" else many_bps
        return rate(self.route.window_bytes, self.route.latency_ms / 1e3, cap_bps)

    def add_own_paths(self, links: Links, servers: int) -> None:
        """No coordination: every pipeline on its own node pair, or all on a trunk that binds."""
        rate_bps = min(self.pair_bps, self.trunk_bps)
        self._time(links, rate_bps, before_s=0.0, after_s=0.0)
        if self.trunk_bps < self.pair_bps * self.num_pipelines * len(self.rank_pairs):
            link = links.add(self._link("trunk", FAIR, capacity=self.trunk_bps / rate_bps))
            for hop in self.hops:
                links.channel[hop.direction, :, hop.boundary] = link
            return
        for ranks in self.rank_pairs:
            hops = [hop for hop in self.hops if hop.ranks == ranks]
            for c in range(self.num_pipelines):
                name = f"{hops[0].arrow} p{c}"
                # Several boundaries over one node pair divide it; one boundary has it for itself.
                kind = self._link(name, FAIR) if len(hops) > 1 else self._link(name, PRIVATE, servers=servers)
                link = links.add(kind)
                for hop in hops:
                    links.channel[hop.direction, c, hop.boundary] = link

    def add_turns(self, links: Links) -> None:
        """The cell takes turns with the capacity of all its nodes."""
        num = self.num_pipelines
        # The sender keeps its own slice: (C - 1)/C of every byte goes over its network, and comes in likewise.
        spread_bps = self.net_bps * num / (num - 1) if num > 1 else self.net_bps
        rate_bps = min(num * self.pair_bps, self.trunk_bps, spread_bps)
        chunk_bytes = min(self.job.activation_bytes, rate_bps * QUANTUM_NS / 1e9 / 8)
        scatter_s, gather_s = (self._spread_s(chunk_bytes, dc) for dc in (self.hops[0].src, self.hops[0].dst))
        self._time(links, rate_bps, before_s=scatter_s, after_s=gather_s)
        if self.trunk_bps < rate_bps * len(self.rank_pairs):
            groups = [self.hops]
        else:
            groups = [[hop for hop in self.hops if hop.ranks == ranks] for ranks in self.rank_pairs]
        for hops in groups:
            link = links.add(self._link(hops[0].arrow, TURNS, quantum_ns=QUANTUM_NS))
            for hop in hops:
                links.channel[hop.direction, :, hop.boundary] = link

    def _spread_s(self, chunk_bytes: float, dc: DataCenter) -> float:
        """One chunk's slices to or from the cell peers."""
        if self.num_pipelines == 1:
            return 0.0
        slices_bytes = chunk_bytes * (self.num_pipelines - 1) / self.num_pipelines
        return slices_bytes * 8 / worker_bps(self.job, dc) + dc.net_latency_us / 1e6

    def _time(self, links: Links, rate_bps: float, *, before_s: float, after_s: float) -> None:
        work_ns = to_ns(self.job, sent_bytes(self.job) * 8 / rate_bps, f"transfer {self.hops[0].arrow}")
        for hop in self.hops:
            at = (hop.direction, slice(None), hop.boundary)
            links.work_ns[at] = work_ns
            links.before_ns[at] = to_ns(self.job, before_s, "scatter")
            links.latency_ns[at] = to_ns(self.job, self.route.latency_ms / 1e3 + after_s, "latency")

    def _link(self, name: str, policy: int, **settings: float) -> LinkCost:
        src, dst = self.hops[0].src.name, self.hops[0].dst.name
        link = LinkCost(f"wan {src}>{dst} {name}", policy, trace=_trace(self.route))
        return replace(link, **settings)  # type: ignore[arg-type]


def _trace(route: Route) -> Trace | None:
    """The engines' form of a link's trace file."""
    if route.trace is None:
        return None
    rows = read_trace(Path(route.trace))
    return Trace(
        tuple(round(row.time_s * 1e9) for row in rows),
        tuple(row.rate for row in rows),
        tuple(round(row.extra_latency_ms * 1e6) for row in rows),
    )


def to_ns(job: Job, seconds: float, what: str) -> int:
    """Whole nanoseconds, at least one for what takes any time; or the error that something takes absurdly long."""
    if not seconds * 1e9 <= MAX_NS:
        raise InfeasibleError(
            where=job.where,
            key=what,
            value=f"{seconds:.3g} s",
            rule=f"one op takes longer than {MAX_NS // 10**9:,} s",
            remedy="Check the units of rates, latencies and sizes",
        )
    return max(1, round(seconds * 1e9)) if seconds > 0 else 0
