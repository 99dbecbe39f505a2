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
    assert bench.row(outcome, kind)["beyond_usual_s"] <= bench.BAR_S
    assert noise == [0]


def test_a_request_that_stalls_until_its_worker_is_nearly_back_misses_a_bar(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One of two lanes is lost at 10 s and back at 40 s; a request that it had is answered at 39.5 s."""
    monkeypatch.syspath_prepend(str(BENCH))
    bench = importlib.import_module("serve_kills")
    usual = [bench.Asked(start_s, start_s + 1.5, "right") for start_s in range(3, 45, 2)]
    stalled, lanes = bench.Asked(9.5, 39.5, "right"), [(0.0, 2), (10.1, 1), (40.0, 2)]

    def judged(*asked: object) -> int:
        return int(bench.report([(bench.Outcome(10.0, [*asked, *usual], 0, lanes), bench.KINDS[0])], 0))

    found = bench.row(bench.Outcome(10.0, [stalled, *usual], 0, lanes), bench.KINDS[0])
    assert (found["slowest_s"], found["slowest_since_lane_s"], found["beyond_usual_s"]) == (0.0, 29.5, 28.0)
    assert judged(stalled) == 1
    assert '"name": "the same, beyond the slowest that was not affected", "value": 28.0' in capsys.readouterr().out
    assert judged(bench.Asked(9.5, 16.0, "right")) == 0
