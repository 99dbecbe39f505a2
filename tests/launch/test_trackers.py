"""Experiment trackers: found by their entry points, given every step, and never in the way of training."""

from __future__ import annotations

import argparse
import logging
import threading
import tomllib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import atlas
from atlas.commands.watching import watch_flags, watched
from atlas.errors import AtlasError
from atlas.launch.report import ReportChoice, RunReport
from atlas.launch.report import trackers as trackers_module
from atlas.launch.report.trackers import GROUP, WAITING, TrackerThread
from atlas.launch.train_options import TrainOptions
from atlas.spec import load_job
from atlas.spec.recipe import load_recipe

ROOT = Path(__file__).parents[2]
TINY = ROOT / "examples" / "tiny.yaml"


class Remembering:
    """A tracker of another package."""

    made: list[Remembering] = []  # noqa: RUF012

    def __init__(self, folder: Path, name: str, facts: Any) -> None:
        self.folder, self.name, self.facts = folder, name, dict(facts)
        self.steps: dict[int, dict[str, float]] = {}
        self.closed = False
        self.made.append(self)

    def step(self, number: int, figures: dict[str, float]) -> None:
        self.steps[number] = figures

    def close(self) -> None:
        self.closed = True


def broken(folder: Path, name: str, facts: Any) -> Any:
    raise ConnectionError("no login\nand more lines")


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """A package with the entry points that pyproject.toml has, and two more."""
    offered = dict(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"][GROUP])
    offered |= {"ours": "test_trackers:Remembering", "broken": "test_trackers:broken"}
    package = tmp_path / "site" / "some_trackers-1.0.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: some-trackers\nVersion: 1.0\n")
    lines = "\n".join(f"{name} = {value}" for name, value in offered.items())
    (package / "entry_points.txt").write_text(f"[{GROUP}]\n{lines}\n")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    Remembering.made.clear()
    return offered


def report_two_steps(choice: ReportChoice) -> None:
    timeline = atlas.simulate(TINY, "1f1b").best.timeline
    with RunReport(choice, 2) as report:
        for step in (1, 2):
            loss = 3.0 / step if step == 1 else float("nan")
            report.step({"step": step, "loss": loss, "tokens": 10, "iteration_s": 0.5, "predicted_s": None}, timeline)


def test_a_tracker_of_another_package_gets_every_figure(installed: dict[str, str], tmp_path: Path) -> None:
    report_two_steps(ReportChoice(bar=False, trackers=("ours",), folder=tmp_path, labels={"job": "tiny"}))
    (made,) = Remembering.made
    assert (made.folder, made.name, made.facts, made.closed) == (tmp_path, "tiny", {"job": "tiny"}, True)
    assert set(made.steps[1]) == {"loss", "tokens", "iteration_s", "utilization"}
    assert set(made.steps[2]) == {"tokens", "iteration_s", "utilization"}  # a loss that is not finite is left out


def test_tensorboards_own_reader_finds_every_step(installed: dict[str, str], tmp_path: Path) -> None:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    report_two_steps(ReportChoice(bar=False, trackers=("tensorboard",), folder=tmp_path))
    reader = events.EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={events.TENSORS: 0})
    reader.Reload()
    assert [one.step for one in reader.Tensors("training/iteration_s")] == [1, 2]
    (loss,) = reader.Tensors("training/loss")
    assert (loss.step, loss.tensor_proto.float_val[0]) == (1, 3.0)


def test_wandb_and_mlflow_are_called_as_their_packages_want(
    installed: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With stand-ins for the packages, which are large and want a server."""
    calls: list[Any] = []

    def call(name: str) -> Any:
        return lambda *args, **named: calls.append((name, args, named))

    run = SimpleNamespace(log=call("log"), finish=call("finish"))
    client = SimpleNamespace(
        get_experiment_by_name=lambda name: None,
        create_experiment=lambda name: "7",
        create_run=lambda experiment, run_name: SimpleNamespace(
            info=SimpleNamespace(run_id=f"{experiment} {run_name}")
        ),
        log_param=call("param"),
        log_metric=call("metric"),
        set_terminated=call("end"),
    )
    packages = {
        "wandb": SimpleNamespace(init=lambda **named: run if named["name"] == "tiny" else None),
        "mlflow": SimpleNamespace(MlflowClient=lambda: client),
    }
    monkeypatch.setattr(trackers_module, "_package", packages.__getitem__)
    report_two_steps(ReportChoice(bar=False, trackers=("wandb", "mlflow"), folder=tmp_path, labels={"job": "tiny"}))
    assert [args[1] for name, args, _ in calls if name == "metric"].count("iteration_s") == 2
    assert [named["step"] for name, _, named in calls if name == "log"] == [1, 2]
    assert {"finish", "end", "param"} <= {name for name, *_ in calls}


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nonesuch", "no such tracker. Known are broken, mlflow, ours, tensorboard, wandb"),
        ("broken", "ConnectionError: no login. Fix it or leave it out"),
        ("mlflow", "needs the package mlflow. Install it with: pip install mlflow"),
    ],
)
def test_a_tracker_that_does_not_start_is_refused_before_training(
    name: str, words: str, installed: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trackers_module, "find_spec", lambda name: None)
    choice, said = ReportChoice(bar=False, trackers=(name,), folder=tmp_path), list[str]()
    with pytest.raises(AtlasError, match=f"--track {name}: {words}"):
        RunReport(choice, 2)
    with RunReport(replace(choice, trackers_asked=False), 2, warn=said.append):  # a default: only warned of
        assert len(said) == 1


def test_a_tracker_that_fails_or_hangs_costs_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    go_on, said = threading.Event(), list[str]()

    class Hanging(Remembering):
        def step(self, number: int, figures: dict[str, float]) -> None:
            go_on.wait(120)
            raise OSError("the server is gone")

    thread = TrackerThread("slow", Hanging(Path(), "", {}), said.append)
    for number in range(WAITING + 10):
        thread.step(number, {})
    go_on.set()
    thread.close()
    assert len(said) == 1
    assert said[0] == "report (slow): the tracker is too slow: some steps are not recorded. Training continues"


@pytest.mark.parametrize(
    ("flags", "chosen"),
    [
        ([], ()),
        (["--runs", "a"], ("tensorboard",)),
        (["--runs", "a", "--track", "none"], ()),
        (["--track", "wandb", "--track", "mlflow"], ("wandb", "mlflow")),
    ],
)
def test_tensorboard_is_the_default_of_a_run_with_a_folder(
    flags: list[str], chosen: tuple[str, ...], installed: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("atlas.launch.report.trackers.find_spec", lambda name: logging)
    parser = argparse.ArgumentParser()
    watch_flags(parser)
    args = parser.parse_args(flags)
    given = {"logging.folder": args.runs and str(args.runs), "logging.trackers": args.track}
    assert watched(args, load_recipe(None, given).logging, load_job(TINY), TrainOptions("atlas")).trackers == chosen
