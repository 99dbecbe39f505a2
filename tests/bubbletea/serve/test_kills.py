"""A small sample of `bench/serve_kills.py`: `bubbletea serve` as a user starts it, a worker killed under load."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[3] / "bench"
SMALL = ("--set", "pp=2", "--set", "pipelines_per_cell=1")


@pytest.mark.parametrize("beside", ["offline", pytest.param("training", marks=pytest.mark.slow)])
def test_no_admitted_request_is_lost_with_a_killed_worker(monkeypatch: pytest.MonkeyPatch, beside: str) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    bench = importlib.import_module("serve_kills")
    arguments = (*bench.TRAINING, *SMALL) if beside == "training" else bench.ALONE
    kind = bench.Kind(beside, arguments, num_lanes=2, offline=0.5)
    noise = list[int]()
    (outcome,) = bench.runs(kind, [3], (12, 40), noise)
    assert len(outcome.asked) == 40
    assert not outcome.lost
    assert noise == [0]
