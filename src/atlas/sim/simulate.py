"""One function from a Program and its Costs to a Timeline, with either engine."""

from __future__ import annotations

import time

import numpy as np

from atlas.cost.table import Costs
from atlas.errors import AtlasError
from atlas.ir.program import Program
from atlas.ir.timeline import Timeline
from atlas.sim import reference
from atlas.sim.lower import SeededNoise, Tables, lower
from atlas.sim.reference import Events

MAX_TOTAL_NS = 9e18
"""Nearly all that 64 bits hold: 285 years."""
SMALL = 60_000
"""Up to this many events the reference engine is faster than loading numba."""


def simulate(program: Program, costs: Costs, *, jitter: SeededNoise | None = None, engine: str = "auto") -> Timeline:
    """When everything happens. `engine` is "reference", "compiled", or "auto": the faster for this size."""
    began = time.process_time()
    tables = lower(program, costs, jitter)
    events = run(tables, engine)
    seconds = time.process_time() - began
    return timeline(program, costs, tables, events, {"engine_s": seconds})


def run(tables: Tables, engine: str = "auto") -> Events:
    """The events of lowered tables."""
    if engine not in ("auto", "reference", "compiled"):
        raise AtlasError(f"no engine is called {engine!r}: use auto, reference or compiled")
    _require_countable(tables)
    if engine == "reference" or (engine == "auto" and len(tables.op_ns) + len(tables.transfer_dst) <= SMALL):
        return reference.run(tables)
    from atlas.sim import compiled

    return compiled.run(tables)


def _require_countable(tables: Tables) -> None:
    """Everything one after the other, links at the rate that their traces end with, must stay within 64 bits."""
    last = tables.trace_ptr[1:][np.diff(tables.trace_ptr) > 0] - 1
    slowest = float(tables.trace_rate[last].min(initial=1.0))
    transfers_ns = tables.transfer_work_ns.sum(dtype=np.float64) / slowest + float(tables.trace_at_ns[last].sum())
    late_ns = tables.transfer_latency_ns + tables.transfer_before_ns + tables.trace_latency_ns.max(initial=0)
    if tables.op_ns.sum(dtype=np.float64) + transfers_ns + late_ns.sum(dtype=np.float64) > MAX_TOTAL_NS:
        raise AtlasError(
            f"all ops and transfers together take more than {MAX_TOTAL_NS / 1e9:.1g} s, which no clock of ours counts: "
            "check the units of rates and latencies, in traces too"
        )


def timeline(program: Program, costs: Costs, tables: Tables, events: Events, meta: dict[str, object]) -> Timeline:
    """Make a Timeline of an engine's arrays."""
    return Timeline(
        program=program,
        source="simulated",
        op_start_ns=events.op_start_ns,
        op_end_ns=events.op_end_ns,
        transfer_ready_ns=events.ready_ns,
        transfer_start_ns=events.start_ns,
        transfer_sent_ns=events.sent_ns,
        transfer_arrive_ns=events.arrive_ns,
        transfer_link=tables.channel_link[tables.transfer_channel].astype(np.int32),
        links=tuple(link.name for link in costs.links),
        meta=meta,
    )
