"""Costs: what every op and every transfer of one DP-cell costs, as plain arrays; and a lower bound on the iteration
time under them. The only thing the engines and the schedules know of hardware. Written by `cost.price` from a job, or
by hand in tests and benchmarks.

Index legend: c pipeline, s stage, k kind, d direction, b boundary (between stages b and b + 1).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from atlas.ir.program import BACKWARD, FORWARD, NUM_KINDS, QUANTUM_NS, Ints, Kind, Memory

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
class LinkWeather:
    """Where a link's weather comes from (`cost.weather`)."""

    path: str
    """The direction, such as `east>west`: links of one direction have one weather."""
    model: str
    """The file of the path's model."""
    cross_traffic: float = 1.0
    """Factor on the model's cross traffic."""
    slower: int = 1
    """Factor on its durations."""


@dataclass(frozen=True)
class LinkCost:
    """One thing that transfers compete for. A transfer's `work_ns` is its time on an otherwise idle link."""

    name: str
    policy: int
    servers: int = 1
    """PRIVATE: how many sends of the channel may overlap, each at full rate (Varuna's simulator: 4)."""
    capacity: float = 1.0
    """FAIR: how many members run at full rate at once, i.e. trunk cap / pair cap; beyond it all slow down alike."""
    quantum_ns: int = QUANTUM_NS
    """TURNS: the longest chunk, after which a more urgent transfer takes over."""
    trace: Trace | None = None
    weather: LinkWeather | None = None
    """What draws replace the trace by."""


@dataclass(frozen=True)
class Circuits:
    """Photonic rails: which workers have too few circuits for pipeline hops and gradient rings at once, and change
    between the two. By rank of a pipeline; a rank whose `switches` is false keeps all its circuits."""

    switches: tuple[bool, ...]
    delay_ns: tuple[int, ...]
    """From asking for other circuits until they carry data."""
    provision: tuple[bool, ...]
    """Ask when the last transfer on the old circuits has arrived; if not, when the new ones are needed."""
    until_step: bool = False
    """ZeRO-1: STEP exchanges weights over the ring, so hops come after it."""


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
    circuits: Circuits | None = None
    """None where no circuits are changed."""

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
                weather=link.weather and replace(link.weather, slower=link.weather.slower * factor),
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
            self.circuits
            and replace(self.circuits, delay_ns=tuple(delay * factor for delay in self.circuits.delay_ns)),
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
    kinds = forward_ns, recompute_ns, backward_ns, input_ns, weight_ns, sync_ns, norm_ns, step_ns
    return np.array([*kinds, *[0] * (NUM_KINDS - len(kinds))], np.int64)


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
    quantum_ns: int = QUANTUM_NS,
) -> Costs:
    """Equal stages; `wan_ns` is what one transfer takes over one node pair's own WAN path.

    With `sharing` the cell's pipelines take turns with the capacity of all their nodes.
    """
    shape = (2, num_pipelines, num_stages - 1)
    links: list[LinkCost] = []
    channel = np.zeros(shape, np.int32)
    work, latency = np.full(shape, lan_ns, np.int64), np.full(shape, lan_latency_ns, np.int64)
    work[:, :, list(wan_boundaries)] = round(wan_ns / num_pipelines) if sharing else wan_ns
    latency[:, :, list(wan_boundaries)] = wan_latency_ns
    for direction, boundary in np.ndindex(2, num_stages - 1):
        ends = (boundary, boundary + 1) if direction == FORWARD else (boundary + 1, boundary)
        name = f"{'wan' if boundary in wan_boundaries else 'lan'} {ends[0]}>{ends[1]}"
        if sharing and boundary in wan_boundaries:
            channel[direction, :, boundary] = len(links)
            links.append(LinkCost(name, TURNS, quantum_ns=quantum_ns))
        else:
            channel[direction, :, boundary] = len(links) + np.arange(num_pipelines)
            links += [LinkCost(f"{name} p{c}", PRIVATE) for c in range(num_pipelines)]
    compute = np.broadcast_to(per_kind_ns, (num_pipelines, num_stages, NUM_KINDS)).copy()
    return Costs(compute, tuple(links), channel, work, np.zeros(shape, np.int64), latency)


# ---- the lower bound -----------------------------------------------------------------------------------------------
# No order of the ops and no order on the links can be faster, so a schedule's time can be compared with what is left to
# gain. Each argument below can be checked by hand; the bound is the largest of them. They grant the schedule every
# freedom that a real one may lack: a split or a whole backward, whichever is shorter, and transfers alone on a link.
@dataclass(frozen=True)
class Bound:
    """The bound and the argument that gave it."""

    ns: int
    reason: str


@dataclass(frozen=True)
class _Pipeline:
    """One pipeline's shortest times, each a list over its stages."""

    forward: list[int]
    recompute: list[int]
    gradient: list[int]
    """Shortest op that yields the input gradient."""
    backward: list[int]
    """Shortest whole backward."""
    there: list[int]
    """[b] shortest transfer forward."""
    back: list[int]
    """[b] shortest transfer backward."""
    closing: list[int]

    @cached_property
    def head(self) -> list[int]:
        """Earliest start of anything on a stage."""
        head = [0]
        for forward, there in zip(self.forward, self.there, strict=False):
            head.append(head[-1] + forward + there)
        return head

    @cached_property
    def away(self) -> list[int]:
        """From the end of a stage's forward until its backward can start."""
        away = [0] * len(self.forward)
        for s in reversed(range(len(away) - 1)):
            loop = self.there[s] + self.forward[s + 1] + away[s + 1] + self.gradient[s + 1] + self.back[s]
            away[s] = max(loop, self.recompute[s])
        return away

    @cached_property
    def home(self) -> list[int]:
        """From the start of a stage's backward until stage 0 has finished that microbatch."""
        home = [self.backward[0] + self.closing[0]]
        for s in range(1, len(self.forward)):
            home.append(max(self.gradient[s] + self.back[s - 1] + home[s - 1], self.backward[s] + self.closing[s]))
        return home


def lower_bound(
    costs: Costs, num_microbatches: int, memory: Memory | None, *, recompute: bool, closing: bool = False
) -> Bound:
    """The bound for `num_microbatches` per pipeline, with SYNC and STEP at the end when `closing`."""
    pipelines = [_shortest(costs, c, recompute, closing) for c in range(costs.num_pipelines)]
    in_flight = num_microbatches
    if memory is not None and memory.acquire[Kind.F]:
        in_flight = max(1, min(num_microbatches, memory.cap // memory.acquire[Kind.F]))
    early = memory is not None and memory.release[Kind.I] > 0
    bounds = [b for p in pipelines for b in _worker_bounds(p, num_microbatches, in_flight, early)]
    bounds += _link_bounds(costs, pipelines, num_microbatches)
    return max(bounds, key=lambda bound: bound.ns)


def _shortest(costs: Costs, c: int, recompute: bool, closing: bool) -> _Pipeline:
    ns = costs.compute_ns[c]
    whole = np.minimum(ns[:, Kind.B], ns[:, Kind.I] + ns[:, Kind.W])
    again = ns[:, Kind.R] * recompute
    again[-1] = 0  # the last stage may go straight on to its backward
    transfers = [
        [_fastest_transfer(costs, direction, c, b) for b in range(costs.num_stages - 1)] for direction in (0, 1)
    ]
    return _Pipeline(
        forward=ns[:, Kind.F].tolist(),
        recompute=again.tolist(),
        gradient=np.minimum(ns[:, Kind.I], whole).tolist(),
        backward=whole.tolist(),
        there=transfers[FORWARD],
        back=transfers[BACKWARD],
        closing=((ns[:, Kind.SYNC] + ns[:, Kind.STEP]) * closing).tolist(),
    )


def _fastest_transfer(costs: Costs, direction: int, c: int, b: int) -> int:
    link = costs.links[int(costs.channel_link[direction, c, b])]
    ends = int(costs.before_ns[direction, c, b] + costs.latency_ns[direction, c, b])
    extra = min(link.trace.extra_latency_ns) if link.trace else 0
    return ends + extra + int(int(costs.work_ns[direction, c, b]) / _top_speed(link, alone=True))


def _top_speed(link: LinkCost, *, alone: bool) -> float:
    """How much work a link can do in a unit of time at best; `alone`, on a single transfer."""
    rate = max(link.trace.rate) if link.trace else 1.0
    if link.policy == FAIR:
        return rate * (min(1.0, link.capacity) if alone else link.capacity)
    return rate * (1 if alone else link.servers)


def _worker_bounds(p: _Pipeline, num_mb: int, in_flight: int, early_release: bool) -> list[Bound]:
    head, away, home = p.head, p.away, p.home
    bounds = []
    for s in range(len(p.forward)):
        forward, again, backward = p.forward[s], p.recompute[s], p.backward[s]
        work = num_mb * (forward + again + backward)
        until_gradient = num_mb * (forward + again + p.gradient[s]) - p.gradient[s]
        # Before the first gradient can be there, only forwards and recomputes of what fits in memory get done.
        first = head[s] + forward + away[s]
        rest = work - in_flight * (forward + again)
        # At the last forward all but `in_flight` microbatches are finished; the last one then still travels.
        freeing = p.gradient[s] if early_release else backward
        last = head[s] + num_mb * forward + (num_mb - in_flight) * (again + freeing)
        # Each microbatch is held for so long, and only `in_flight` at once.
        stay = forward + away[s] + freeing
        bounds += [
            Bound(head[s] + work + p.closing[s], f"stage {s} computes without a pause"),
            Bound(head[s] + until_gradient + home[s], f"stage {s} computes, then its last gradient returns to stage 0"),
            Bound(first + rest + p.closing[s], f"stage {s} waits for its first gradient"),
            Bound(last + away[s] + home[s], f"the last microbatch goes from stage {s} to the last stage and back"),
            Bound(
                head[s] + -(-num_mb * stay // in_flight) + p.closing[s],
                f"stage {s} holds {in_flight} microbatches at most, each for a round trip",
            ),
        ]
    return bounds


def _link_bounds(costs: Costs, pipelines: list[_Pipeline], num_mb: int) -> list[Bound]:
    """A link works without a pause from the first transfer to the last, and something comes before and after."""
    bounds = []
    for index, link in enumerate(costs.links):
        members = np.argwhere(costs.channel_link == index)
        if not len(members):
            continue
        work = sum(int(costs.work_ns[d, c, b]) for d, c, b in members) * num_mb
        before, after = [], []
        for d, c, b in members.tolist():
            p = pipelines[c]
            head, away, home = p.head, p.away, p.home
            if d == FORWARD:
                before.append(head[b] + p.forward[b])
                after.append(p.forward[b + 1] + away[b + 1] + home[b + 1])
            else:
                before.append(head[b + 1] + p.forward[b + 1] + away[b + 1] + p.gradient[b + 1])
                after.append(home[b])
            before[-1] += int(costs.before_ns[d, c, b])
            after[-1] += int(costs.latency_ns[d, c, b])
        ns = min(before) + int(work / _top_speed(link, alone=False)) + min(after)
        bounds.append(Bound(ns, f"link {link.name} carries everything without a pause"))
    return bounds
