"""What admission plans is what a worker does: the same layers, cut at the same tokens, in the same windows."""

from __future__ import annotations

import numpy as np
import pytest
from forecast_windows import ahead
from prefill_samples import LLAMA, Collector, make_stages, step

from bubbletea.admit.decide import admit
from bubbletea.admit.lanes import build_lanes
from bubbletea.admit.records import Placement, PrefillRequest
from bubbletea.admit.state import AdmissionState
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
    ends = np.cumsum(LENGTHS_NS + 1_000_000)
    windows = list(zip((ends - LENGTHS_NS).tolist(), ends.tolist(), strict=True))
    forecast = Forecast(Pattern.of_windows([windows], int(ends[-1]), ["here"], 2**40))
    costs = costs_of(served, LAYER, HEAD_NS)
    lanes = build_lanes(forecast.pattern, costs, split=1, num_ranks=1, chunk=chunk)
    plan = admit(AdmissionState(forecast, costs, lanes, chunks=(chunk,)), PrefillRequest("a", "t", length, 0), 0)
    assert isinstance(plan, Placement)
    planned = [
        (layer, piece.first_token, piece.end_token)
        for piece in plan.slices
        for layer in range(piece.first_layer, piece.end_layer)
    ]

    collector = Collector(served, length)
    engine = make_stages(served, (LLAMA.num_layers,), collector)[0]
    engine.offer(PrefillTask(1, 0, length, 0, plan.ends, 0, 0), [1] * length)
    for window in ahead(forecast, 0, 0, 4 * forecast.period_ns):
        now_ns = window.start_ns
        while step(engine, lambda piece: now_ns + took_ns(piece) <= window.end_ns):  # noqa: B023
            layer, first, last = collector.spans[-1]
            now_ns += took_ns(PrefillPiece(0, first, last, layer))
    assert collector.logits_V is not None
    assert collector.spans == planned
    assert len({last - first for _, first, last in planned}) > 1, "some of them were cut"
