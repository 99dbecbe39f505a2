"""A coordinator on a host of its own: started again after a crash it finds the workers running and follows them."""

from __future__ import annotations

from pathlib import Path

import pytest
from multi_dc_runs import hashes, job_text, run_datacenters, train_options, write_job

from atlas.cli import main
from atlas.errors import AtlasError
from atlas.launch.ledger import Ledger
from atlas.launch.run_state import FILE, ResumePoint, RunningAttempt, StateFile

TWO = ("east", "west")
NUM_STEPS = 8
SETTINGS = train_options(NUM_STEPS, save_every=2, grace_s=20, patience_s=120)


def test_workers_go_on_while_the_coordinator_is_started_again(tmp_path: Path) -> None:
    job = write_job(tmp_path, *TWO)
    plain, folders = ({dc: tmp_path / name / dc for dc in TWO} for name in ("plain", "crashed"))
    undisturbed = run_datacenters(job, plain, SETTINGS)
    run = run_datacenters(job, folders, SETTINGS, state=tmp_path / "state", crash_after=(2, 3, 6))
    assert run.codes == {"east": 0, "west": 0, "coordinator": 0}, (run.errors, run.said)
    assert run.starts == 1, "no worker was started again"
    assert run.said.count("the coordinator was restarted; the workers kept running, and step 2 was done") == 1
    assert run.losses == undisturbed.losses, "no step is missing from the reports"
    assert hashes(folders, NUM_STEPS) == hashes(plain, NUM_STEPS)


def test_the_state_survives_and_attempts_are_counted(tmp_path: Path) -> None:
    first = StateFile(tmp_path, "plan")
    before = first.state
    running = RunningAttempt(ResumePoint(4, 1, 4, {"a/site0": "b/site0"}, True), {"a/site0": 1 << 61}, "9f", 6)
    first.next_attempt()
    first.update(running=running, lost=(("east", 2),), num_hosts={"east": 4})
    with pytest.raises(AtlasError, match=r"another coordinator uses this folder\. A run has one coordinator"):
        StateFile(tmp_path, "plan")
    first.close()
    again = StateFile(tmp_path, "plan")
    assert again.state == first.state
    assert (again.state.epoch, again.state.attempt) == (before.epoch + 1, 1)
    assert again.state.running == running
    again.close()
    other = StateFile(tmp_path, "another plan")
    assert (other.state.epoch, other.state.lost, other.state.running) == (first.state.epoch, (), None)
    other.close()


def test_a_damaged_state_is_named(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text("{")
    with pytest.raises(AtlasError, match=rf"{FILE}: not the state of a coordinator .*Delete it"):
        StateFile(tmp_path, "plan")


def test_a_launcher_keeps_what_a_new_coordinator_must_receive() -> None:
    ledger = Ledger()
    bodies = [{"listening": 1}, {"step": 4}, {"saved": [0, 4]}, {"step": 5}, {"saved": [0, 6]}, {"result": 1}, None]
    for body in bodies:
        ledger.add({"from": "p0.s0", "message": body})
    assert [m["message"] for m in ledger.messages] == bodies[1:]
    ledger.done(5)
    ledger.complete([[0, 6]])
    assert [m["message"] for m in ledger.messages] == [{"step": 5}, {"saved": [0, 6]}, {"result": 1}, None]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["train", "--dc", "east", "--coordinator", "a:1", "--rendezvous", "a:1"], "give --coordinator if"),
        (["train", "--dc", "east", "--coordinator", "nowhere"], "--coordinator nowhere: must be HOST:PORT"),
        (["coordinator", "--state", "state", "--listen", "7700"], "--listen 7700: must be HOST:PORT"),
        (["coordinator", "--state", "job.yaml"], "job.yaml: cannot be used (File exists). Choose another folder"),
    ],
)
def test_flags_of_a_coordinator_that_make_no_sense(
    words: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("job.yaml").write_text(job_text(*TWO))
    assert main([words[0], "job.yaml", *words[1:]]) == 2
    assert says in capsys.readouterr().err


def test_a_datacenter_may_not_have_the_coordinators_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "job.yaml").write_text(job_text("east", "coordinator"))
    assert main(["coordinator", str(tmp_path / "job.yaml"), "--state", str(tmp_path / "state")]) == 2
    assert "that name is reserved for the coordinator" in capsys.readouterr().err
    assert not (tmp_path / "state").exists()
