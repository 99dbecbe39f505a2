"""What admission plans is what a worker does: the same layers, cut at the same tokens, in the same windows."""

from __future__ import annotations

import numpy as np
import pytest
from prefill_samples import LLAMA, Collector, make_stages, step

from bubbletea.admit.decide import admit
from bubbletea.admit.lanes import build_lanes
from bubbletea.admit.records import Placement, PrefillRequest
from bubbletea.admit.state import State
from bubbletea.costs import LayerTime
from bubbletea.prefill.job import HEAD, PrefillPiece, PrefillTask
from bubbletea.prefill.shard import Served
from bubbletea.serve.assemble import costs_of
from bubbletea.windows.bubbles import Forecast, Pattern

LAYER = LayerTime(50_000, 100_000, 2_000, 0.5)
HEAD_NS = 200_000
LENGTHS_NS = np.array([900_000, 350_000, 1_700_000, 640_000, 120_000, 2_300_000, 480_000])


def took_ns(piece: PrefillPiece) -> int:
    return HEAD_NS if piece.layer == HEAD else LAYER(piece.last - piece.first, piece.first)


@pytest.mark.parametrize(("length", "chunk"), [(600, 256), (600, 600), (77, 512)])
def test_a_worker_cuts_layers_as_admission_does(length: int, chunk: int) -> None:
    served = Served(LLAMA)
    start = np.cumsum(LENGTHS_NS + 1_000_000) - LENGTHS_NS
    forecast = Forecast(
        Pattern(
            period_ns=int(start[-1] + LENGTHS_NS[-1]),
            phase_ns=np.zeros(1, np.int64),
            ptr=np.array([0, len(start)], np.int64),
            start_ns=start,
            end_ns=start + LENGTHS_NS,
            worker_dc=("here",),
            memory_bytes=np.full(1, 2**40, np.int64),
            busy_ns=1_000_000 * len(start),
        )
    )
    costs = costs_of(served, LAYER, HEAD_NS)
    lanes = build_lanes(forecast.pattern, costs, split=1, num_ranks=1, chunk=chunk)
    plan = admit(State(forecast, costs, lanes, chunks=(chunk,)), PrefillRequest("a", "t", length, 0), 0)
    assert isinstance(plan, Placement)
    planned = [
        (layer, piece.first_token, piece.end_token)
        for piece in plan.slices
        for layer in range(piece.first_layer, piece.end_layer)
    ]

    collector = Collector(served, length)
    engine = make_stages(served, (LLAMA.num_layers,), collector)[0]
    engine.offer(PrefillTask(1, 0, length, 0, plan.ends, 0, 0), [1] * length)
    for window in forecast.ahead(0, 0, 4 * forecast.period_ns):
        now_ns = window.start_ns
        while step(engine, lambda piece: now_ns + took_ns(piece) <= window.end_ns):  # noqa: B023
            layer, first, last = collector.spans[-1]
            now_ns += took_ns(PrefillPiece(0, first, last, layer))
    assert collector.logits_V is not None
    assert collector.spans == planned
    assert len({last - first for _, first, last in planned}) > 1, "some of them were cut"
