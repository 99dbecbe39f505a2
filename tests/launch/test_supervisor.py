"""When and how often a run is restarted, and how a job is replanned on fewer datacenters."""

from __future__ import annotations

from pathlib import Path

import pytest
from multi_dc_runs import OPTIONS, write_job

from atlas.errors import AtlasError, WorkerError
from atlas.launch.prepared_job import prepare_job
from atlas.launch.replan import replan
from atlas.launch.supervisor import RestartPolicy, run_with_restarts
from atlas.planner.space import batch_of
from atlas.runtime.saving import global_batch_of


def test_restarts_without_progress_are_bounded_and_delayed_more_each_time() -> None:
    waited: list[float] = []
    said: list[str] = []

    def attempt() -> None:
        raise WorkerError("worker p0.s1 was killed by SIGKILL")

    with pytest.raises(WorkerError, match=r"SIGKILL.*Stopped after 3 restarts in a row.*checkpoints are unchanged"):
        run_with_restarts(
            attempt, lambda: 0, RestartPolicy(3, first_wait_s=1, max_wait_s=3), said.append, waited.append
        )
    assert waited == [1, 2, 3]
    assert said[1] == "worker p0.s1 was killed by SIGKILL. Restart 2 of 3 in a row, in 2 s"


def test_progress_resets_the_count_of_restarts() -> None:
    done, attempts = 0, 0

    def attempt() -> str:
        nonlocal done, attempts
        attempts += 1
        done += 10
        if attempts < 9:
            raise WorkerError("again")
        return "done"

    waited: list[float] = []
    assert run_with_restarts(attempt, lambda: done, RestartPolicy(2), lambda line: None, waited.append) == "done"
    assert waited == [1.0] * 8


def test_an_error_that_the_user_must_fix_is_not_retried() -> None:
    attempts = []

    def attempt() -> None:
        attempts.append(1)
        raise AtlasError("no such file")

    with pytest.raises(AtlasError, match="no such file"):
        run_with_restarts(attempt, lambda: 0, RestartPolicy(), lambda line: None, lambda s: None)
    assert len(attempts) == 1


def test_a_replanned_job_trains_on_the_same_batches(tmp_path: Path) -> None:
    job = write_job(tmp_path, "east", "west", "south")
    left = replan(job, ["west"])
    assert {dc.name for dc in left.cluster.datacenters} == {"east", "south"}
    assert batch_of(left) == batch_of(job)
    before = prepare_job(job, OPTIONS)
    after = prepare_job(left, OPTIONS, before)
    assert "west" not in after.datacenters
    batches = [global_batch_of(job.training, job.roles[0]) for job in (before, after)]
    assert batches[0] == batches[1]
    assert sum(after.training.model.layers_per_stage) == job.model.layers
    assert replan(job, ["west", "south"]).cluster.datacenters[0].name == "east"
    with pytest.raises(AtlasError, match="no datacenter is left"):
        replan(job, ["east", "west", "south"])
