"""The public API of `import atlas`: its names, what its functions return, the examples in its docstrings, and the
notebook and the README that use it."""

from __future__ import annotations

import ast
import doctest
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import atlas
from atlas.api import PlanSearch, Simulation, WhatIf
from atlas.planner.space import KEEPABLE

ROOT = Path(__file__).parents[1]
TINY = ROOT / "examples" / "tiny.yaml"
NAMES = ["AtlasError", "Figure", "Timeline", "load_job", "load_timeline", "plan", "simulate", "train", "whatif"]


@pytest.fixture(scope="module")
def simulation() -> Simulation:
    return atlas.simulate(TINY, ["varuna", "atlas"])


def test_exactly_these_names_are_exported() -> None:
    assert sorted(atlas.__all__) == NAMES
    assert set(NAMES) <= set(dir(atlas))
    for name in NAMES:
        assert getattr(atlas, name).__doc__, f"atlas.{name} has no docstring"
    with pytest.raises(AttributeError, match="no attribute 'simulat'"):
        atlas.simulat  # type: ignore[attr-defined]  # noqa: B018


def test_names_are_imported_on_first_use() -> None:
    script = (
        "import sys, atlas; assert 'numpy' not in sys.modules; from atlas import simulate; "
        "assert 'numpy' in sys.modules; assert 'torch' not in sys.modules; assert atlas.simulate is simulate"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.parametrize("name", ["simulate", "plan", "whatif"])
def test_the_examples_in_docstrings_run(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    found = doctest.DocTestFinder(recurse=False).find(getattr(atlas, name), name)
    result = doctest.DocTestRunner().run(found[0])
    assert result.attempted > 0
    assert result.failed == 0


# ---- simulate --------------------------------------------------------------------------------------------------
def test_simulate_gives_what_the_command_prints(simulation: Simulation, capsys: pytest.CaptureFixture[str]) -> None:
    from atlas.cli import main

    assert main(["simulate", str(TINY), "--schedule", "varuna", "--schedule", "atlas", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    ours = json.loads(json.dumps(simulation.table()))
    assert [{**row, "engine_s": 0} for row in ours] == [{**row, "engine_s": 0} for row in printed]


def test_the_best_is_the_fastest_that_fits(simulation: Simulation) -> None:
    fitting = [row for row in simulation.table() if row["fits"]]
    assert simulation.best.row()["iteration_s"] == min(row["iteration_s"] for row in fitting)


def test_a_simulation_shows_itself_as_a_figure(simulation: Simulation, tmp_path: Path) -> None:
    shown = simulation._repr_html_()
    assert "<svg" in shown
    assert ">varuna<" in shown
    assert ">atlas<" in shown
    simulation.figure().save(tmp_path / "both.svg")
    simulation.figure().save(tmp_path / "both.html")
    assert (tmp_path / "both.svg").read_text().startswith("<svg")
    assert (tmp_path / "both.html").read_text().startswith("<!doctype html>")


def test_a_timeline_is_a_table_of_ops_and_of_transfers(simulation: Simulation) -> None:
    timeline = simulation.best.timeline
    assert isinstance(timeline, atlas.Timeline)
    ops, transfers = timeline.table(), timeline.transfer_table()
    assert len(ops) == timeline.program.num_ops
    assert max(op["end_s"] for op in ops) == timeline.op_end_ns.max() / 1e9
    forward = next(op for op in ops if op["kind"] == "F" and op["stage"] == 1)
    assert forward["datacenter"] == timeline.program.rank_dc[1]
    assert len(transfers) == timeline.program.num_transfers
    for sent in transfers:
        assert sent["ready_s"] <= sent["start_s"] <= sent["sent_s"] <= sent["arrive_s"]
        assert abs(sent["from_stage"] - sent["to_stage"]) == 1
    assert {sent["sends"] for sent in transfers} == {"activation", "gradient"}
    json.dumps([*ops, *transfers])  # plain values, as pandas wants them


def test_a_mistake_is_an_atlas_error() -> None:
    with pytest.raises(atlas.AtlasError, match="no such schedule"):
        atlas.simulate(TINY, "gpip")


# ---- plan, what-if, train ----------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def search() -> PlanSearch:
    return atlas.plan(TINY, tries=0)


def test_a_plan_is_saved_and_simulated_as_planned(search: PlanSearch, tmp_path: Path) -> None:
    search.save(tmp_path / "plan.yaml")
    for source in (search.plan, tmp_path / "plan.yaml"):
        again = atlas.simulate(source)
        assert [result.schedule for result in again.results] == [search.plan.schedule.name]
        assert again.best.row()["iteration_s"] == pytest.approx(search.plan.predicted.iteration_s, rel=1e-3)
    assert search.table()[0]["lost"] == ""
    assert "<iframe" in search._repr_html_()


def test_a_plan_under_a_named_schedule_is_searched_with_its_own_tries_and_seed() -> None:
    job = atlas.load_job(TINY.parent / "gpt-a.yaml", ["cluster.wan.latency_ms=97"])
    plan = atlas.plan(job, keep=KEEPABLE, tries=24, seed=3, break_even=False).plan
    assert (plan.schedule.name, plan.schedule.tries, plan.schedule.seed) == ("atlas", 24, 3)

    def simulated_s(**asked: Any) -> float:
        return atlas.simulate(plan, **asked).best.single.makespan_ns / 1e9

    assert simulated_s(schedule="atlas") == pytest.approx(simulated_s())
    assert simulated_s(schedule="atlas", tries=150) < 0.99 * simulated_s()


def test_a_sweep_shows_itself_as_a_curve() -> None:
    found = atlas.whatif(TINY, "cluster.wan.latency_ms=10,40", bottleneck=False)
    assert isinstance(found, WhatIf)
    assert [row["value"] for row in found.table()] == [10, 40]
    assert found.table()[0]["iteration_s"] < found.table()[1]["iteration_s"]
    assert "<svg" in (found._repr_html_() or "")


def test_training_is_predicted_and_measured() -> None:
    job = atlas.load_job(TINY, ["pp=2", "pipelines_per_cell=1", "num_microbatches=2"])
    steps: list[int] = []
    run = atlas.train(job, "1f1b", steps=1, slower=2, on_step=lambda event, timeline: steps.append(event["step"]))
    assert steps == [1]
    assert (run.predicted.source, run.measured.source) == ("simulated", "emulated")
    assert "<svg" in atlas.Figure(run.predicted, run.measured)._repr_html_()


# ---- the notebook and the README ---------------------------------------------------------------------------------
def shown(source: str, names: dict[str, Any]) -> Any:
    """Run a cell as Jupyter does; the value of its last expression."""
    tree = ast.parse(source)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "cell", "exec"), names)
    return eval(compile(ast.Expression(last.value), "cell", "eval"), names) if isinstance(last, ast.Expr) else None


def test_the_notebook_runs_and_shows_its_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT / "examples")
    notebook = json.loads((ROOT / "examples" / "notebook.ipynb").read_text())
    names: dict[str, Any] = {}
    values = [shown("".join(cell["source"]), names) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    figures = [value._repr_html_() for value in values if hasattr(value, "_repr_html_")]
    assert len(figures) >= 4
    assert all("<svg" in figure or "<iframe" in figure for figure in figures)


def test_the_python_in_the_readme_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert blocks
    for block in blocks:
        shown(block, {})


# ---- bad arguments ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: atlas.simulate(3), "job or plan: path = 3: is neither a path"),
        (lambda: atlas.load_job(None), "job: path: is neither a path"),
        (lambda: atlas.simulate(TINY, [5]), r"atlas.simulate: schedule = \[5\]: must be a string, or several"),
        (lambda: atlas.simulate(TINY, tcp="few"), "tcp = 'few': must be 'one' or 'many'"),
        (lambda: atlas.simulate(TINY, tries=0), "tries = 0: must be a whole number from 1 to 1,000,000"),
        (lambda: atlas.simulate(TINY, seed=-1), "seed = -1: must be"),
        (lambda: atlas.simulate(TINY, iterations=1.5), "iterations = 1.5: must be"),
        (lambda: atlas.plan(TINY, confidence=1.0), "atlas.plan: confidence = 1.0: must be a number from 0.5 to 0.999"),
        (lambda: atlas.whatif(TINY, None), "must be a string, or several"),
        (lambda: atlas.whatif(TINY, monte_carlo=-1), "monte_carlo = -1: must be"),
        (lambda: atlas.whatif(TINY, wan_sigma=float("nan")), "wan_sigma = nan: must be"),
        (lambda: atlas.train(TINY, steps="3"), "atlas.train: steps = '3': must be"),
        (lambda: atlas.train(TINY, learning_rate=-1.0), "learning_rate = -1.0: must be"),
        (lambda: atlas.train(TINY, stepz=3), "atlas.train: stepz: there is no such option. Did you mean 'steps'"),
    ],
)
def test_a_bad_argument_is_named_with_its_rule(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(atlas.AtlasError, match=message):
        call()


def test_what_plan_returns_can_be_simulated_as_it_is() -> None:
    found = atlas.plan(TINY, tries=0, break_even=False)
    direct, by_plan = (atlas.simulate(source).best.row() for source in (found, found.plan))
    assert direct["schedule"] == by_plan["schedule"] == found.plan.schedule.name
    assert direct["iteration_s"] == by_plan["iteration_s"]
