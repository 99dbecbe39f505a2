"""`atlas train --emulate` under weather: the emulator's paths and the prediction have the same draw."""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import pytest

from atlas.commands import train
from atlas.cost.weather import drawn, emulated_cross
from atlas.errors import AtlasError
from atlas.ir.assemble import repeated
from atlas.launch import rehearse as rehearsing
from atlas.launch.emulate import EmulationSettings
from atlas.launch.paths import WeatherDraw, paths_of
from atlas.launch.prepared_job import PreparedJob, prepare_job
from atlas.launch.train_options import TrainOptions
from atlas.sim import simulate
from atlas.spec import Job, load_job, override
from atlas.wan.emulator.flows import Flow, LinkDirection, TrunkDirection
from atlas.wan.emulator.paths import PathSpec
from atlas.weather.draw import rows_of
from atlas.weather.path_model import WINDOW_NS, PathModel, save_model

JOB = Path(__file__).parents[2] / "examples" / "tiny.yaml"


@pytest.fixture(scope="module")
def stormy(tmp_path_factory: pytest.TempPathFactory) -> Job:
    cross = np.random.default_rng(0).uniform(0, 0.9, 300) * 5e9
    path = tmp_path_factory.mktemp("weather") / "a.path"
    save_model(path, PathModel(5e9, 80e6, 1e7, cross, cross > 0))
    return override(load_job(JOB), [f"cluster.wan.model={path}"])


@pytest.fixture(scope="module")
def prepared(stormy: Job) -> PreparedJob:
    return prepare_job(stormy, TrainOptions("1f1b"))


@pytest.mark.parametrize("slower", [1, 3])
def test_paths_have_the_draw_of_the_prediction(prepared: PreparedJob, slower: int) -> None:
    costs = prepared.costs.scaled(slower)
    horizon_ns = 10**10
    found = drawn(costs, 7, 0, horizon_ns)
    traces = {link.weather.path: link.trace for link in found.links if link.weather is not None}
    crossed = [p for p in paths_of(prepared.program, costs, 1 << 16, draw=WeatherDraw(7, 10.0)).values() if p.cross]
    assert crossed, "the paths over the WAN have cross traffic"
    for path in crossed:
        for way, cross in (("east>west", path.cross), ("west>east", path.cross_back)):
            trace = traces[way]
            assert trace is not None
            at_ns = np.arange(100) * WINDOW_NS
            span = np.searchsorted(trace.at_ns, at_ns, side="right") - 1
            np.testing.assert_allclose(1 - np.array(cross), np.array(trace.rate)[span], rtol=1e-12)


def test_the_prediction_covers_the_time_of_the_run(
    stormy: Job, prepared: PreparedJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    class EmulatedError(Exception):
        pass

    given: list[EmulationSettings] = []

    def emulate(program: object, costs: object, training: object, settings: EmulationSettings, **_: object) -> None:
        given.append(settings)
        raise EmulatedError

    monkeypatch.setattr(rehearsing, "emulate", emulate)
    for seed in (0, 4):
        with pytest.raises(EmulatedError):
            rehearsing.rehearse(stormy, TrainOptions("1f1b", steps=30, weather_seed=seed))
    first, other = given
    assert first.weather.seed == 0
    assert other.weather.seed == 4
    assert first.predicted_s != other.predicted_s
    whole = simulate(repeated(prepared.program, 30), drawn(prepared.costs, 4, 0, 10**12))
    assert other.predicted_s == pytest.approx(whole.iteration_ns / 1e9, rel=1e-9), "all 30 steps are simulated"
    assert other.weather.seconds > whole.makespan_ns / 1e9


def test_the_proxy_delays_by_the_queue_of_cross_traffic() -> None:
    shares = np.array([0.5, 1.5, 1.2, 0.1, 0.0, 2.0])
    model = PathModel(40e6, 40e6, 600_000, shares * 40e6, shares >= 0)
    path = PathSpec(0.005, None, 40e6, queue_bytes=600_000, cross=tuple(shares.tolist()))
    link = LinkDirection(path, TrunkDirection(None), path.cross)
    rows = rows_of(model, model.cross_bps)
    for k in range(len(shares)):
        slowdown, late_ns = link.crossed(link.cross_since_ns + (k + 0.5) * WINDOW_NS)
        assert 1 / slowdown == pytest.approx(rows.rate[k])
        assert late_ns == pytest.approx(rows.extra_latency_ns[k])


def test_cross_traffic_slows_the_trunk_too() -> None:
    path = PathSpec(0.0, None, 40e6, cross=(0.75,))
    link = LinkDirection(path, TrunkDirection(8e6), path.cross)
    flow = Flow(None, link, None, None)  # type: ignore[arg-type]
    now_ns = link.cross_since_ns
    flow.since_ns = now_ns
    assert flow.accept(bytes(1000), now_ns).due_ns - now_ns == pytest.approx(4_000_000)


def test_an_emulator_gets_as_much_as_the_run_needs(prepared: PreparedJob) -> None:
    weather = next(link.weather for link in prepared.costs.links if link.weather is not None)
    assert emulated_cross(weather, 3, seconds=5) == emulated_cross(weather, 3)[:50]


def test_real_links_take_no_seed() -> None:
    parser = argparse.ArgumentParser()
    train.configure(parser)
    with pytest.raises(AtlasError, match="--weather-seed is for --emulate"):
        train.run(parser.parse_args([str(JOB), "--dc", "east", "--weather-seed", "1"]))
