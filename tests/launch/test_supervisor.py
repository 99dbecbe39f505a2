"""How often, how soon and after what a group is started again; and the same job on fewer datacenters."""

from __future__ import annotations

from pathlib import Path

import pytest
from multi_dc_runs import OPTIONS, write_job

from atlas.errors import AtlasError, WorkerError
from atlas.launch.prepared_job import prepare_job
from atlas.launch.replan import replan
from atlas.launch.supervisor import RestartPolicy, run_with_restarts
from atlas.planner.space import batch_of


def test_failures_without_progress_are_bounded_and_ever_later() -> None:
    waited: list[float] = []
    said: list[str] = []

    def live() -> None:
        raise WorkerError("worker p0.s1 was killed by SIGKILL")

    with pytest.raises(WorkerError, match=r"SIGKILL.*Given up after 3 restarts in a row.*checkpoints are as they were"):
        run_with_restarts(live, lambda: 0, RestartPolicy(3, first_wait_s=1, max_wait_s=3), said.append, waited.append)
    assert waited == [1, 2, 3]
    assert said[1] == "worker p0.s1 was killed by SIGKILL. Restart 2 of 3 in a row, in 2 s"


def test_progress_begins_the_count_anew() -> None:
    done, lives = 0, 0

    def live() -> str:
        nonlocal done, lives
        lives += 1
        done += 10
        if lives < 9:
            raise WorkerError("again")
        return "done"

    waited: list[float] = []
    assert run_with_restarts(live, lambda: done, RestartPolicy(2), lambda line: None, waited.append) == "done"
    assert waited == [1.0] * 8


def test_what_somebody_must_mend_is_not_tried_again() -> None:
    lives = []

    def live() -> None:
        lives.append(1)
        raise AtlasError("no such file")

    with pytest.raises(AtlasError, match="no such file"):
        run_with_restarts(live, lambda: 0, RestartPolicy(), lambda line: None, lambda s: None)
    assert len(lives) == 1


def test_the_same_batches_without_a_datacenter(tmp_path: Path) -> None:
    job = write_job(tmp_path, "east", "west", "south")
    left = replan(job, ["west"])
    assert {dc.name for dc in left.cluster.datacenters} == {"east", "south"}
    assert batch_of(left) == batch_of(job)
    before = prepare_job(job, OPTIONS)
    after = prepare_job(left, OPTIONS, before)
    assert "west" not in after.datacenters
    assert after.global_batch == before.global_batch
    assert sum(after.training.model.layers_per_stage) == job.model.layers
    assert replan(job, ["west", "south"]).cluster.datacenters[0].name == "east"
    with pytest.raises(AtlasError, match="no datacenter is left"):
        replan(job, ["east", "west", "south"])
