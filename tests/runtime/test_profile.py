"""`atlas profile` measures here, and what it writes is what `atlas simulate` takes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from atlas.cli import main
from atlas.cost.profile import load_profile

TINY = Path(__file__).parents[2] / "examples" / "tiny.yaml"
SMALL = [f"--set=model.{key}" for key in ("hidden=64", "heads=2", "seq_len=32", "vocab=256")]


def test_a_measured_profile_prices_the_job_it_was_measured_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "here.json"
    assert (
        main(["profile", str(TINY), "--gpu", "A100-40", "--device", "cpu", "--repeats", "2", "--out", str(out), *SMALL])
        == 0
    )
    (entry,) = load_profile(out).entries
    assert entry.layer is not None
    assert entry.layer.weight_s is not None
    assert 0 < entry.layer.forward_s < 1
    assert 0 < entry.layer.weight_s < entry.layer.backward_s
    capsys.readouterr()
    flags = ["--schedule", "gpipe", "--json", "--set", f"profile={out}", *SMALL]
    assert main(["simulate", str(TINY), *flags]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    layers, microbatches = 8, 8
    assert row["iteration_s"] > layers / 4 * microbatches * entry.layer.forward_s


def test_entries_for_other_sizes_are_kept(tmp_path: Path):
    out = tmp_path / "here.json"
    for microbatch in (1, 2, 1):
        main(["profile", str(TINY), "--gpu", "A100-40", "--device", "cpu", "--repeats", "1", "--out", str(out),
              "--set", f"microbatch={microbatch}", *SMALL])  # fmt: skip
    assert sorted(entry.microbatch for entry in load_profile(out).entries) == [1, 2]


def test_without_cuda_profiling_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device here")
    assert main(["profile", str(TINY), "--gpu", "A100-40", "--out", str(tmp_path / "x.json"), *SMALL]) == 2
    assert "--device cpu" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
