"""A worker process does as it is told, in whatever order it is told."""

from __future__ import annotations

from atlas.ir.assemble import with_optimizer
from atlas.ir.program import Layout
from atlas.ir.text import to_text
from atlas.launch.worker_processes import WorkerProcesses
from atlas.runtime.assignment import Assignment, stand_in
from atlas.schedules.classic import one_f_one_b

NAME = "p0.s0"


def test_what_is_ordered_before_the_start_is_not_taken_for_a_question() -> None:
    """A save of an earlier life may be complete by then."""
    program = with_optimizer(one_f_one_b(Layout(1, 1, 1, ("east",))))
    assignment = Assignment(0, to_text(program), stand_in(width=16, length=8, microbatch=2), num_steps=1)
    with WorkerProcesses("atlas.runtime.process", [NAME]) as fleet:
        fleet.tell(NAME, {"assignment": assignment.to_json()})
        fleet.hear("listening", 60)
        fleet.tell(NAME, {"channels": []})
        fleet.hear("ready", 60)
        fleet.tell(NAME, {"complete": [[0, 2]]})
        fleet.ask(NAME, {"clock": 0}, "clock", 10)
        fleet.tell(NAME, {"start_ns": 0})
        found = fleet.hear("result", 60, meanwhile=lambda name, message: "step" in message)
    assert found[NAME]["steps"] == 1
