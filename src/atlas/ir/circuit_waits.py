"""Which waits of a Timeline were waits for circuits of a photonic rail: from the reconfigurations in its `meta`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from atlas.ir.circuit_phases import circuit_phases, grouped
from atlas.ir.program import Ints
from atlas.ir.timeline import Timeline

if TYPE_CHECKING:
    from atlas.ir.analysis import Laid


def circuit_waits(timeline: Timeline, laid: Laid, awaited: Ints) -> Iterator[tuple[int, int, int]]:
    """(place in laid-out order, start, end) of each wait for circuits."""
    program = timeline.program
    place = np.full(program.num_ops, -1, np.int64)
    place[laid.order] = np.arange(program.num_ops)
    rows = timeline.meta["fabric"]
    changing = {rank for row in rows for rank in row["ranks"]}
    phases = circuit_phases(program, [rank in changing for rank in range(program.num_ranks)])
    assert phases is not None
    numbers: dict[tuple[object, ...], list[int]] = {}
    for g, one in enumerate(phases.changes):
        numbers.setdefault((one.to, one.iteration, one.ranks, one.pipeline), []).append(g)
    transfers, ops = (grouped(by, len(phases.changes)) for by in (phases.transfer_change, phases.op_change))
    for row in rows:
        g = numbers[row["to"], row["iteration"], tuple(row["ranks"]), row["pipeline"]].pop(0)
        if row["to"] == "ring":
            at = place[ops[g]]
            needed = np.full(len(at), laid.free_ns[at].max())
        else:
            at, needed = place[program.transfer_dst[transfers[g]]], timeline.transfer_ready_ns[transfers[g]]
        for k, since in zip(at.tolist(), needed.tolist(), strict=True):
            start, end = (min(max(t, int(laid.free_ns[k])), int(laid.start_ns[k])) for t in (since, row["end_ns"]))
            if start < end and awaited[k] >= 0:
                yield k, start, end
