"""A run over several datacenters whose workers share one GPU learns as one process on the CPU does, also when a worker
is killed on the way.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from multi_dc_runs import OPTIONS, Run, losses_alone, run_datacenters, train_options, write_job

from atlas.launch.rehearse import rehearse

pytestmark = pytest.mark.gpu
STEPS = 40
"""Enough that a worker is killed on the way, and not after it: on a GPU these are quick."""
SETTINGS = train_options(STEPS, save_every=4, grace_s=5.0, patience_s=30)
ON_GPU = {"device": "cuda:0"}


@pytest.mark.parametrize("sites", [("east", "west"), ("east 0/2", "east 1/2", "west")])
def test_datacenters_on_one_gpu_learn_as_one_process(tmp_path: Path, sites: tuple[str, ...]) -> None:
    """A worker is killed on the way, too."""
    job = write_job(tmp_path, "east", "west", pp=4)
    pids, struck = dict[str, int](), threading.Event()

    def start(run: Run, found: Mapping[str, int]) -> None:
        pids.update(found)

    def step(run: Run, number: int) -> None:
        if number >= 5 and not struck.is_set():
            struck.set()
            os.kill(pids["p0.s1"], signal.SIGKILL)

    folders = {site: tmp_path / site.replace("/", "-") for site in sites}
    run = run_datacenters(job, folders, SETTINGS, settings=dict.fromkeys(sites, ON_GPU), on_start=start, on_step=step)
    assert run.codes == dict.fromkeys(sites, 0), run.errors
    assert run.starts == 2
    alone = losses_alone(job, STEPS)
    assert run.losses == pytest.approx(alone, rel=1e-4)


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble", "atlas"])
def test_a_rehearsal_on_one_gpu_learns_as_on_cpus(tmp_path: Path, schedule: str) -> None:
    job = write_job(tmp_path, "east", "west")
    options = replace(OPTIONS, schedule=schedule, steps=4, clip=1.0)
    on_gpu, on_cpu = (rehearse(job, replace(options, device=device)).run for device in ("cuda:0", "cpu"))
    assert on_gpu.losses == pytest.approx(on_cpu.losses, rel=1e-4)
    assert on_gpu.norms == pytest.approx(on_cpu.norms, rel=1e-3)
