"""The placements so far: for every lane the requests placed on it, in order, and its Track after each.

The only thing that admission changes. It depends only on the calls made on it: no clock, no randomness.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from atlas.ir.program import Ints
from bubbletea.admit import fit
from bubbletea.admit.aims import Aims, Postponed
from bubbletea.admit.fair import Backlog, TenantShares
from bubbletea.admit.fit import COLUMNS, FREE, NEVER, WorkerArrays
from bubbletea.admit.lanes import kinds, weight_bytes
from bubbletea.admit.prefix_index import PrefixCache
from bubbletea.admit.records import Placement, PrefillLane, PrefillRequest, PrefillSlice
from bubbletea.costs import LEAST_TOKENS, PARTS, PrefillCosts
from bubbletea.windows.bubbles import Forecast
from bubbletea.windows.free_network import Residual, free_network

LEAD_NS = 2_000_000
"""Work that starts within this is on its way to the worker and is not moved."""
CACHE_BLOCKS = 4096
"""Blocks of 512 tokens in a lane's host memory; one is 64 MiB of KV for Llama-3-8B over the whole lane."""


class TokenRange(NamedTuple):
    """A request, or a part of one, to be placed."""

    request: PrefillRequest
    first_token: int
    end_token: int
    cached: int
    """Tokens before the first whose KV the lane's hosts have and must still deliver."""
    chunk: int
    ready_ns: int


@dataclass(frozen=True, slots=True)
class QueueEntry:
    """A request, or a part of one, as placed on a lane."""

    request: PrefillRequest
    first_token: int
    end_token: int
    cached: int
    chunk: int
    ready_ns: int
    floor_ns: int
    """Its earliest start."""
    before: Ints
    """The lane's Track before it."""
    slices: Ints
    computed_ns: int
    delivered_ns: int

    @property
    def start_ns(self) -> int:
        return int(self.slices[0, 1])

    @property
    def wanted(self) -> TokenRange:
        return TokenRange(self.request, self.first_token, self.end_token, self.cached, self.chunk, self.ready_ns)

    def kept(self, now_ns: int) -> int:
        """The first token of the chunks that have not started by `now_ns`."""
        begun = self.slices[self.slices[:, 1] < now_ns]
        if not len(begun):
            return self.first_token
        reached = int(begun[:, 5].max())
        return next(end for end in self.ends if end > reached)

    @property
    def ends(self) -> tuple[int, ...]:
        """Where each of its chunks ends."""
        return (*range(self.first_token + self.chunk, self.end_token, self.chunk), self.end_token)


class AdmissionState:
    """Lanes, their placements, and waiting requests."""

    def __init__(
        self,
        forecast: Forecast,
        costs: PrefillCosts | Mapping[str, PrefillCosts],
        lanes: Sequence[PrefillLane],
        *,
        residual: Residual | None = None,
        chunks: Sequence[int] = (2048,),
        weights: Mapping[str, float] | None = None,
        kept: float = 0.0,
        aims: Aims | None = None,
        shares: TenantShares | None = None,
    ) -> None:
        """`shares`: counters of an earlier state, used instead of `weights`."""
        self.kept = kept
        """The last share of the time to a deadline that is kept for long prompts when lanes are full. Without it, short
        prompts fill the time before every deadline: more requests are served, but fewer tokens."""
        self.aims = aims or Aims()
        self.postponed = Postponed(self.aims)
        self.forecast, self.lanes, self.chunks = forecast, tuple(lanes), tuple(chunks)
        names = set(forecast.pattern.worker_dc)
        self.costs: dict[str, PrefillCosts] = dict(costs) if isinstance(costs, Mapping) else dict.fromkeys(names, costs)
        any_costs = next(iter(self.costs.values()))
        rate = any_costs.nic_bytes_per_s
        self.residual = residual or free_network(forecast.pattern.num_workers, forecast.period_ns, rate)
        self.sizes = [len(lane.workers) for lane in lanes]
        widest = max(self.sizes)
        self.workers = np.full((len(lanes), widest), -1, np.int64)
        """[lane, stage]; -1 where a lane has fewer workers than the widest."""
        self.first_layer = np.zeros((len(lanes), widest + 1), np.int64)
        """[lane, stage]; after the last stage, the number of layers."""
        for lane in lanes:
            size = len(lane.workers)
            self.workers[lane.index, :size] = lane.workers
            self.first_layer[lane.index, : size + 1] = (*lane.first_layer, lane.num_layers)
        self.tracks = np.zeros((len(lanes), 4, widest), np.int64)
        self.queues: list[list[QueueEntry]] = [[] for _ in lanes]
        """By lane: its entries, in order."""
        self.lane_of: dict[str, int] = {}
        """By id of a placed, not completed request."""
        self.active: Counter[str] = Counter()
        """By tenant: the number of those."""
        self._tenant: dict[str, str] = {}
        self.shares = shares or TenantShares(weights)
        self.backlog = Backlog(self.shares)
        self.cache = PrefixCache(len(lanes), CACHE_BLOCKS)
        self.kind = kinds(lanes, forecast.pattern)
        self._heaps: list[list[tuple[int, int]]] = [[] for _ in range(int(self.kind.max()) + 1)]
        for index in range(len(lanes)):
            self._heaps[self.kind[index]].append((0, index))
        self._tails: list[tuple[int, int]] = [(0, index) for index in range(len(lanes))]
        self.leaders = np.array([heap[0][1] for heap in self._heaps], np.int64)
        """By kind of lane: the one that becomes free first."""
        self.arrays = worker_arrays(self)
        self.max_tokens = self._max_tokens()
        self._out = np.empty((4096, COLUMNS), np.int64)

    # ---- placing ------------------------------------------------------------------------------------------------
    def fitted(self, lane: int, wanted: TokenRange, track: Ints, floor_ns: int) -> tuple[QueueEntry | None, Ints]:
        """Places `wanted` after `track` and not before `floor_ns`; returns the Track after it too. None if no window is
        long enough for a layer."""
        after = track.copy()
        tokens = (wanted.first_token, wanted.end_token, wanted.request.prompt_tokens)
        size, times = self.sizes[lane], (wanted.ready_ns, floor_ns)
        where = (self.workers[lane, :size], self.first_layer[lane, : size + 1])
        rows, computed, delivered = fit.place(
            self.arrays, after, *where, tokens, wanted.chunk, times, wanted.cached, self._out
        )
        if computed >= NEVER:
            return None, track
        if rows > len(self._out):
            self._out = np.empty((2 * rows, COLUMNS), np.int64)
            return self.fitted(lane, wanted, track, floor_ns)
        return QueueEntry(*wanted, floor_ns, track, self._out[:rows].copy(), computed, delivered), after

    def track(self, lane: int) -> Ints:
        """The lane's Track after everything placed on it."""
        own: Ints = self.tracks[lane, :, : self.sizes[lane]].copy()
        return own

    def put(self, lane: int, entries: list[QueueEntry], track: Ints) -> None:
        """Replaces the lane's queue and Track."""
        self.queues[lane] = entries
        self.tracks[lane, :, : self.sizes[lane]] = track
        kind, tail = int(self.kind[lane]), int(track[FREE, 0])
        heapq.heappush(self._heaps[kind], (tail, lane))
        heapq.heappush(self._tails, (tail, lane))
        self._settle(self._heaps[kind])
        self.leaders[kind] = self._heaps[kind][0][1]

    def emptiest(self, until_ns: int) -> int | None:
        """The lane whose first worker becomes free first, if that is before `until_ns`."""
        self._settle(self._tails)
        tail, lane = self._tails[0]
        return lane if tail < until_ns else None

    def _settle(self, heap: list[tuple[int, int]]) -> None:
        """Drops outdated entries from the top of a heap; every change has pushed a new entry."""
        while heap[0][0] != self.tracks[heap[0][1], FREE, 0]:
            heapq.heappop(heap)

    def placement(self, request_id: str) -> Placement:
        """All parts of a request as one Placement."""
        lane = self.lane_of[request_id]
        own = [entry for entry in self.queues[lane] if entry.request.id == request_id]
        slices = tuple(PrefillSlice(*row) for entry in own for row in entry.slices.tolist())
        ends, last = tuple(end for entry in own for end in entry.ends), own[-1]
        times = (last.computed_ns, last.delivered_ns)
        return Placement(last.request, self.lanes[lane], own[0].cached, slices, ends, *times)

    def enter(self, request: PrefillRequest, lane: int) -> None:
        self.lane_of[request.id] = lane
        self.active[request.tenant] += 1
        self._tenant[request.id] = request.tenant

    def leave(self, request_id: str) -> None:
        del self.lane_of[request_id]
        tenant = self._tenant.pop(request_id)
        self.active[tenant] -= 1
        if not self.active[tenant]:
            del self.active[tenant]

    def tenants(self) -> set[str]:
        """Tenants with placed or waiting requests."""
        return {*self.active, *self.backlog.tenants(), *self.postponed.tenants()}

    def rebuild(self) -> None:
        """Reads the forecast's current windows."""
        self.arrays = worker_arrays(self)

    def _max_tokens(self) -> int:
        """The longest prompt whose KV some lane has room for."""
        per_token = np.maximum(1, np.diff(self.first_layer, axis=1)) * self.arrays.kv_bytes
        most = np.where(self.workers >= 0, self.arrays.room_bytes[self.workers] // per_token, np.inf)
        return int(most.min(axis=1).max())


def worker_arrays(state: AdmissionState) -> WorkerArrays:
    """Forecast, network and costs as the arrays that `fit` works on."""
    pattern, costs = state.forecast.pattern, state.costs
    start, end = state.forecast.spans()
    length = end - start
    whole = np.concatenate([np.zeros(1, np.int64), np.cumsum(length)])
    per_worker = [costs[dc] for dc in pattern.worker_dc]
    any_costs = per_worker[0]
    room = pattern.memory_bytes.copy()
    for lane in state.lanes:
        for j, w in enumerate(lane.workers):
            first, last = lane.layers(j)
            ends = {"first": j == 0, "last": j == len(lane.workers) - 1}
            room[w] -= weight_bytes(costs[lane.dc], last - first, **ends)
            room[w] -= costs[lane.dc].workspace_bytes(max(state.chunks))
    return WorkerArrays(
        anchor_ns=state.forecast.anchor_ns,
        period_ns=state.forecast.period_ns,
        phase_ns=pattern.phase_ns,
        ptr=pattern.ptr,
        start_ns=start,
        end_ns=end,
        before_ns=whole[:-1] - np.repeat(whole[pattern.ptr[:-1]], np.diff(pattern.ptr)),
        idle_ns=whole[pattern.ptr[1:]] - whole[pattern.ptr[:-1]],
        net_ptr=state.residual.ptr,
        net_at_ns=state.residual.at_ns,
        net_bytes=state.residual.bytes,
        rate=np.array([one.layer.row for one in per_worker]),
        head_ns=np.array([one.head_ns for one in per_worker], np.int64),
        room_bytes=room,
        pcie_bytes_per_ns=any_costs.pcie_bytes_per_s / 1e9,
        kv_bytes=float(any_costs.kv_bytes),
        hop_ns=float(any_costs.hop_latency_ns),
        hop_token_ns=(any_costs.hop_ns(1000) - any_costs.hop_latency_ns) / 1000,
        parts=PARTS,
        least_tokens=LEAST_TOKENS,
    )
