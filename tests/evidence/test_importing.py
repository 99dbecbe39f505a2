"""`atlas import`: a job and a profile from a card and traces, whose simulation takes the time of the traces."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from trace_samples import CARD, allreduce, kernel, step, write

import atlas
from atlas.cli import main
from atlas.spec import load_job

TINY = Path(__file__).parents[2] / "examples" / "tiny.yaml"


def data_point(folder: Path, *, pp: int = 1, compute_us: float = 800_000, **model: Any) -> Path:
    """Two ranks, 8 steps of a second; with pp = 2 the second rank computes twice as long."""
    folder.mkdir()
    card = copy.deepcopy(CARD)
    card["workload"]["model"]["model_arch"] |= model
    card["Model-executor"]["model_plan_parallelization"] |= {"pp": pp, "dp_replicate": 2 // pp}
    (folder / "card.yaml").write_text(yaml.safe_dump(card))
    for rank in range(2):
        factor = 0.5 if pp == 2 and rank == 0 else 1.0
        events = [step(k, 1e6 * k, 1e6) for k in range(8)]
        for k in range(8):
            events += [kernel("gemm", 1e6 * k, compute_us * factor), allreduce(1e6 * k + compute_us, 5e4)]
        write(folder / f"rank{rank}_trace.json", events)
    return folder


def test_an_imported_run_takes_as_long_as_its_traces(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    point, out = data_point(tmp_path / "point"), tmp_path / "job.yaml"
    assert main(["import", str(point), "--out", str(out)]) == 0
    assert "off by" in capsys.readouterr().out
    job = load_job(out)
    assert (job.pp, job.tp, job.microbatch, job.num_microbatches, job.pipelines_per_cell) == (1, 1, 1, 4, 2)
    found = atlas.simulate(out, "1f1b", iterations=3).best
    # 50 ms of each step are exposed communication, which the simulator prices by the network instead.
    assert found.timeline.iteration_ns / 1e9 == pytest.approx(0.95, rel=0.05)


def test_an_imported_run_is_planned_over_two_datacenters(tmp_path: Path) -> None:
    out = tmp_path / "job.yaml"
    assert main(["import", str(data_point(tmp_path / "point")), "--out", str(out), "--recompute"]) == 0
    data = yaml.safe_load(out.read_text())
    (here,) = data["cluster"]["datacenters"]
    data["cluster"]["datacenters"] = [{**here, "nodes": 1}, {**here, "name": "there", "nodes": 1}]
    out.write_text(yaml.safe_dump(data))
    plan = atlas.plan(out, tries=0).plan
    assert plan.predicted.iteration_s > 0
    assert {place.dc for group in plan.groups for place in group.placement} <= {"here", "there"}


def test_stages_get_the_time_of_their_ranks(tmp_path: Path) -> None:
    out = tmp_path / "job.yaml"
    assert main(["import", str(data_point(tmp_path / "point", pp=2)), "--out", str(out)]) == 0
    (entry,) = json.loads((tmp_path / "job.profile.json").read_text())["entries"]
    both = [layer["forward_s"] + layer["backward_s"] for layer in entry["layers"]]
    assert len(both) == 16
    assert both[0] == pytest.approx(0.4 / 8 / 8)  # seconds of the rank / microbatches / layers of the stage
    assert both[15] == pytest.approx(0.8 / 8 / 8)


def test_a_run_of_atlas_comes_back_as_it_was(tmp_path: Path) -> None:
    point, out = tmp_path / "point", tmp_path / "job.yaml"
    assert main(["card", str(TINY), "--schedule", "1f1b", "--steps", "3", "--out", str(point)]) == 0
    assert main(["import", str(point), "--out", str(out)]) == 0
    before = atlas.simulate(TINY, "1f1b").best.timeline.iteration_ns
    assert atlas.simulate(out, "1f1b").best.timeline.iteration_ns == pytest.approx(before, rel=0.01)


BAD: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "no parameters": ({"num_params": "TBD"}, ("card.yaml", "lacks num_params")),
    "too few parameters": ({"num_params": 1000}, ("card.yaml", "too small")),
    "no embedding": ({"num_params_embedding": None}, ("card.yaml", "num_params_embedding")),
}


@pytest.mark.parametrize("name", BAD)
def test_a_card_that_makes_no_job_is_refused(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change, words = BAD[name]
    point = data_point(tmp_path / "point", **change)
    assert main(["import", str(point), "--out", str(tmp_path / "job.yaml")]) == 2
    said = capsys.readouterr().err
    assert all(word in said for word in words), said
    assert not (tmp_path / "job.yaml").exists()


def test_traces_without_a_card_or_without_steps_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "rank0_trace.json", [kernel("gemm", 0, 5)])
    out = str(tmp_path / "job.yaml")
    assert main(["import", str(tmp_path), "--out", out]) == 2
    assert "no workload card" in capsys.readouterr().err
    (tmp_path / "card.yaml").write_text(yaml.safe_dump(CARD))
    assert main(["import", str(tmp_path), "--out", out]) == 2
    assert "no steps" in capsys.readouterr().err
    assert main(["import", str(tmp_path), "--out", out, "--gpu", "A1000"]) == 2
    assert "A100-80" in capsys.readouterr().err
