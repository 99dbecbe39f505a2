"""Photonic rails of a run over several datacenters: each controls its own, also over several hosts; a switch that fails
ends the run with its name, or leaves the circuits as they are."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from multi_dc_runs import Run, job_text, losses_alone, run_datacenters, train_options

from atlas.cli import main
from atlas.errors import AtlasError
from atlas.fabric.switch import SwitchError
from atlas.launch import rails
from atlas.launch.prepared_job import prepare_job
from atlas.launch.site_rails import require_switch
from atlas.spec import Job, load_job

sys.path.insert(0, str(Path(__file__).parents[1] / "fabric"))
from optical_switch import Device, running

NUM_STEPS = 4
OPTIONS = train_options(NUM_STEPS, save_every=1, grace_s=1.5, patience_s=60)
TWO = ("east", "west")


def photonic_job(folder: Path, **fabric: Any) -> Job:
    """Two pipelines; east has two stages of each and photonic rails."""
    written = yaml.safe_load(job_text(*TWO, num_microbatches=2, pp=3))
    east = written["cluster"]["datacenters"][0]
    east |= {"nodes": 4, "fabric": {"kind": "photonic", "reconfigure_ms": 20, **fabric}}
    written["pipelines_per_cell"] = 2
    file = folder / "job.yaml"
    file.write_text(yaml.dump(written))
    return load_job(file)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, type[Device]]]:
    monkeypatch.setattr(rails, "DEADLINE_S", 120.0)  # on a busy host the switch answers late, but it answers
    with running() as found:
        yield found


def run_on(job: Job, folder: Path, root: str, launchers: tuple[str, ...] = TWO, **more: Any) -> Run:
    folders = {name: folder / name.replace("/", "-") for name in launchers}
    switches = {name: {"switch": root} for name in launchers if name.startswith("east")}
    return run_datacenters(job, folders, OPTIONS, settings=switches, **more)


@pytest.mark.parametrize("launchers", [TWO, ("east 0/2", "east 1/2", "west")])
def test_each_datacenter_changes_its_circuits_on_its_switch(
    tmp_path: Path, device: tuple[str, type[Device]], launchers: tuple[str, ...]
) -> None:
    root, kind = device
    job = photonic_job(tmp_path)
    prepared = prepare_job(job, OPTIONS)
    assert prepared.costs.circuits is not None, "circuits change in this job"
    run = run_on(job, tmp_path, root, launchers)
    assert run.codes == dict.fromkeys(launchers, 0), run.errors
    assert run.losses == pytest.approx(losses_alone(job, NUM_STEPS), rel=1e-6)
    assert kind.num_changes == NUM_STEPS * 4, "of each step: two hops, two rings"
    ring = {("p0.s0/1", "p1.s0/0"), ("p1.s0/1", "p0.s0/0"), ("p0.s1/1", "p1.s1/0"), ("p1.s1/1", "p0.s1/0")}
    assert {(row["a"], row["b"]) for row in kind.rows} == ring, "the last circuits are those of the rings"


@pytest.mark.slow
def test_an_emulated_switch_is_the_default(tmp_path: Path) -> None:
    job = photonic_job(tmp_path)
    run = run_datacenters(job, {dc: tmp_path / dc for dc in TWO}, replace(OPTIONS, steps=2))
    assert run.codes == dict.fromkeys(TWO, 0), run.errors
    assert run.losses == pytest.approx(losses_alone(job, 2), rel=1e-6)


def test_a_switch_that_refuses_ends_the_run_with_its_name_and_the_next_start_goes_on(
    tmp_path: Path, device: tuple[str, type[Device]]
) -> None:
    root, kind = device
    kind.refuses_after = 9
    job = photonic_job(tmp_path)
    run = run_on(job, tmp_path, root)
    assert set(run.errors) == {"east"}
    assert "east: change " in str(run.errors["east"])
    assert "another user holds the lock" in str(run.errors["east"])
    assert run.codes["west"] == 2
    kind.refuses_after = 10**9
    again = run_on(job, tmp_path, root)
    assert again.codes == dict.fromkeys(TWO, 0), again.errors
    assert any("resumed from the checkpoint of step" in line for line in again.said)
    alone = losses_alone(job, NUM_STEPS)
    assert again.losses == pytest.approx({step: alone[step] for step in again.losses}, rel=1e-6)
    assert NUM_STEPS in again.losses


def test_with_a_fallback_the_run_continues_and_says_why(tmp_path: Path, device: tuple[str, type[Device]]) -> None:
    root, kind = device
    kind.refuses_after = 5
    job = photonic_job(tmp_path, fallback="ring")
    run = run_on(job, tmp_path, root)
    assert run.codes == dict.fromkeys(TWO, 0), run.errors
    said = [line for line in run.said if "does not change its circuits" in line]
    assert len(said) == 1
    assert "another user holds the lock" in said[0]


def test_a_switch_that_cannot_be_used_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = photonic_job(tmp_path)
    with pytest.raises(SwitchError, match="'polatis' is not an address of a switch"):
        require_switch("polatis", job, "east")
    with pytest.raises(AtlasError, match="west has no photonic rails"):
        require_switch("http://switch/restconf", job, "west")
    assert main(["train", str(tmp_path / "job.yaml"), "--emulate", "--switch", "http://switch/restconf"]) == 2
    assert "--switch needs --dc" in capsys.readouterr().err
