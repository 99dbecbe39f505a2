"""A Timeline that is written step by step can be read after a kill at any time."""

from __future__ import annotations

import errno
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from atlas.cost.table import kind_costs, uniform_costs
from atlas.errors import AtlasError
from atlas.ir.assemble import repeated, with_optimizer
from atlas.ir.program import Layout, Program
from atlas.ir.store import AppendedLines, Journal, joined, load_journal, load_timeline
from atlas.ir.text import to_text
from atlas.ir.timeline import Timeline
from atlas.schedules.classic import one_f_one_b
from atlas.sim import simulate

PROGRAM = with_optimizer(one_f_one_b(Layout(2, 3, 4, ("a", "b", "c"))))
PER_KIND = kind_costs(forward_ns=30, backward_ns=60, sync_ns=10, step_ns=10)


def simulated(program: Program) -> Timeline:
    return simulate(program, uniform_costs(2, 3, PER_KIND, wan_boundaries=(0, 1), wan_ns=40, wan_latency_ns=20))


def passes(count: int, program: Program = PROGRAM) -> list[Timeline]:
    """One after the other, 1,000 ns apart."""
    first = simulated(program)
    times = [name for name in vars(first) if name.endswith("_ns")]
    return [replace(first, **{n: getattr(first, n) + 1000 * k for n in times}) for k in range(count)]


def written(path: Path, timelines: list[Timeline]) -> Path:
    journal = Journal(path)
    for step, timeline in enumerate(timelines, 1):
        journal.append(step, timeline)
    journal.close()
    return path


@pytest.mark.parametrize("iterations", [1, 2])
def test_what_was_written_is_read_back_as_one_timeline(tmp_path: Path, iterations: int) -> None:
    program = repeated(PROGRAM, iterations) if iterations > 1 else PROGRAM
    found = load_timeline(written(tmp_path / "run.jsonl", passes(3, program)))
    assert to_text(found.program) == to_text(repeated(PROGRAM, 3 * iterations))
    one = simulated(program)
    for worker in range(program.num_workers):
        mine, own = (slice(*p.worker_ptr[worker : worker + 2]) for p in (found.program, program))
        expected = np.concatenate([one.op_end_ns[own] + 1000 * k for k in range(3)])
        np.testing.assert_array_equal(found.op_end_ns[mine], expected)
    assert found.meta["last_step"] == 3
    if iterations == 1:
        assert found.iteration_ns == 1000


def test_joining_the_iterations_of_a_run_gives_the_run() -> None:
    """Every op and every transfer of a longer Program is where the pieces put it."""
    whole = simulated(repeated(PROGRAM, 2))
    halves = [_iteration(whole, k) for k in range(2)]
    found = joined(halves)
    assert to_text(found.program) == to_text(whole.program)
    for name in (name for name in vars(whole) if name.startswith(("op_", "transfer_"))):
        np.testing.assert_array_equal(getattr(found, name), getattr(whole, name), err_msg=name)


def _iteration(whole: Timeline, k: int) -> Timeline:
    ptr = PROGRAM.worker_ptr
    ops = np.concatenate([2 * ptr[w] + k * (ptr[w + 1] - ptr[w]) + np.arange(ptr[w + 1] - ptr[w]) for w in range(6)])
    transfers = np.arange(whole.program.num_transfers).reshape(2, 2, 2, 2, 4)[:, :, :, k].ravel()
    arrays = {
        n: getattr(whole, n)[ops if n.startswith("op_") else transfers]
        for n in vars(whole)
        if n.startswith(("op_", "transfer_"))
    }
    return replace(whole, program=PROGRAM, **arrays)


def test_a_run_killed_during_a_write_opens_without_its_last_step(tmp_path: Path) -> None:
    path = written(tmp_path / "run.jsonl", passes(3))
    whole = path.read_bytes()
    line = whole.rindex(b"\n", 0, -1) + 1
    for cut in range(line, len(whole) - 1, 97):
        path.write_bytes(whole[:cut])
        assert load_timeline(path).program.num_iterations == 2


def test_a_restarted_run_continues_in_the_same_file(tmp_path: Path) -> None:
    path = written(tmp_path / "run.jsonl", passes(3))
    path.write_bytes(path.read_bytes()[:-20])  # torn by a kill
    found = load_timeline(written(path, passes(2)))
    assert (found.program.num_iterations, found.meta["last_step"]) == (2, 2)


def test_only_the_last_steps_of_a_long_run_are_read(tmp_path: Path) -> None:
    path = written(tmp_path / "run.jsonl", passes(30))
    found = load_journal(path, last=4)
    assert (found.program.num_iterations, found.meta["last_step"]) == (4, 30)
    assert found.op_start_ns.min() == 0
    assert load_timeline(path).program.num_iterations == 20


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        "{",
        '{"format": "atlas-timeline-journal", "version": 1}\n',
        '{"format": "atlas-timeline-journal", "version": 9}\n{"step": 1}\n',
        '{"format": "atlas-timeline-journal", "version": 1, "program": 3}\n{"step": 1}\n',
    ],
)
def test_other_files_are_refused_in_one_sentence(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(text)
    with pytest.raises(AtlasError, match=r"x\.jsonl: "):
        load_timeline(path)


def test_an_array_of_another_length_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "run.jsonl", passes(1))
    head, step = map(json.loads, path.read_text().splitlines())
    step["op_end_ns"] = step["transfer_ready_ns"]
    path.write_text(f"{json.dumps(head)}\n{json.dumps(step)}\n")
    with pytest.raises(AtlasError, match="not a complete timeline of a run"):
        load_timeline(path)


def test_a_full_disk_costs_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        """Takes three bytes, then nothing."""

        def __init__(self, file: object) -> None:
            self.file, self.room = file, 3

        def write(self, data: bytes) -> int:
            if not self.room:
                raise OSError(errno.ENOSPC, "No space left on device")
            taken = self.file.write(data[: self.room])  # type: ignore[attr-defined]
            self.room = 0
            return int(taken)

    lines = AppendedLines(tmp_path / "x")
    lines.append({"n": 1})
    file = lines._file
    lines._file = Full(file)  # type: ignore[assignment]
    with pytest.raises(OSError, match="No space"):
        lines.append({"n": 2})
    lines._file = file
    lines.append({"n": 3})
    lines.close()
    assert (tmp_path / "x").read_text().splitlines() == ['{"n":1}', '{"n', '{"n":3}']


def test_a_path_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(AtlasError, match="cannot be written: No such file or directory"):
        Journal(tmp_path / "nowhere" / "x")
