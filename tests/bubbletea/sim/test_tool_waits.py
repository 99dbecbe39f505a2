"""Idle windows of a fleet whose rollouts wait for tools, from the file that `tvcache replay --waits` writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atlas.errors import SpecError
from bubbletea.cli import main
from bubbletea.sim.simulated_cluster import simulated_cluster
from bubbletea.sim.waits import load_waits, waiting

ROOT = Path(__file__).parents[3]
WINDOWS = [[1.0, 3.0], [2.0, 0.0], [1.0, 1.0]]


def written(path: Path, **changes: Any) -> Path:
    found = {"format": "tvcache-waits-1", "with_cache": {"busy_idle_s": WINDOWS}, "without_cache": {"busy_idle_s": []}}
    path.write_text(json.dumps(found | changes))
    return path


def test_the_accelerators_have_the_windows_of_the_file(tmp_path: Path) -> None:
    cluster = waiting(simulated_cluster(ROOT / "examples" / "tiny.yaml"), load_waits(written(tmp_path / "w.json")))
    pattern = cluster.pattern
    assert pattern.period_ns == 8_000_000_000
    assert cluster.idle_share == pytest.approx(0.5)
    assert (pattern.start_ns < pattern.end_ns).all()
    assert (pattern.end_ns <= pattern.period_ns).all()
    assert list(pattern.idle_ns) == [4_000_000_000] * pattern.num_workers
    first = slice(int(pattern.ptr[0]), int(pattern.ptr[1]))
    assert np.array_equal(pattern.start_ns[first], [1_000_000_000, 7_000_000_000])


@pytest.mark.parametrize(
    "changes",
    [
        {"format": "other"},
        {"with_cache": {}},
        {"with_cache": {"busy_idle_s": []}},
        {"with_cache": {"busy_idle_s": [[1]]}},
        {"with_cache": {"busy_idle_s": [[-1, 2]]}},
        {"with_cache": {"busy_idle_s": [[0, 0]]}},
        {"with_cache": {"busy_idle_s": [["x", 1]]}},
    ],
)
def test_an_invalid_waits_file_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match="tvcache replay"):
        load_waits(written(tmp_path / "w.json", **changes))


def test_a_missing_file_and_jitter_are_refused_in_one_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = str(ROOT / "examples" / "tiny.yaml")
    for flags in (["--waits", str(tmp_path / "none")], ["--waits", str(written(tmp_path / "w")), "--jitter", "0.1"]):
        assert main(["simulate", job, "--requests", "synthetic", *flags]) == 2
    told = capsys.readouterr().err
    assert "there is no such file" in told
    assert "--jitter and --waits exclude each other" in told


def test_the_command_reports_the_value_of_remaining_waits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["simulate", str(ROOT / "examples" / "tiny.yaml"), "--requests", "synthetic", "--policy", "ours"]
    waits = written(tmp_path / "w.json", with_cache={"busy_idle_s": [[0.05, 0.15], [0.1, 0.1]]})
    assert main([*words, "--load", "0.2", "--periods", "2", "--waits", str(waits), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["schedule"] == "tool waits"
    assert found["training_utilization"] == pytest.approx(0.375)
    assert found["rows"][0]["fill"] > 0
