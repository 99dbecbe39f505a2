"""A link's `model:`: draws in simulate, whatif and BubbleTea's simulator; the same for both engines and every time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from atlas.api import whatif
from atlas.cost.weather import drawn, paths_with_weather
from atlas.errors import SpecError
from atlas.evaluate import Result, evaluate
from atlas.sim import simulate
from atlas.spec import Job, load_job, override
from atlas.weather.path_model import PathModel, save_model
from bubbletea.sim.noise import Noise

JOB = Path(__file__).parents[2] / "examples" / "tiny.yaml"


@pytest.fixture(scope="module")
def stormy(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """The shipped job; its link is calm for two seconds and then loses three quarters of its capacity for one."""
    job = load_job(JOB)
    route = job.cluster.route("east", "west")
    assert route is not None
    capacity = route.pair_gbps * 1e9
    cross = np.where(np.arange(300) % 30 < 20, 0.05, 0.75) * capacity
    path = tmp_path_factory.mktemp("weather") / "east-west.path"
    save_model(path, PathModel(capacity, 80e6, 1e7, cross, cross > 0))
    return override(job, [f"cluster.wan.model={path}"])


@pytest.fixture(scope="module")
def result(stormy: Job) -> Result:
    return evaluate(stormy, "1f1b", jitter_runs=30)


def test_draws_spread_the_iteration_and_name_the_cause(result: Result, stormy: Job) -> None:
    spread = result.spread
    assert spread is not None
    figures = spread.row()
    assert figures["p50_s"] < figures["p95_s"]
    assert spread.tail is not None
    assert spread.tail.path in ("east>west", "west>east")
    assert 0.2 < spread.tail.share <= 1
    assert evaluate(stormy, "1f1b", jitter_runs=30).spread == spread, "the same seed gives the same result"
    assert figures["p95_s"] > result.single.makespan_ns / 1e9, "without draws the link has its mean"


@pytest.mark.parametrize("schedule", ["1f1b", "atlas"])
def test_both_engines_agree_to_the_nanosecond_under_weather(stormy: Job, schedule: str) -> None:
    result = evaluate(stormy, schedule, budget=4)
    program, costs = result.single.program, result.costs
    assert sorted(paths_with_weather(costs)) == ["east>west", "west>east"]
    for k in range(3):
        weather = drawn(costs, 5, k, 10**10)
        one, other = (simulate(program, weather, engine=engine) for engine in ("reference", "compiled"))
        np.testing.assert_array_equal(one.op_end_ns, other.op_end_ns)
        np.testing.assert_array_equal(one.transfer_arrive_ns, other.transfer_arrive_ns)


def test_slower_costs_have_slower_weather(result: Result) -> None:
    weather = drawn(result.costs, 5, 0, 10**10)
    slow = drawn(result.costs.scaled(3), 5, 0, 3 * 10**10)
    program = result.single.program
    assert simulate(program, slow).makespan_ns == pytest.approx(3 * simulate(program, weather).makespan_ns, rel=1e-6)


def test_a_sweep_scales_cross_traffic(stormy: Job) -> None:
    found = whatif(stormy, "cluster.wan.cross_traffic=0,1,1.3", bottleneck=False, monte_carlo=20)
    calm, usual, busy = (row["iteration_s"] for row in found.table())
    assert calm < usual < busy
    assert found.runs.tail is not None
    assert len(found.runs.times_s) == 20
    again = whatif(stormy, bottleneck=False, monte_carlo=20)
    assert again.runs == found.runs


def test_bubbletea_takes_the_same_draws(result: Result) -> None:
    noise = Noise(result, 0.0, 0.0)
    first = [noise.period(k)[1].makespan_ns for k in range(6)]
    assert len(set(first)) > 1
    assert first == [Noise(result, 0.0, 0.0).period(k)[1].makespan_ns for k in range(6)]


def test_a_model_must_fit_its_link(stormy: Job, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"wan\.model = .*pair_gbps .* by more than 2x"):
        override(stormy, ["cluster.wan.pair_gbps=100"])
    (tmp_path / "a.csv").write_text("time_s,rate\n0,1\n")
    with pytest.raises(SpecError, match="a trace or a model, not both"):
        override(stormy, [f"cluster.wan.trace={tmp_path / 'a.csv'}"])
    (tmp_path / "a.path").write_bytes(b"PK")
    with pytest.raises(SpecError, match="truncated or not a path model"):
        override(stormy, [f"cluster.wan.model={tmp_path / 'a.path'}"])


def test_runs_without_any_spread_are_refused() -> None:
    with pytest.raises(SpecError, match="`model` of a link"):
        evaluate(override(load_job(JOB), ["jitter="]), "1f1b", jitter_runs=2)


def test_a_calm_path_has_its_mean(result: Result) -> None:
    calm = drawn(result.costs, 5, 0, 10**9, calm=("east>west", "west>east"))
    assert calm.links == replace(result.costs).links
