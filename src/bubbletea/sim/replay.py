"""Replays a trace against an admission policy. Time is simulated; only the duration of decisions is measured."""

from __future__ import annotations

import heapq
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from bubbletea.admit.decide import admit, advance, complete
from bubbletea.admit.records import AdmissionRefusal, Placement, PrefillRequest, RequestKind
from bubbletea.admit.state import AdmissionState
from bubbletea.constants import SECOND
from bubbletea.sim.simulated_cluster import SimulatedCluster
from bubbletea.sim.traces import RequestTrace


class Policy(Protocol):
    """An admission policy: BubbleTea's, or one for comparison."""

    def arrive(self, request: PrefillRequest, now_ns: int) -> Sequence[Placement | AdmissionRefusal]:
        """The decisions when a request arrives; an arrival may also place other, offline requests."""

    def pass_time(self, now_ns: int) -> Sequence[Placement]:
        """The placements made without an arrival."""


class ServicePolicy:
    """The service's admission."""

    def __init__(self, state: AdmissionState) -> None:
        self.state = state
        self.done: dict[str, Placement] = {}
        """The final placements: a more urgent request may have gone first."""
        self._ends: list[tuple[int, str]] = []

    def arrive(self, request: PrefillRequest, now_ns: int) -> Sequence[Placement | AdmissionRefusal]:
        self._complete(now_ns)
        found = admit(self.state, request, now_ns)
        if isinstance(found, Placement):
            heapq.heappush(self._ends, (found.delivered_ns, request.id))
        return () if found is None else (found,)

    def pass_time(self, now_ns: int) -> Sequence[Placement]:
        placed = advance(self.state, now_ns)
        for one in placed:
            heapq.heappush(self._ends, (one.delivered_ns, one.request.id))
        return placed

    def _complete(self, now_ns: int) -> None:
        while self._ends and self._ends[0][0] <= now_ns:
            _, name = heapq.heappop(self._ends)
            lane = self.state.lane_of.get(name)
            if lane is None:
                continue
            delivered = max(e.delivered_ns for e in self.state.queues[lane] if e.request.id == name)
            if delivered > now_ns:  # a more urgent request went first
                heapq.heappush(self._ends, (delivered, name))
            else:
                self.done[name] = self.state.placement(name)
                complete(self.state, name, now_ns)


@dataclass
class ReplayResult:
    """The result of a replay, counted over `[from_ns, until_ns)`."""

    cluster: SimulatedCluster
    policy: str
    offered_tokens_per_s: float
    from_ns: int
    until_ns: int
    arrived: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    placed: dict[str, Placement] = field(default_factory=dict)
    """The last placement by request."""
    decision_us: list[float] = field(default_factory=list)

    def figures(self) -> dict[str, Any]:
        """For JSON."""
        span_ns, pattern = self.until_ns - self.from_ns, self.cluster.pattern
        idle = float(pattern.idle_ns.sum()) / pattern.period_ns * span_ns
        busy = float(pattern.busy_ns) / pattern.period_ns * span_ns
        done = [p for p in self.placed.values() if self.from_ns <= p.delivered_ns < self.until_ns]
        useful = sum(self._inside(p) for p in self.placed.values() if p.delivered_ns < self.until_ns)
        filled = sum(self._inside(p) for p in self.placed.values())
        waits = [
            (p.delivered_ns - p.request.arrival_ns) / SECOND
            for p in self.placed.values()
            if self.from_ns <= p.request.arrival_ns < self.until_ns
        ]
        tokens = sum(p.request.prompt_tokens for p in done)
        return {
            "policy": self.policy,
            "offered_tokens_per_s": self.offered_tokens_per_s,
            "arrived": self.arrived,
            "refused": sum(self.refused.values()) / max(1, self.arrived),
            "refused_for": dict(self.refused),
            "fill": filled / idle,
            "utilization": (busy + filled) / (pattern.num_workers * span_ns),
            "useful": useful / filled if filled else 1.0,
            "tokens_per_s": tokens / (span_ns / SECOND),
            "goodput_per_s": sum(_in_time(p) for p in done) / (span_ns / SECOND),
            "cached": sum(p.cached_tokens for p in done) / max(1, tokens),
            **{f"ttft_p{q}_s": _percentile(waits, q) for q in (50, 95, 99)},
            "decision_p50_us": _percentile(self.decision_us, 50),
            "decision_p99_us": _percentile(self.decision_us, 99),
        }

    def _inside(self, placement: Placement) -> int:
        return sum(max(0, min(s.end_ns, self.until_ns) - max(s.start_ns, self.from_ns)) for s in placement.slices)


def _in_time(placement: Placement) -> bool:
    return placement.request.deadline_ns is None or placement.delivered_ns <= placement.request.deadline_ns


def _percentile(values: Sequence[float], q: float) -> float | None:
    return float(np.percentile(values, q)) if len(values) else None


def play(
    cluster: SimulatedCluster,
    policy: Policy,
    name: str,
    trace: RequestTrace,
    *,
    tokens_per_s: float,
    periods: float,
    warm_up: float,
    kind: RequestKind = "online",
    patience_s: float | None = None,
    tenants: int = 1,
    cool_down: float = 0.0,
) -> ReplayResult:
    """`warm_up` periods of training, then `periods` that count, then `cool_down` periods in which more requests arrive
    and postponed ones are placed. Prompts of the counted periods may be delivered after them; they count in shares of
    arrivals. Postponed requests that were never placed count as refused."""
    from_ns = round(warm_up * cluster.pattern.period_ns)
    until_ns = from_ns + round(periods * cluster.pattern.period_ns)
    played = ReplayResult(cluster, name, tokens_per_s, from_ns, until_ns)
    end_ns = until_ns + round(cool_down * cluster.pattern.period_ns)
    for request in arrivals(trace, tokens_per_s, end_ns, kind, patience_s, tenants):
        now_ns = request.arrival_ns
        began = time.perf_counter()
        found = policy.arrive(request, now_ns)
        played.decision_us.append((time.perf_counter() - began) * 1e6)
        counts = from_ns <= now_ns < until_ns
        played.arrived += counts
        for one in (*found, *policy.pass_time(now_ns)):
            if isinstance(one, AdmissionRefusal):
                played.refused[one.reason] += counts
            else:
                played.placed[one.request.id] = one
    if isinstance(policy, ServicePolicy):
        played.placed.update(policy.done)
        played.refused["late"] += sum(from_ns <= one.arrival_ns < until_ns for one in policy.state.postponed)
        played.placed.update({name: policy.state.placement(name) for name in policy.state.lane_of})
    return played


def arrivals(
    trace: RequestTrace, tokens_per_s: float, until_ns: int, kind: RequestKind, patience_s: float | None, tenants: int
) -> Iterator[PrefillRequest]:
    """The trace's requests at another rate; tenants are assigned in turn."""
    for k, (at_s, tokens, blocks) in enumerate(trace.played(tokens_per_s, until_ns / SECOND)):
        now_ns, tenant = round(at_s * SECOND), f"t{k % tenants}"
        deadline_ns = None if patience_s is None else now_ns + round(patience_s * SECOND)
        yield PrefillRequest(f"r{k}", tenant, tokens, now_ns, deadline_ns, kind, tuple((tenant, b) for b in blocks))
