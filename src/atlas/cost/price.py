"""`price` computes the `Costs` of one DP-cell of a job; `layout_of` has the pipelines, stages and microbatches that a
schedule fills.

Adds up the pieces per stage (`arrange`), the links of the cell at the rates of `cluster_arrays`, and what ends an
iteration: SYNC, NORM and STEP. Knows no schedule: every kind of op is priced, whether or not a Program uses it.

Inside a datacenter every channel has its worker's share of the node's network. Between datacenters:

    alone      each node pair has its own path: a window per round trip (one connection) or its cap (many)
    trunk      where all pairs together would exceed the trunk, they divide it fairly
    sharing    the cell's pipelines take turns with the paths of all C nodes: slices go to the peers over the
               intra-DC network, cross, and are gathered, chunk after chunk
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from atlas.cost.arrange import Arrangement, arrange, route_between
from atlas.cost.circuits import scatter_change_s, switches_circuits
from atlas.cost.cluster_arrays import WanRate, lan_bps, ring_s, through_s, tied_s, wan_rate
from atlas.cost.runtimes import RUNTIMES
from atlas.cost.table import FAIR, MAX_NS, PRIVATE, TURNS, Circuits, Costs, LinkCost, Trace, kind_costs
from atlas.cost.weather import link_weather, mean_trace
from atlas.errors import InfeasibleError, SpecError
from atlas.ir.program import QUANTUM_NS, Ints, Kind, Layout
from atlas.spec.fabric import Fabric
from atlas.spec.job import DataCenter, Job, Route
from atlas.spec.trace import read_trace

Tcp = Literal["one", "many"]


def layout_of(job: Job, *, arrangement: Arrangement | None = None) -> Layout:
    """Pipelines, stages and microbatches of one DP-cell, and the datacenter of each worker."""
    arrangement = arrangement or arrange(job)
    return Layout(arrangement.num_pipelines, job.num_stages, job.num_microbatches, arrangement.rank_dc)


def can_share(job: Job, layout: Layout) -> bool:
    """Whether there is a WAN, more than one pipeline to take turns on it, and a runtime that takes turns."""
    return layout.num_pipelines > 1 and len(set(layout.rank_dc)) > 1 and job.runtime == "atlas"


def price(
    job: Job,
    *,
    tcp: Tcp = "many",
    sharing: bool = False,
    arrangement: Arrangement | None = None,
) -> Costs:
    """Nanoseconds of every op and transfer of one cell.

    `tcp` is the number of connections between a node pair, `sharing` whether the cell's pipelines take turns on the
    WAN with all their nodes.
    """
    if sharing and tcp != "many":
        raise SpecError(
            where="--tcp",
            key="tcp",
            value=tcp,
            rule="taking turns on the WAN needs many connections",
            remedy="Use --tcp many, or a schedule that does not take turns",
        )
    arrangement = arrangement or arrange(job)
    links = build_links(job, arrangement, tcp=tcp, sharing=sharing)
    per_stage = np.stack([_stage_ns(job, arrangement, stage) for stage in range(job.num_stages)])
    compute_ns = np.broadcast_to(per_stage, (arrangement.num_pipelines, *per_stage.shape)).copy()
    if RUNTIMES[job.runtime].sender_waits:
        _hold_workers(links, compute_ns, receivers=RUNTIMES[job.runtime].receiver_waits)
    found = circuits(job, arrangement)
    return Costs(compute_ns, tuple(links.costs), links.channel, links.work_ns, links.before_ns, links.latency_ns, found)


def circuits(job: Job, arrangement: Arrangement) -> Circuits | None:
    """The photonic rails of a cell; None where no datacenter changes circuits."""
    dcs = [job.cluster.dc(name) for name in arrangement.rank_dc]
    if all(dc.fabric is None for dc in dcs):
        return None
    replicas, rank_dc = arrangement.num_pipelines * job.cells, arrangement.rank_dc
    switches = tuple(bool(switches_circuits(dc, job.tp, replicas, rank_dc.count(dc.name))) for dc in dcs)
    if not any(switches):
        return None
    fabrics = [dc.fabric or Fabric() for dc in dcs]
    return Circuits(
        switches,
        tuple(round(fabric.reconfigure_ms * 1e6) for fabric in fabrics),
        tuple(fabric.provision for fabric in fabrics),
        until_step=job.zero > 0,
    )


def _hold_workers(links: Links, compute_ns: Ints, *, receivers: bool) -> None:
    """Transfers become part of the ops before them, and with `receivers` of those behind them too: the worker computes
    nothing meanwhile. Only latency is left on the links."""
    channels = np.bincount(links.channel.reshape(-1), minlength=len(links.costs))
    crowd = [
        max(1.0, count / link.capacity) if link.policy == FAIR else 1.0
        for count, link in zip(channels.tolist(), links.costs, strict=True)
    ]
    held_ns = np.rint(links.work_ns * np.array([*crowd, 1.0])[links.channel]).astype(np.int64) + links.before_ns
    forward_ns, backward_ns = held_ns[..., None]
    compute_ns[:, :-1, [Kind.F]] += forward_ns
    compute_ns[:, 1:, [Kind.B, Kind.I]] += backward_ns
    if receivers:
        compute_ns[:, 1:, [Kind.F]] += forward_ns
        compute_ns[:, :-1, [Kind.B, Kind.I]] += backward_ns
    links.work_ns[:] = 0
    links.before_ns[:] = 0
    arrows = [(f"{b}>{b + 1}", f"{b + 1}>{b}") for b in range(held_ns.shape[2])]
    kinds = [link.name.split()[0] for link in links.costs]
    links.costs = [
        LinkCost(f"{kinds[links.channel[d, c, b]]} {arrows[b][d]} p{c}", PRIVATE)
        for d, c, b in np.ndindex(held_ns.shape)
    ]
    links.channel[:] = np.arange(held_ns.size, dtype=np.int32).reshape(held_ns.shape)


def _stage_ns(job: Job, arrangement: Arrangement, stage: int) -> Ints:
    """[k] of one stage. What closes an iteration belongs to the worker and is charged to its first stage."""
    time = arrangement.stage_times[stage]
    own = range(stage, job.num_stages, job.pp) if stage < job.pp else range(0)
    return kind_costs(
        forward_ns=to_ns(job, time.forward_s, "forward"),
        recompute_ns=to_ns(job, time.recompute_s, "recompute"),
        backward_ns=to_ns(job, time.input_s, "backward") + to_ns(job, time.weight_s, "backward"),
        input_ns=to_ns(job, time.input_s, "backward"),
        weight_ns=to_ns(job, time.weight_s, "backward"),
        sync_ns=to_ns(job, sync_s(job, arrangement, stage), "gradient all-reduce") if own else 0,
        norm_ns=to_ns(job, norm_s(job, arrangement), "gradient norm") if own else 0,
        step_ns=to_ns(job, sum(arrangement.stage_times[s].update_s for s in own), "optimizer step"),
    )


def sync_s(job: Job, arrangement: Arrangement, rank: int) -> float:
    """Ring all-reduce of a worker's gradients over its C x D replicas in the datacenter; the two ends of a model
    with tied embeddings also exchange that matrix's gradient over the WAN."""
    gradient_bytes = int(arrangement.stage_params[rank :: job.pp].sum()) * job.gradient_bytes
    replicas = arrangement.num_pipelines * job.cells
    ranks = arrangement.stage_dc[0, : job.pp]
    seconds = float(ring_s(arrangement.cluster, job.tp, ranks, replicas, gradient_bytes)[rank])
    if job.tied_bytes and job.pp > 1 and rank in (0, job.pp - 1):
        seconds += float(tied_s(arrangement.cluster, job.tp, ranks[None], np.array([replicas]), job.tied_bytes)[0])
    return seconds


def norm_s(job: Job, arrangement: Arrangement) -> float:
    """A scalar to the far end of the pipeline and back."""
    return 2 * float(through_s(arrangement.cluster, arrangement.stage_dc[:, : job.pp])[0])


# ---- links ---------------------------------------------------------------------------------------------------------
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


def build_links(job: Job, arrangement: Arrangement, *, tcp: str, sharing: bool) -> Links:
    """Every channel of one cell on its link."""
    shape = (2, arrangement.num_pipelines, job.num_stages - 1)
    work_ns, before_ns, latency_ns = np.zeros((3, *shape), np.int64)
    links = Links(np.zeros(shape, np.int32), work_ns, before_ns, latency_ns)
    pairs: dict[tuple[str, str], list[Hop]] = {}
    for hop in _hops(job, arrangement):
        if hop.src.name == hop.dst.name:
            _add_lan(job, arrangement, links, hop)
        else:
            pairs.setdefault((hop.src.name, hop.dst.name), []).append(hop)
    for (src, dst), hops in pairs.items():
        traffic = WanTraffic(job, arrangement, route_between(job, src, dst), hops, tcp)
        if sharing:
            traffic.add_turns(links)
        else:
            traffic.add_own_paths(links)
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
def sent_bytes(job: Job) -> int:
    """What a worker sends for one microbatch: the activation, once or from every GPU of its tp group."""
    return job.activation_bytes * (job.tp if RUNTIMES[job.runtime].sends_whole else 1)


def _add_lan(job: Job, arrangement: Arrangement, links: Links, hop: Hop) -> None:
    same_worker = hop.src_rank == hop.dst_rank
    workers = arrangement.rank_dc.count(hop.src.name) * arrangement.num_pipelines * job.cells
    rate_bps = float(lan_bps(arrangement.cluster, job.tp, arrangement.cluster.index[hop.src.name], workers))
    seconds = 0.0 if same_worker else sent_bytes(job) * 8 / rate_bps
    for c in range(links.channel.shape[1]):
        at = (hop.direction, c, hop.boundary)
        links.channel[at] = links.add(LinkCost(f"lan {hop.arrow} p{c}", PRIVATE))
        links.work_ns[at] = to_ns(job, seconds, f"transfer {hop.arrow}")
        links.latency_ns[at] = 0 if same_worker else round(hop.src.net_latency_us * 1000)


# ---- between two datacenters, one way ------------------------------------------------------------------------
@dataclass(frozen=True)
class WanTraffic:
    """All of a cell's traffic from one datacenter to another: the boundaries that share a trunk."""

    job: Job
    arrangement: Arrangement
    route: Route
    hops: list[Hop]
    tcp: str

    @property
    def num_pipelines(self) -> int:
        return self.arrangement.num_pipelines

    @property
    def rank_pairs(self) -> list[tuple[int, int]]:
        """Boundaries of an interleaved pipeline come back to the same two workers."""
        return list(dict.fromkeys(hop.ranks for hop in self.hops))

    def rate(self, turns: int, trunk_parts: int = 1) -> WanRate:
        """By the one rule of `cluster_arrays`, as plain numbers; on one of equal parts of a cell's trunk."""
        cluster, job, ranks = self.arrangement.cluster, self.job, self.arrangement.rank_dc
        src, dst = self.hops[0].src.name, self.hops[0].dst.name
        found = wan_rate(
            cluster,
            job.tp,
            cluster.index[src],
            cluster.index[dst],
            sent_bytes(job) * 8,
            replicas=self.num_pipelines * job.cells,
            stages=(ranks.count(src), ranks.count(dst)),
            cells=job.cells * trunk_parts,
            turns=turns,
            tcp=self.tcp,
        )
        return WanRate._make(map(float, found))

    def add_own_paths(self, links: Links) -> None:
        """No coordination: every pipeline on its own node pair, or all on a trunk that binds."""
        rate = self.rate(turns=1)
        self._time(links, rate)
        if rate.trunk_bps < rate.pair_bps * self.num_pipelines * len(self.rank_pairs):
            link = links.add(self._link("trunk", FAIR, capacity=rate.trunk_bps / rate.rate_bps))
            for hop in self.hops:
                links.channel[hop.direction, :, hop.boundary] = link
            return
        for ranks in self.rank_pairs:
            hops = [hop for hop in self.hops if hop.ranks == ranks]
            for c in range(self.num_pipelines):
                name = f"{hops[0].arrow} p{c}"
                # Several boundaries over one node pair divide it; one boundary has it for itself.
                link = links.add(self._link(name, FAIR if len(hops) > 1 else PRIVATE))
                for hop in hops:
                    links.channel[hop.direction, c, hop.boundary] = link

    def add_turns(self, links: Links) -> None:
        """The cell takes turns with the capacity of all its nodes. Boundaries between other workers have other nodes:
        they divide the trunk, or take turns on it if one of them alone can fill it."""
        rate = self.rate(turns=self.num_pipelines)
        groups = [self.hops]
        if rate.rate_bps < rate.trunk_bps:
            groups = [[hop for hop in self.hops if hop.ranks == ranks] for ranks in self.rank_pairs]
            rate = self.rate(turns=self.num_pipelines, trunk_parts=len(groups))
        self._time(links, rate, *(self._change_s(self.hops[0], end) for end in (0, 1)))
        for hops in groups:
            link = links.add(self._link(hops[0].arrow, TURNS, quantum_ns=QUANTUM_NS))
            for hop in hops:
                links.channel[hop.direction, :, hop.boundary] = link

    def _change_s(self, hop: Hop, end: int) -> float:
        """Seconds to change circuits at one end of a hop, before slices go around a ring."""
        dc, ranks = (hop.src, hop.dst)[end], self.arrangement.rank_dc
        if dc.fabric is None:
            return 0.0
        neighbours = [r for r in (hop.ranks[end] - 1, hop.ranks[end] + 1) if 0 <= r < len(ranks)]
        has_hops = any(ranks[r] == dc.name for r in neighbours)
        replicas = self.num_pipelines * self.job.cells
        return float(scatter_change_s(dc, self.job.tp, replicas, ranks.count(dc.name), has_hops=has_hops))

    def _time(self, links: Links, rate: WanRate, *change_s: float) -> None:
        away_s = 2 * max(change_s, default=0.0) / self.num_pipelines  # once to the ring and back in a round of turns
        wire_s = sent_bytes(self.job) * 8 / rate.rate_bps
        work_ns = to_ns(self.job, wire_s + away_s, f"transfer {self.hops[0].arrow}")
        before_ns = to_ns(self.job, rate.before_s + sum(change_s[:1]), "scatter")
        latency_ns = to_ns(self.job, self.route.latency_ms / 1e3 + rate.after_s + sum(change_s[1:]), "latency")
        for hop in self.hops:
            at = (hop.direction, slice(None), hop.boundary)
            links.work_ns[at], links.before_ns[at], links.latency_ns[at] = work_ns, before_ns, latency_ns

    def _link(self, name: str, policy: int, **settings: float) -> LinkCost:
        src, dst = self.hops[0].src.name, self.hops[0].dst.name
        weather = None if self.route.model is None else link_weather(self.route, src, dst)
        trace = trace_of(self.route) if weather is None else mean_trace(weather)
        link = LinkCost(f"wan {src}>{dst} {name}", policy, trace=trace, weather=weather)
        return replace(link, **settings)  # type: ignore[arg-type]


def trace_of(route: Route) -> Trace | None:
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
