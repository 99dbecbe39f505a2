"""The load that can be promised is the largest that holds, and the next one does not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bubbletea.cli import main
from bubbletea.sim.capacity import JudgedLoad, find_capacity

JOB = Path(__file__).parents[3] / "examples" / "testbed" / "gpt-a-40ms.yaml"


def judged(load: float, p50_s: float) -> JudgedLoad:
    return JudgedLoad(load, p50_s, 0.1, 0.0, p50_limit_s=1.0, p95_limit_s=0.2)


@pytest.mark.parametrize("limit", [0.01, 0.02, 0.37, 0.99])
def test_bisection_finds_the_largest_load_that_holds(limit: float) -> None:
    asked: list[float] = []

    def judge(load: float) -> JudgedLoad:
        asked.append(load)
        return judged(load, load / limit)

    found = find_capacity(judge)
    assert found.best is not None
    assert found.worse is not None
    assert (found.best.load, found.worse.load) == (pytest.approx(limit), pytest.approx(limit + 0.01))
    assert found.worse.misses == ["p50"]
    assert len(asked) <= 15


def test_a_smaller_load_that_does_not_hold_hides_no_larger_one() -> None:
    """Where dedicated accelerators are idle, the limits are tighter."""
    found = find_capacity(lambda load: judged(load, 0.5 if 0.3 < load < 0.655 else 2.0))
    assert found.best is not None
    assert found.best.load == pytest.approx(0.65)


def test_nothing_and_everything_are_answers() -> None:
    assert find_capacity(lambda load: judged(load, 2.0)).best is None
    found = find_capacity(lambda load: judged(load, 0.5))
    assert found.worse is None
    assert found.best is not None
    assert found.best.load == 1.0


def test_a_load_without_served_requests_does_not_hold() -> None:
    nobody = JudgedLoad(0.5, None, None, 1.0, 1.0, 1.0)
    assert nobody.misses == ["p50", "p95", "refused"]


def test_the_command_prints_a_load_that_simulate_reproduces(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["simulate", str(JOB), "--requests", "synthetic", "--schedule", "1f1b", "--periods", "1", "--json"]
    assert main([*flags, "--capacity"]) == 0
    found = json.loads(capsys.readouterr().out)
    one = found["best"] or found["worse"]
    again = ["--load", str(one["load"]), "--policy", "ours", "--patience", repr(one["p95_limit_s"])]
    assert main([*flags, *again]) == 0
    row = json.loads(capsys.readouterr().out)["rows"][0]
    assert (row["ttft_p50_s"], row["ttft_p95_s"], row["refused"]) == (one["p50_s"], one["p95_s"], one["refused"])
