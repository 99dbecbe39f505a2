"""Pages under weather: of a learnt path, and of runs of a Monte-Carlo."""

from __future__ import annotations

from pathlib import Path

import pytest
from path_samples import sampled, written

from atlas.cli import main

JOB = Path(__file__).parents[2] / "examples" / "tiny.yaml"


def test_the_page_of_a_path_says_how_to_read_it(tmp_path: Path) -> None:
    written(sampled(8), tmp_path / "east-west.packets.csv")
    page = tmp_path / "page.html"
    assert main(["wan", "learn", str(tmp_path), "--out", str(tmp_path / "a.path"), "--page", str(page)]) == 0
    text = page.read_text()
    assert "A model of this path, learnt from 8 s of recorded packets: a link of" in text
    assert "For x % of the time a sender gets at most y % of the capacity." in text
    assert "Round trips of the recorded packets" in text


def test_a_monte_carlo_page_has_the_distribution_of_iteration_times(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pages = tmp_path / "plain.html", tmp_path / "spread.html"
    job = [str(JOB), "--schedule", "1f1b", "--tcp", "many", "--set", "jitter.wan=0.1"]
    assert main(["simulate", *job, "--page", str(pages[0])]) == 0
    assert main(["simulate", *job, "--page", str(pages[1]), "--monte-carlo", "20", "--json"]) == 0
    plain, spread = (page.read_text() for page in pages)
    assert "Iteration times of all runs" not in plain
    assert "Iteration times of all runs" in spread
    assert "20 runs with the job&#x27;s jitter" in spread or "20 runs with the job's jitter" in spread
    assert "times_s" not in capsys.readouterr().out
