"""`atlas`, `atlas schedules`, `atlas view`, `atlas compare`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from cli_runner import Atlas

from atlas import __version__
from atlas.cli import COMMANDS
from atlas.ir.store import load_timeline, save_timeline
from atlas.ir.text import from_text
from atlas.schedules import SCHEDULES


def test_help_names_every_command(atlas: Atlas) -> None:
    for words in ((), ("--help",)):
        said = atlas(*words)
        assert said.code == 0
        assert all(name in said.out for name in COMMANDS)
    assert atlas("--version").out == f"atlas {__version__}\n"


def test_schedules_are_listed(atlas: Atlas) -> None:
    said = atlas("schedules")
    assert all(name in said.out for name in SCHEDULES)
    assert [row["schedule"] for row in json.loads(atlas("schedules", "--json").out)] == list(SCHEDULES)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_shows_its_program_as_text_that_can_be_read_back(atlas: Atlas, name: str) -> None:
    said = atlas("schedules", "--show", name, "tiny.yaml", "--tries", "10")
    assert said.code == 0
    program = from_text(said.out)
    assert program.num_pipelines == 2
    assert program.rank_dc == ("east", "east", "west", "west")


def test_a_schedule_shows_its_program_for_torch(atlas: Atlas) -> None:
    said = atlas("schedules", "--show", "1f1b", "tiny.yaml", "--torch")
    assert said.out.splitlines()[3].startswith("3F0,3B0,3F1,3B1")


def test_view_writes_a_page_next_to_the_file(atlas: Atlas, tmp_path: Path) -> None:
    atlas("simulate", "tiny.yaml", "--schedule", "1f1b", "--save", "run.timeline")
    said = atlas("view", "run.timeline")
    assert said.code == 0
    assert "wrote run.html" in said.err
    assert (tmp_path / "run.html").exists()
    assert "1f1b" in said.out


def test_file_names_leave_out_special_characters_of_a_timeline_name(atlas: Atlas, tmp_path: Path) -> None:
    atlas("simulate", "tiny.yaml", "--schedule", "1f1b", "--save", "a.timeline")
    odd = load_timeline(tmp_path / "a.timeline")
    save_timeline(tmp_path / "b.timeline", replace(odd, program=replace(odd.program, name="../x/\ny")))
    said = atlas("view", "a.timeline", "b.timeline", "--trace", "t.json")
    assert said.err.splitlines() == ["wrote t-1f1b-many.json", "wrote t-.._x_y-many.json"]


def test_the_page_never_overwrites_its_timeline_file(atlas: Atlas, tmp_path: Path) -> None:
    atlas("simulate", "tiny.yaml", "--schedule", "1f1b", "--save", "run.html")
    assert "wrote run.html.html" in atlas("view", "run.html").err


def test_compare_takes_files_or_a_job_and_a_schedule(atlas: Atlas, tmp_path: Path) -> None:
    atlas("simulate", "tiny.yaml", "--schedule", "1f1b", "--save", "run.timeline")
    said = atlas("compare", "run.timeline", "tiny.yaml:gpipe", "--page", "both.html")
    assert said.code == 0
    assert "gpipe (simulated) against 1f1b (simulated)" in said.out
    assert max(map(len, said.out.splitlines())) <= 80
    assert (tmp_path / "both.html").exists()
    found = json.loads(atlas("compare", "run.timeline", "tiny.yaml:gpipe", "--json").out)
    assert found["a"]["schedule"] == "1f1b"
    assert found["difference"]["ratio"] == pytest.approx(found["b"]["iteration_s"] / found["a"]["iteration_s"])


def test_a_timeline_against_itself_shows_no_difference(atlas: Atlas) -> None:
    found = json.loads(atlas("compare", "tiny.yaml:1f1b", "tiny.yaml:1f1b", "--json").out)
    assert found["difference"]["ratio"] == 1.0
    assert found["difference"]["first_divergence"] is None


def test_compare_and_schedules_accept_a_plan(atlas: Atlas) -> None:
    assert atlas("plan", "tiny.yaml", "--tries", "0", "--out", "plan.yaml").code == 0
    found = json.loads(atlas("compare", "plan.yaml:1f1b", "plan.yaml:gpipe", "--json").out)
    assert found["a"]["schedule"] == "1f1b"
    program = from_text(atlas("schedules", "--show", "1f1b", "plan.yaml").out)
    assert program.num_microbatches == found["a"]["peak_in_flight"] * 4


def test_unrelated_jobs_are_not_compared(atlas: Atlas) -> None:
    said = atlas("compare", "tiny.yaml:gpipe", str(Path(__file__).parents[2] / "examples" / "gpt-a.yaml") + ":gpipe")
    assert said.code == 2
    assert "unrelated jobs cannot be compared" in said.err
    assert "dc1, dc2, dc3" in said.err
