"""`atlas train --dc` with checkpoints in an object store, against a real S3 server (moto) on loopback."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from free_ports import free_port
from multi_dc_runs import Run, hashes, hashes_of, run_datacenters, train_options, write_job
from s3_servers import ABSENT, served

from atlas.runtime.checkpoint.manifest import complete_ids
from atlas.runtime.checkpoint.place import below, store_at

pytestmark = pytest.mark.skipif(bool(ABSENT), reason=f"not installed: {', '.join(ABSENT)} (CONTRIBUTING.md)")
TWO = ("east", "west")
NUM_STEPS = 12


@pytest.fixture(scope="module", autouse=True)
def _server() -> Iterator[None]:
    with served():
        yield


@pytest.fixture
def undisturbed(tmp_path: Path) -> dict[str, str]:
    """Hashes of the last step, saved in folders."""
    folders = {dc: tmp_path / dc for dc in TWO}
    run = run_datacenters(write_job(tmp_path, *TWO), folders, train_options(NUM_STEPS, save_every=2))
    assert run.codes == dict.fromkeys(TWO, 0)
    return hashes(folders, NUM_STEPS)


def in_bucket(places: Mapping[str, str], step: int) -> dict[str, str]:
    return hashes_of([store_at(below(place, "own")) for place in places.values()], step)


@pytest.mark.parametrize("is_shared", [False, True])
def test_a_run_resumes_from_the_bucket_with_the_same_bits(
    tmp_path: Path, undisturbed: dict[str, str], *, is_shared: bool
) -> None:
    """A worker is killed in the middle; the datacenters have one prefix, or one each."""
    places = {dc: "s3://atlas/one" if is_shared else f"s3://atlas/each/{dc}" for dc in TWO}
    pids: dict[str, int] = {}
    killed: list[int] = []

    def kill(run: Run, step: int) -> None:
        if step == 5 and not killed:
            killed.append(pids["p0.s1"])
            os.kill(killed[0], signal.SIGKILL)

    folders = {dc: tmp_path / f"unused-{dc}" for dc in TWO}
    settings = {dc: {"checkpoints": place} for dc, place in places.items()}
    run = run_datacenters(
        write_job(tmp_path, *TWO),
        folders,
        train_options(NUM_STEPS, save_every=2),
        settings=settings,
        on_start=lambda run, now: pids.update(now),
        on_step=kill,
    )
    assert run.codes == dict.fromkeys(TWO, 0), run.errors
    assert run.starts == 2
    assert any("resumed from the checkpoint of step" in line for line in run.said)
    assert in_bucket(places, NUM_STEPS) == undisturbed
    assert not any(folder.exists() for folder in folders.values())


@pytest.mark.slow
def test_the_command_trains_and_resumes_on_two_hosts_without_a_common_folder(
    tmp_path: Path, undisturbed: dict[str, str]
) -> None:
    """Three commands: some steps, two more from other folders, and a bucket that does not exist."""
    job, place = tmp_path / "job.yaml", "s3://atlas/command"

    def train(steps: int, where: str, place: str = place) -> dict[str, subprocess.CompletedProcess[str]]:
        rendezvous = f"127.0.0.1:{free_port()}"
        common = ["--rendezvous", rendezvous, "--device", "cpu", "--steps", str(steps), "--save-every", "2"]
        common += ["--schedule", "1f1b", "--learning-rate", "3e-3", "--model", "job", "--data", "shipped"]
        started = {}
        for dc in TWO:
            folder = tmp_path / where / dc
            folder.mkdir(parents=True)
            words = [sys.executable, "-m", "atlas", "train", str(job), "--dc", dc, "--checkpoints", place, *common]
            started[dc] = subprocess.Popen(
                [*words, "--runs", str(folder)], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
        said = {dc: process.communicate(timeout=120) for dc, process in started.items()}
        return {dc: subprocess.CompletedProcess([], p.returncode, *said[dc]) for dc, p in started.items()}

    for steps, where in ((NUM_STEPS - 2, "first"), (NUM_STEPS, "second")):
        ended = train(steps, where)
        assert [one.returncode for one in ended.values()] == [0, 0], {dc: one.stderr for dc, one in ended.items()}
    assert f"resumed from the checkpoint of step {NUM_STEPS - 2}" in ended["east"].stdout + ended["east"].stderr
    assert complete_ids([store_at(below(place, "own"))])[-1].step == NUM_STEPS
    assert in_bucket({"all": place}, NUM_STEPS) == undisturbed
    refused = train(NUM_STEPS, "third", "s3://none/run")["west"]
    assert refused.returncode == 2
    assert "s3://none/run: the bucket cannot be read" in refused.stderr
    assert "Traceback" not in refused.stderr
