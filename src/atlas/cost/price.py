"""`price`: a job in, `Costs` of one DP-cell out; `layout`: the frame that a schedule fills.

Adds up the parts: pieces per stage (`arrange`), links (`wan`), and here what closes an iteration:
SYNC, NORM and STEP. Knows no schedule: every kind of op is priced, whether or not a Program uses it.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Literal

import numpy as np

from atlas.cost.arrange import Arrangement, arrange, route_between
from atlas.cost.rates import ring_s, worker_bps
from atlas.cost.runtimes import RUNTIMES
from atlas.cost.table import FAIR, PRIVATE, Costs, LinkCost, kind_costs
from atlas.cost.wan import Links, build_links, to_ns
from atlas.errors import SpecError
from atlas.ir.program import Ints, Kind, Layout
from atlas.spec.job import Job

Tcp = Literal["one", "many"]


def layout(job: Job, *, arrangement: Arrangement | None = None) -> Layout:
    """Pipelines, stages and microbatches of one DP-cell, and the datacenter of each worker."""
    arrangement = arrangement or arrange(job)
    return Layout(arrangement.num_pipelines, job.num_stages, job.num_microbatches, arrangement.rank_dc)


def can_share(job: Job, frame: Layout) -> bool:
    """Whether there is a WAN, more than one pipeline to take turns on it, and a runtime that takes turns."""
    return frame.num_pipelines > 1 and len(set(frame.rank_dc)) > 1 and job.runtime == "atlas"


def price(
    job: Job,
    *,
    tcp: Tcp = "many",
    sharing: bool = False,
    overlap_servers: int = 1,
    arrangement: Arrangement | None = None,
) -> Costs:
    """Nanoseconds of every op and transfer of one cell.

    `tcp` is the number of connections between a node pair, `sharing` whether the cell's pipelines take turns on the
    WAN with all their nodes, `overlap_servers` how many sends of a channel may overlap at full rate.
    """
    if sharing and tcp != "many":
        raise SpecError(
            where="--tcp",
            key="tcp",
            value=tcp,
            rule="taking turns on the WAN needs many connections",
            remedy="Use --tcp many, or a schedule that does not share",
        )
    arrangement = arrangement or arrange(job)
    links = build_links(job, arrangement, tcp=tcp, sharing=sharing, overlap_servers=overlap_servers)
    per_stage = np.stack([_stage_ns(job, arrangement, stage) for stage in range(job.num_stages)])
    compute_ns = np.broadcast_to(per_stage, (arrangement.num_pipelines, *per_stage.shape)).copy()
    if RUNTIMES[job.runtime].sender_waits:
        _hold_workers(links, compute_ns, receivers=RUNTIMES[job.runtime].receiver_waits)
    return Costs(compute_ns, tuple(links.costs), links.channel, links.work_ns, links.before_ns, links.latency_ns)


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
    dc = arrangement.stage_dc[0, rank]
    seconds = float(ring_s(arrangement.cluster, job.tp, dc, replicas, gradient_bytes))
    if job.model.tied_embeddings and job.pp > 1 and rank in (0, job.pp - 1):
        seconds += _tied_s(job, arrangement, replicas)
    return seconds


def _tied_s(job: Job, arrangement: Arrangement, replicas: int) -> float:
    """Each replica sends its slice of the matrix to the other end, along the pipeline's path, both ways at once."""
    slice_bits = job.model.vocab * job.model.hidden * job.gradient_bytes * 8 / replicas
    net_bps = worker_bps(arrangement.cluster, job.tp)
    rates = [float(net_bps[dc]) for dc in arrangement.stage_dc[0]]
    for a, b in _wan_hops(arrangement):
        route = route_between(job, a, b)
        rates += [route.pair_gbps * 1e9, (route.trunk_gbps or route.pair_gbps * replicas) * 1e9 / replicas]
    return slice_bits / min(rates) + _path_s(job, arrangement)


def norm_s(job: Job, arrangement: Arrangement) -> float:
    """A scalar to the far end of the pipeline and back."""
    return 2 * _path_s(job, arrangement)


def _path_s(job: Job, arrangement: Arrangement) -> float:
    """One-way latency from the first worker of a pipeline to the last."""
    lan_s = sum(job.cluster.dc(name).net_latency_us / 1e6 for name in arrangement.rank_dc)
    return lan_s + sum(route_between(job, a, b).latency_ms / 1e3 for a, b in _wan_hops(arrangement))


def _wan_hops(arrangement: Arrangement) -> list[tuple[str, str]]:
    return [(a, b) for a, b in pairwise(arrangement.rank_dc) if a != b]
