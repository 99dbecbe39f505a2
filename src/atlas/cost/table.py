"""Costs: what every op and every transfer of one DP-cell costs, as plain arrays. The only thing the engines and
the schedules know of hardware. Written by `cost.price` from a job, or by hand in tests and benchmarks.

Index legend: c pipeline, s stage, k kind, d direction, b boundary (between stages b and b + 1).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from atlas.ir.program import NUM_KINDS, Ints, Kind

MAX_NS = 10**13
"""Longer than this (2.8 hours) no single op may take: sums of many must stay within 64 bits."""

PRIVATE, FAIR, TURNS = 0, 1, 2
"""How a link is shared: one channel's own; at once, each at most at its own cap; one after the other."""


@dataclass(frozen=True)
class Trace:
    """How a link's rate and latency change over time, piecewise constant, from each `at_ns` on."""

    at_ns: tuple[int, ...]
    """Ascending, the first 0."""
    rate: tuple[float, ...]
    """Share of the nominal rate, positive."""
    extra_latency_ns: tuple[int, ...]
    """Added to the nominal latency of transfers that start in this span."""


@dataclass(frozen=True)
class LinkCost:
    """One thing that transfers compete for. A transfer's `work_ns` is its time on an otherwise idle link."""

    name: str
    policy: int
    servers: int = 1
    """PRIVATE: how many sends of the channel may overlap, each at full rate (Varuna's simulator: 4)."""
    capacity: float = 1.0
    """FAIR: how many members run at full rate at once, i.e. trunk cap / pair cap; beyond it all slow down alike."""
    quantum_ns: int = 5_000_000
    """TURNS: the longest chunk, after which a more urgent transfer takes over."""
    trace: Trace | None = None


@dataclass(frozen=True, eq=False)
class Costs:
    """Nanoseconds for one DP-cell."""

    compute_ns: Ints
    """[c, s, k]: SYNC, NORM and STEP included."""
    links: tuple[LinkCost, ...]
    channel_link: NDArray[np.int32]
    """[d, c, b]: the link a channel's transfers compete on."""
    work_ns: Ints
    """[d, c, b]: time a transfer holds its link, alone on it."""
    before_ns: Ints
    """[d, c, b]: from ready until the link may start (scatter of the first chunk to the cell peers)."""
    latency_ns: Ints
    """[d, c, b]: from the last byte sent until the receiver has it (propagation, gather of the last chunk)."""

    @property
    def num_pipelines(self) -> int:
        return int(self.compute_ns.shape[0])

    @property
    def num_stages(self) -> int:
        return int(self.compute_ns.shape[1])

    def scaled(self, factor: int) -> Costs:
        """Every duration times `factor`."""
        links = tuple(
            replace(
                link,
                quantum_ns=link.quantum_ns * factor,
                trace=link.trace
                and Trace(
                    tuple(t * factor for t in link.trace.at_ns),
                    link.trace.rate,
                    tuple(t * factor for t in link.trace.extra_latency_ns),
                ),
            )
            for link in self.links
        )
        return Costs(
            self.compute_ns * factor,
            links,
            self.channel_link,
            self.work_ns * factor,
            self.before_ns * factor,
            self.latency_ns * factor,
        )


def kind_costs(
    *,
    forward_ns: int,
    backward_ns: int | None = None,
    input_ns: int | None = None,
    weight_ns: int | None = None,
    recompute_ns: int = 0,
    sync_ns: int = 0,
    norm_ns: int = 0,
    step_ns: int = 0,
) -> Ints:
    """[k] for one stage. A backward not given is the sum of its halves; halves not given are each half of it."""
    if backward_ns is None:
        backward_ns = (input_ns or 0) + (weight_ns or 0)
    if input_ns is None:
        input_ns = backward_ns // 2
    if weight_ns is None:
        weight_ns = backward_ns - input_ns
    row = np.zeros(NUM_KINDS, np.int64)
    for kind, cost in (
        (Kind.F, forward_ns),
        (Kind.R, recompute_ns),
        (Kind.B, backward_ns),
        (Kind.I, input_ns),
        (Kind.W, weight_ns),
        (Kind.SYNC, sync_ns),
        (Kind.NORM, norm_ns),
        (Kind.STEP, step_ns),
    ):
        row[kind] = cost
    return row


def uniform_costs(
    num_pipelines: int,
    num_stages: int,
    per_kind_ns: Ints,
    *,
    lan_ns: int = 0,
    lan_latency_ns: int = 0,
    wan_boundaries: tuple[int, ...] = (),
    wan_ns: int = 0,
    wan_latency_ns: int = 0,
    sharing: bool = False,
    trunk_pairs: float | None = None,
    quantum_ns: int = 5_000_000,
    servers: int = 1,
) -> Costs:
    """Equal stages; `wan_ns` is what one transfer takes over one node pair's own WAN path.

    With `sharing` the cell's pipelines take turns with the capacity of all their nodes. `trunk_pairs` caps
    the datacenter pair at the bandwidth of that many node pairs, for all traffic.
    """
    shape = (2, num_pipelines, num_stages - 1)
    links: list[LinkCost] = []
    channel = np.zeros(shape, np.int32)
    work, latency = np.full(shape, lan_ns, np.int64), np.full(shape, lan_latency_ns, np.int64)
    for direction in range(2):
        for boundary in range(num_stages - 1):
            arrow = f"{boundary}>{boundary + 1}" if direction == 0 else f"{boundary + 1}>{boundary}"
            if boundary not in wan_boundaries:
                for c in range(num_pipelines):
                    channel[direction, c, boundary] = len(links)
                    links.append(LinkCost(f"lan {arrow} p{c}", PRIVATE, servers))
                continue
            latency[direction, :, boundary] = wan_latency_ns
            pairs = float(num_pipelines) if trunk_pairs is None else min(trunk_pairs, float(num_pipelines))
            if sharing:
                work[direction, :, boundary] = round(wan_ns / pairs)
                channel[direction, :, boundary] = len(links)
                links.append(LinkCost(f"wan {arrow}", TURNS, quantum_ns=quantum_ns))
            elif pairs < num_pipelines:
                work[direction, :, boundary] = wan_ns
                channel[direction, :, boundary] = len(links)
                links.append(LinkCost(f"wan {arrow}", FAIR, capacity=pairs))
            else:
                work[direction, :, boundary] = wan_ns
                for c in range(num_pipelines):
                    channel[direction, c, boundary] = len(links)
                    links.append(LinkCost(f"wan {arrow} p{c}", PRIVATE, servers))
    compute = np.broadcast_to(per_kind_ns, (num_pipelines, num_stages, NUM_KINDS)).copy()
    return Costs(compute, tuple(links), channel, work, np.zeros(shape, np.int64), latency)
