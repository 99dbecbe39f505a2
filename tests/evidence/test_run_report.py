"""`atlas report`: one page about a run, or several."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

import atlas
from atlas.cli import main
from atlas.errors import AtlasError
from atlas.evidence.one_step import middle_iteration
from atlas.evidence.report_page import verdict
from atlas.evidence.run_summary import PARTS, run_summary
from atlas.evidence.write_card import RunFacts, write_data_point
from atlas.ir.analysis import summary
from atlas.ir.store import save_timeline
from atlas.ir.timeline import Timeline

TINY = Path(__file__).parents[2] / "examples" / "tiny.yaml"


@pytest.fixture(scope="module")
def timelines() -> dict[str, Timeline]:
    found = atlas.simulate(TINY, ["gpipe", "1f1b"], iterations=4)
    return {result.schedule: result.timeline for result in found.results}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, timelines: dict[str, Timeline]) -> Path:
    """Two timeline files, a run folder and a data point."""
    folder = tmp_path_factory.mktemp("runs")
    for name, timeline in timelines.items():
        save_timeline(folder / f"{name}.timeline", timeline)
    run = folder / "run" / "attempt-1"
    run.mkdir(parents=True)
    save_timeline(run / "run.timeline", timelines["1f1b"])
    steps = [
        {"step": k, "loss": 4 - k / 10, "tokens": 1000, "iteration_s": 0.5, "predicted_s": 0.4} for k in range(1, 9)
    ]
    lines = [json.dumps(step) for step in steps]
    (run / "run.jsonl").write_text("\n".join([*lines, '{"step": 9, "lo']) + "\n")
    record = {"command": ["atlas", "train", "<b>"], "attempts": [{"reason": "host lost"}, {}]}
    record |= {"steps_kept": 9, "steps_done": 10, "goodput_steps_per_s": 1.5}
    (folder / "run" / "run.json").write_text(json.dumps(record))
    result = atlas.simulate(TINY, "1f1b", iterations=4).best
    write_data_point(folder / "point", result.timeline, result.case.job, result.case.arrangement, RunFacts("1f1b"))
    return folder


def test_the_page_is_self_contained_and_says_where_times_come_from(runs: Path, tmp_path: Path) -> None:
    sources = [str(runs / name) for name in ("gpipe.timeline", "run", "point")]
    assert main(["report", *sources, "--out", str(tmp_path / "r.html"), "--title", "<i>x"]) == 0
    page = (tmp_path / "r.html").read_text()
    assert "<script" not in page
    assert "<i>x" not in page
    assert "&lt;b&gt;" in page
    assert not re.search(r"(src|href)\s*=", page)
    assert page.count('<span class="badge">simulated</span>') == 3
    for words in ("Loss", "Time of each step", "One iteration", "host lost", "communication_fraction", "90 %"):
        assert words in page, words


def test_the_figures_are_those_of_the_files(runs: Path, timelines: dict[str, Timeline]) -> None:
    run, point = run_summary(runs / "run"), run_summary(runs / "point")
    wanted = summary(timelines["1f1b"])
    assert run.figures["iteration"].value == pytest.approx(wanted["iteration_s"])
    assert run.figures["tokens per second"].value == pytest.approx(2000)
    assert run.figures["loss, last step"].value == pytest.approx(3.2)
    assert len(run.steps) == 8
    assert sum(run.shares.values()) == pytest.approx(1, abs=1e-6)
    assert sum(point.shares.values()) == pytest.approx(1, abs=0.01)
    assert point.shares[PARTS[0]] == pytest.approx(run.shares[PARTS[0]], rel=0.05)


def test_a_run_that_left_no_timeline_is_reported_by_its_record(runs: Path, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text((runs / "run" / "run.json").read_text())
    (tmp_path / "run.jsonl").write_text((runs / "run" / "attempt-1" / "run.jsonl").read_text())
    found = run_summary(tmp_path)
    assert found.figures["iteration"].value == pytest.approx(0.5)
    assert found.figures["goodput"].value == 1.5
    assert ("attempts", "2: host lost") in found.about
    assert main(["report", str(tmp_path), "--out", str(tmp_path / "r.html")]) == 0
    assert main(["card", str(tmp_path), "--job", str(TINY), "--out", str(tmp_path / "point")]) == 2


def test_the_fastest_is_named_only_among_equals(runs: Path) -> None:
    same = [run_summary(runs / f"{name}.timeline") for name in ("gpipe", "1f1b")]
    assert "It is the fastest" in verdict(same)
    assert "Not comparable" in verdict([*same, run_summary(runs / "point")])


def test_the_middle_iteration_is_a_timeline_of_its_own(timelines: dict[str, Timeline]) -> None:
    whole, one = timelines["1f1b"], middle_iteration(timelines["1f1b"])
    assert one.program.num_iterations == 1
    assert one.program.num_ops * 4 == whole.program.num_ops
    assert one.program.num_transfers * 4 == whole.program.num_transfers
    assert one.busy_ns.sum() == pytest.approx(whole.busy_ns.sum() / 4, rel=1e-6)
    src = one.program.transfer_src
    assert (one.transfer_ready_ns[src >= 0] == one.op_end_ns[src[src >= 0]]).all()
    assert np.array_equal(one.program.op_index >= 0, atlas.simulate(TINY, "1f1b").best.single.program.op_index >= 0)


def test_what_is_no_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(TINY), "--out", str(tmp_path / "r.html")]) == 2
    assert "atlas card" in capsys.readouterr().err
    with pytest.raises(AtlasError, match="not the folder of a run"):
        run_summary(tmp_path)
    with pytest.raises(AtlasError, match="no such file or folder"):
        run_summary(tmp_path / "nothing")
    (tmp_path / "run.json").write_text("{")
    (tmp_path / "run.timeline").write_text("x")
    with pytest.raises(AtlasError, match=r"run\.json"):
        run_summary(tmp_path)
