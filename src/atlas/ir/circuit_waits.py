"""Which waits of a Timeline were waits for circuits of a photonic rail: from the reconfigurations in its `meta`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from atlas.ir.program import Ints, Kind
from atlas.ir.timeline import Timeline

if TYPE_CHECKING:
    from atlas.ir.analysis import Laid


def circuit_waits(timeline: Timeline, laid: Laid, awaited: Ints) -> Iterator[tuple[int, int, int]]:
    """(place in laid-out order, start, end) of each wait for circuits."""
    program = timeline.program
    place = np.full(program.num_ops, -1, np.int64)
    place[laid.order] = np.arange(program.num_ops)
    number = np.arange(program.num_transfers).reshape(program.transfer_shape)
    ends = [sorted((program.stage_rank[b], program.stage_rank[b + 1])) for b in range(program.num_stages - 1)]
    for row in timeline.meta["fabric"]:
        i = row["iteration"]
        if row["to"] == "ring":
            of_rank = program.op_worker % program.num_ranks == row["ranks"][0]
            ops = np.flatnonzero((program.kind == Kind.SYNC) & (program.microbatch == i) & of_rank)
            at = place[ops]
            needed = np.full(len(at), laid.free_ns[at].max())
        else:
            slots = slice(i * program.num_microbatches, (i + 1) * program.num_microbatches)
            between = [b for b, ranks in enumerate(ends) if ranks == row["ranks"]]
            through = number[:, row["pipeline"], between, slots].ravel()
            at, needed = place[program.transfer_dst[through]], timeline.transfer_ready_ns[through]
        for k, since in zip(at.tolist(), needed.tolist(), strict=True):
            start, end = (min(max(t, int(laid.free_ns[k])), int(laid.start_ns[k])) for t in (since, row["end_ns"]))
            if start < end and awaited[k] >= 0:
                yield k, start, end
