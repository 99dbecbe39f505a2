"""A worker process handles messages in any order."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import asdict

from atlas.ir.assemble import with_optimizer
from atlas.ir.program import Layout
from atlas.ir.text import to_text
from atlas.launch.worker_processes import WorkerProcesses
from atlas.runtime.assignment import Assignment, stand_in
from atlas.schedules.classic import one_f_one_b

NAME = "p0.s0"
FAILS = """
import os
from atlas.runtime import process

class Group:
    def __del__(self):
        os.abort()

def serve(*args):
    group = Group()
    raise RuntimeError("not connected")

process._serve = serve
process.main()
"""
"""A worker that fails, and whose process group aborts the process when it is destroyed."""


def test_a_message_before_the_start_is_not_taken_for_a_clock_request() -> None:
    """A save of an earlier attempt may be complete by then."""
    program = with_optimizer(one_f_one_b(Layout(1, 1, 1, ("east",))))
    assignment = Assignment(0, to_text(program), stand_in(width=16, length=8, microbatch=2), num_steps=1)
    with WorkerProcesses("atlas.runtime.process", [NAME]) as workers:
        workers.send(NAME, {"assignment": asdict(assignment)})
        workers.wait_for("listening", 60)
        workers.send(NAME, {"channels": []})
        workers.wait_for("ready", 60)
        workers.send(NAME, {"complete": [[0, 2]]})
        workers.request([NAME], {"clock": 0}, "clock", 10)
        workers.send(NAME, {"start_ns": 0})
        found = workers.wait_for("result", 60, meanwhile=lambda name, message: "step" in message)
    assert found[NAME]["steps"] == 1


def test_a_worker_that_fails_destroys_nothing_before_it_ends() -> None:
    ended = subprocess.run([sys.executable, "-c", FAILS], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert (ended.returncode, "not connected" in ended.stdout) == (1, True), ended.stderr
