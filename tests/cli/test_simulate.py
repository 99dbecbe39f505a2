"""`atlas simulate`: its figures, its files, and what it says."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from cli_runner import Atlas
from shipped_jobs import SHIPPED

from atlas.ir.store import load_timeline

FAST = ("--schedule", "1f1b", "--schedule", "gpipe")
PROMISED = {
    "schedule",
    "tcp",
    "sharing",
    "iteration_s",
    "utilization",
    "lower_bound_s",
    "num_events",
    "engine_s",
    "peak_in_flight",
    "bubbles_s",
}


def test_the_default_is_every_schedule_on_many_connections_and_three_on_one(atlas: Atlas) -> None:
    said = atlas("simulate", "tiny.yaml", "--json", "--tries", "30")
    assert said.code == 0
    rows = json.loads(said.out)
    one = [row["schedule"] for row in rows if row["tcp"] == "one"]
    many = [row["schedule"] for row in rows if row["tcp"] == "many"]
    assert one == ["gpipe", "1f1b", "varuna"]
    assert many == ["gpipe", "1f1b", "1f1b-eager", "interleaved", "varuna", "zero-bubble", "atlas"]
    for row in rows:
        assert set(row) >= PROMISED
        assert set(row["bubbles_s"]) == {"fill", "drain", "wan", "peer", "sync"}
        assert row["source"] == "simulated"
        assert row["lower_bound_s"] <= row["iteration_s"]
        busy_s = row["utilization"] * row["iteration_s"] * row["num_workers"]
        assert busy_s + sum(row["bubbles_s"].values()) == pytest.approx(row["iteration_s"] * row["num_workers"])
    atlas_row = rows[-1]
    assert all(atlas_row["iteration_s"] <= row["iteration_s"] for row in rows if row["schedule"] != "zero-bubble")
    assert min(row["speedup"] for row in rows) == 1.0


def test_the_table_fits_eighty_columns_and_is_labelled_simulated(atlas: Atlas) -> None:
    said = atlas("simulate", "tiny.yaml", *FAST)
    assert said.code == 0
    assert max(map(len, said.out.splitlines())) <= 80
    assert "…" not in said.out
    assert "simulated" in said.out
    assert "critical path" in said.out


def test_the_same_seed_gives_the_same_figures(atlas: Atlas) -> None:
    words = ("simulate", "tiny.yaml", "--schedule", "atlas", "--tries", "40", "--seed", "3", "--json")
    first, second = (json.loads(atlas(*words).out)[0] for _ in range(2))
    first.pop("engine_s")
    second.pop("engine_s")
    assert first == second


def test_one_connection_never_takes_turns_and_is_slower(atlas: Atlas) -> None:
    def row(tcp: str) -> dict[str, object]:
        said = atlas("simulate", "tiny.yaml", "--schedule", "atlas", "--tcp", tcp, "--tries", "30", "--json")
        found: dict[str, object] = json.loads(said.out)[0]
        return found

    one, many = row("one"), row("many")
    assert one["sharing"] is False
    assert one["iteration_s"] > many["iteration_s"]  # type: ignore[operator]


def test_set_changes_a_key_of_the_job(atlas: Atlas) -> None:
    near, far = (
        json.loads(atlas("simulate", "tiny.yaml", *FAST, "--json", "--set", f"cluster.wan.latency_ms={ms}").out)
        for ms in (1, 80)
    )
    assert all(a["iteration_s"] < b["iteration_s"] for a, b in zip(near, far, strict=True))


def test_every_kind_of_file_is_written_and_listed(atlas: Atlas, tmp_path: Path) -> None:
    said = atlas(
        "simulate", "tiny.yaml", "--schedule", "1f1b", "--page", "p.html", "--svg", "f.svg", "--png", "f.png",
        "--trace", "t.json", "--save", "run.timeline",
    )  # fmt: skip
    assert said.code == 0
    for name, start in (("p.html", b"<!doctype html>"), ("f.svg", b"<svg"), ("f.png", b"\x89PNG"), ("t.json", b"{")):
        assert (tmp_path / name).read_bytes().startswith(start), name
        assert f"wrote {name}" in said.err
    assert load_timeline(tmp_path / "run.timeline").meta["tcp"] == "many"


def test_several_schedules_get_a_file_each(atlas: Atlas, tmp_path: Path) -> None:
    assert atlas("simulate", "tiny.yaml", *FAST, "--save", "run.timeline").code == 0
    assert sorted(p.name for p in tmp_path.glob("*.timeline")) == ["run-1f1b-many.timeline", "run-gpipe-many.timeline"]


def test_out_writes_all_files_into_a_folder(atlas: Atlas, tmp_path: Path) -> None:
    said = atlas("simulate", "tiny.yaml", *FAST, "--out", "new/folder", "--json")
    assert said.code == 0
    names = {p.name for p in (tmp_path / "new/folder").iterdir()}
    assert names >= {"results.json", "page.html", "figure.svg", "run-1f1b-many.timeline"}
    assert json.loads((tmp_path / "new/folder/results.json").read_text()) == json.loads(said.out)


def test_several_iterations_report_the_steady_iteration_time(atlas: Atlas) -> None:
    row = json.loads(atlas("simulate", "tiny.yaml", "--schedule", "1f1b", "--iterations", "4", "--json").out)[0]
    assert 0 < row["steady_s"] <= row["iteration_s"]
    assert "steady" in atlas("simulate", "tiny.yaml", "--schedule", "1f1b", "--iterations", "4").out


def test_monte_carlo_runs_spread_around_the_nominal_time(atlas: Atlas) -> None:
    words = ("simulate", "tiny.yaml", "--schedule", "1f1b", "--monte-carlo", "30", "--set", "jitter.compute=0.2")
    spread = json.loads(atlas(*words, "--json").out)[0]["spread"]
    assert spread["runs"] == 30
    assert spread["p5_s"] < spread["p50_s"] < spread["p95_s"] <= spread["worst_s"]
    assert "median" in atlas(*words).out


def test_the_headline_of_a_page_has_the_spread(atlas: Atlas, tmp_path: Path) -> None:
    words = ("simulate", "tiny.yaml", "--schedule", "1f1b", "--monte-carlo", "9", "--set", "jitter.wan=0.2")
    atlas(*words, "--page", str(tmp_path / "page.html"))
    assert re.search(
        r'"verdict": "1f1b: .* without jitter, .* with it \(90 % of 9 runs: ', (tmp_path / "page.html").read_text()
    )


def test_monte_carlo_without_jitter_is_refused(atlas: Atlas) -> None:
    said = atlas("simulate", "tiny.yaml", "--schedule", "1f1b", "--monte-carlo", "5")
    assert said.code == 2
    assert "jitter" in said.err


def test_a_schedule_that_does_not_fit_in_memory_is_marked(atlas: Atlas) -> None:
    # Without recompute GPipe keeps the activations of all microbatches; 1F1B of as many as there are stages.
    words = ("simulate", "tiny.yaml", *FAST, "--set", "recompute=false", "--set", "memory_gib=4.5", "--json")
    rows = {row["schedule"]: row for row in json.loads(atlas(*words).out)}
    assert not rows["gpipe"]["fits"]
    assert rows["gpipe"]["peak_gib"] > rows["gpipe"]["memory_gib"]
    table = atlas(*words[:-1])
    assert "gpipe does not fit in memory: it needs" in table.out


def test_interleaved_is_skipped_with_a_reason_and_an_error_when_named(atlas: Atlas) -> None:
    change = ("--set", "model.layers=5", "--tries", "10")
    said = atlas("simulate", "tiny.yaml", "--json", *change)
    assert said.code == 0
    assert "interleaved skipped: 8 stages are more than the model's 5 layers" in said.err
    asked = atlas("simulate", "tiny.yaml", "--schedule", "interleaved", *change)
    assert asked.code == 2
    assert "8 stages are more" in asked.err


def test_an_interleaved_job_runs_under_every_schedule(atlas: Atlas) -> None:
    said = atlas("simulate", "tiny.yaml", "--json", "--set", "interleave=2", "--schedule", "interleaved", *FAST)
    assert [row["schedule"] for row in json.loads(said.out)] == ["interleaved", "1f1b", "gpipe"]


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_shipped_job_can_be_simulated(atlas: Atlas, path: Path) -> None:
    said = atlas("simulate", str(path), "--schedule", "1f1b", "--schedule", "varuna", "--json")
    assert said.code == 0, said.err
    assert all(row["fits"] for row in json.loads(said.out))
