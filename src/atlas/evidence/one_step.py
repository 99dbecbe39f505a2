"""One iteration of a Timeline of several, as a Timeline of its own, so that single ops are visible in a figure."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from atlas.ir.program import Kind
from atlas.ir.timeline import Timeline

_OPS = ("op_start_ns", "op_end_ns")
_TRANSFERS = ("transfer_ready_ns", "transfer_start_ns", "transfer_sent_ns", "transfer_arrive_ns", "transfer_link")


def middle_iteration(timeline: Timeline) -> Timeline:
    """The iteration in the middle; the Timeline itself where it has one iteration."""
    program = timeline.program
    if program.num_iterations == 1:
        return timeline
    number, count = program.num_iterations // 2, program.num_microbatches
    keep = program.op_iteration == number
    kept = np.bincount(program.op_worker[keep], minlength=program.num_workers)
    part = slice(number * count, (number + 1) * count)

    def by_transfer(array: Any) -> Any:
        return array.reshape(program.transfer_shape)[..., part].ravel().copy()

    shorter = replace(
        program,
        num_iterations=1,
        worker_ptr=np.concatenate([[0], np.cumsum(kept)]).astype(np.int64),
        kind=program.kind[keep],
        stage=program.stage[keep],
        microbatch=np.where(program.kind <= Kind.W, program.microbatch - number * count, 0)[keep].astype(np.int32),
        turn=by_transfer(program.turn),
    )
    arrays = {name: getattr(timeline, name)[keep] for name in _OPS}
    arrays |= {name: by_transfer(getattr(timeline, name)) for name in _TRANSFERS}
    return replace(timeline, program=shorter, **arrays)
