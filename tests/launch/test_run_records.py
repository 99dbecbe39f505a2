"""Logs of workers are kept, rotated and shown; `run.json` tells what happened in a run."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from atlas.errors import WorkerError
from atlas.launch import worker_logs
from atlas.launch.run_record import RunRecord
from atlas.launch.supervisor import RestartPolicy, run_with_restarts
from atlas.launch.worker_logs import MAX_ATTEMPTS, TAIL_LINES, WorkerLogs, log_folder


def monitor(first_step: int, num_done: int, *saved: int) -> Any:
    return SimpleNamespace(first_step=first_step, num_done=num_done, saved_steps=list(saved))


def test_the_tail_has_the_path_and_the_last_fifty_lines(tmp_path: Path) -> None:
    logs = WorkerLogs(log_folder(tmp_path, 3, "east", 0))
    assert logs.file("p0.s1") == tmp_path / "attempt-3" / "east" / "host0" / "p0.s1.log"
    logs.file("p0.s1").write_text("".join(f"line {k}\n" for k in range(200)))
    head, *lines = logs.tail("p0.s1").splitlines()
    assert head == f"the last {TAIL_LINES} lines of {logs.file('p0.s1')}:"
    assert [line.strip() for line in lines] == [f"line {k}" for k in range(150, 200)]
    assert logs.tail("p0.s0") == ""
    logs.close()
    assert logs.file("p0.s1").exists()


def test_a_large_log_is_rotated_while_a_worker_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_logs, "MAX_BYTES", 100)
    logs = WorkerLogs(tmp_path)
    with logs.file("p0.s0").open("a") as file:
        file.write("x" * 200)
        file.flush()
        logs.rotate()
        file.write("after\n")
    assert (tmp_path / "p0.s0.log.1").stat().st_size == 200
    assert logs.file("p0.s0").read_text() == "after\n"


def test_logs_of_attempts_long_ago_are_deleted(tmp_path: Path) -> None:
    for attempt in range(1, MAX_ATTEMPTS + 3):
        log_folder(tmp_path, attempt, "east", 0).mkdir(parents=True)
    assert not (tmp_path / "attempt-2").exists()
    assert (tmp_path / "attempt-3").exists()


def test_the_record_has_attempts_reasons_checkpoints_and_goodput(tmp_path: Path) -> None:
    seconds = iter(range(0, 1000, 10))
    record = RunRecord(tmp_path, {"run": "small", "steps": 10}, lambda: float(next(seconds)))
    with pytest.raises(WorkerError), record.attempt(1, {"east/site0": ["p0.s0"]}, monitor(0, 6, 2, 4)):
        raise WorkerError("worker p0.s0 was killed by SIGKILL; the last lines\n  of its log")
    again = RunRecord(tmp_path, {"run": "small", "steps": 10}, lambda: float(next(seconds)))
    with again.attempt(2, {"east/site0": ["p0.s0"]}, monitor(4, 10, 6, 8, 10), {"east/site0": "node7"}):
        pass
    found = json.loads((tmp_path / "run.json").read_text())
    first, second = found["attempts"]
    assert (first["first_step"], first["last_step"], first["checkpoints"]) == (0, 6, [2, 4])
    assert first["reason"] == "worker p0.s0 was killed by SIGKILL; the last lines"
    assert (second["reason"], second["hosts"]) == ("done", {"east/site0": ["p0.s0"]})
    assert second["machines"] == {"east/site0": "node7"}
    assert (found["steps_kept"], found["steps_done"]) == (10, 12)
    assert found["goodput_steps_per_s"] == pytest.approx(10 / found["wall_s"], rel=1e-3)


def test_log_lines_follow_the_sentence_about_the_restart() -> None:
    said: list[str] = []
    errors = [WorkerError("it died; the last 1 lines of x.log:\n  oops")]

    def attempt() -> int:
        if errors:
            raise errors.pop()
        return 1

    assert run_with_restarts(attempt, lambda: 0, RestartPolicy(), said.append, lambda s: None) == 1
    assert said == ["it died; the last 1 lines of x.log:\n  oops\nRestart 1 of 5 in a row, in 1 s"]
