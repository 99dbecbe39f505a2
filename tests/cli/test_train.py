"""`atlas train`: a rehearsal runs and is predicted; what cannot be run is refused with the reason."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from atlas.cli import main

TINY = Path(__file__).parents[2] / "examples" / "tiny.yaml"


def test_a_job_is_rehearsed_with_real_gradients(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "both.html"
    flags = ["--set=pp=2", "--set=pipelines_per_cell=1", "--set=num_microbatches=4", "--slower", "3", "--steps", "2"]
    assert main(["train", str(TINY), "--emulate", "--page", str(page), *flags]) == 0
    said = capsys.readouterr().out
    assert "iteration, simulated" in said
    assert "emulated" in said
    first, second = (float(x) for x in said.split("loss by step")[1].splitlines()[0].split(","))
    assert second < first
    assert page.stat().st_size > 10_000


def test_the_jobs_own_model_learns_the_shipped_text_and_goes_on_from_its_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = {"layers": 4, "hidden": 32, "heads": 2, "vocab": 256, "seq_len": 32, "tied_embeddings": "true"}
    flags = [f"--set=model.{key}={value}" for key, value in small.items()]
    flags += ["--set=pp=2", "--set=pipelines_per_cell=2", "--set=num_microbatches=2", "--set=precision=fp32"]
    flags += ["--model", "job", "--data", "shipped", "--device", "cpu", "--schedule", "atlas", "--clip", "1"]
    flags += ["--checkpoints", str(tmp_path / "saved"), "--log", str(tmp_path / "log")]
    losses = []
    for steps in (2, 4):
        assert main(["train", str(TINY), "--emulate", "--steps", str(steps), *flags]) == 0
        losses += [float(x) for x in capsys.readouterr().out.split("loss by step")[1].splitlines()[0].split(",")]
    assert len(losses) == 4
    assert losses[3] < losses[0]
    assert [json.loads(line)["step"] for line in (tmp_path / "log").read_text().splitlines()] == [1, 2, 3, 4]
    assert main(["train", str(TINY), "--emulate", "--steps", "4", *flags]) == 2
    assert "step 4 is done already" in capsys.readouterr().err


def test_a_plan_that_cannot_run_is_refused_with_its_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = tmp_path / "plan.yaml"
    assert main(["plan", str(TINY), "--tries", "0", "--out", str(plan)]) == 0
    text = plan.read_text()
    reason = "no, because the moon is full"
    plan.write_text("\n".join(f"runnable: {reason}" if x.startswith("runnable:") else x for x in text.splitlines()))
    capsys.readouterr()
    assert main(["train", str(plan), "--emulate"]) == 2
    assert "cannot execute this plan: the moon is full. Change that and plan again" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ([], "--emulate"),
        (["--emulate", "--dc", "east"], "--dc NAME"),
        (["--emulate", "--set=pp=8", "--set=pipelines_per_cell=4"], "16"),
    ],
)
def test_bad_flags_are_refused(flags: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(
            [
                "train",
                str(TINY),
                *flags,
                "--set=cluster.datacenters.east.nodes=32",
                "--set=cluster.datacenters.west.nodes=32",
            ]
        )
        == 2
    )
    assert says in capsys.readouterr().err
