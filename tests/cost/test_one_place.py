"""A link rule, a GPU type or a memory rule is changed in one place, and `simulate`, `plan` and `whatif` all follow.

Each test changes exactly one name of `atlas.cost` or `atlas.spec` and runs the commands as a user does.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from atlas.cli import main
from atlas.cost import cluster_arrays
from atlas.cost.cluster_arrays import GIB
from atlas.cost.memory import WorkerMemory
from atlas.spec import GPUS

KEEP = [
    word for key in ("tp", "pp", "microbatch", "cells", "pipelines_per_cell", "datacenters") for word in ("--keep", key)
]


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """Two datacenters with one pipeline across them."""
    path = tmp_path / "job.yaml"
    _write(path, "A100-40")
    return path


def _write(path: Path, gpu: str) -> None:
    data = {
        "name": "one-place",
        "model": {"layers": 4, "hidden": 2048, "heads": 16, "vocab": 32_000, "seq_len": 1024},
        "cluster": {
            "wan": {"latency_ms": 5.0, "pair_gbps": 5.0},
            "datacenters": [{"name": name, "nodes": 2, "gpus_per_node": 1, "gpu": gpu} for name in ("east", "west")],
        },
        "num_microbatches": 4,
        "pp": 2,
        "pipelines_per_cell": 2,
        "efficiency": 0.5,
        "placement": [{"dc": "east", "stages": 1}, {"dc": "west", "stages": 1}],
    }
    path.write_text(yaml.safe_dump(data))


def _figures(job: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, dict[str, Any]]:
    """The seconds and the fullest GPU that each command reports."""
    simulated = _run(["simulate", str(job), "--schedule", "1f1b", "--tcp", "many", "--json"], capsys)[0]
    planned = _run(["plan", str(job), *KEEP, "--tries", "0", "--json"], capsys)["plan"]["predicted"]
    asked = _run(["whatif", str(job), "--no-marginals", "--json"], capsys)["now"]
    every = {"simulate": simulated, "plan": planned, "whatif": asked}
    return {name: {key: one[key] for key in ("iteration_s", "peak_gib")} for name, one in every.items()}


def _run(words: list[str], capsys: pytest.CaptureFixture[str]) -> Any:
    assert main(words) == 0, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


def test_a_link_rule(job: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    before = _figures(job, capsys)
    whole = cluster_arrays.path_bps
    monkeypatch.setattr(cluster_arrays, "path_bps", lambda *words: whole(*words) / 4)
    after = _figures(job, capsys)
    for name in before:
        assert after[name]["iteration_s"] > 1.2 * before[name]["iteration_s"], name


def test_a_gpu_type(job: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    before = _figures(job, capsys)
    old = GPUS["A100-40"]
    slow = {"bf16_tflops": old.bf16_tflops / 10, "memory_gbytes_per_s": old.memory_gbytes_per_s / 10}
    monkeypatch.setitem(GPUS, "NEW-GPU", old.model_copy(update=slow))
    _write(job, "NEW-GPU")
    after = _figures(job, capsys)
    for name in before:
        assert after[name]["iteration_s"] > 2 * before[name]["iteration_s"], name


def test_a_memory_rule(job: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    before = _figures(job, capsys)
    static = WorkerMemory.static.fget
    assert static is not None
    monkeypatch.setattr(WorkerMemory, "static", property(lambda self: static(self) + 3 * GIB))
    after = _figures(job, capsys)
    for name in before:
        assert after[name]["peak_gib"] == pytest.approx(before[name]["peak_gib"] + 3), name
    monkeypatch.setattr(WorkerMemory, "static", property(lambda self: static(self) + 300 * GIB))
    for words in (["simulate", str(job)], ["plan", str(job)], ["whatif", str(job)]):
        assert main(words) == 2, words
        assert "GiB" in capsys.readouterr().err
