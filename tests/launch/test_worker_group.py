"""A worker group accepts replies in any order and raises the first error at once."""

from __future__ import annotations

import time
from typing import Any

import pytest

from atlas.errors import WorkerError
from atlas.launch.worker_processes import WorkerGroup, WorkerMessage


class Group(WorkerGroup):
    """Two workers in two datacenters; the test puts their messages in."""

    def __init__(self) -> None:
        super().__init__(["p0.s0", "p0.s1"])

    def receive(self, name: str, message: dict[str, Any] | None) -> None:
        self._received.put(WorkerMessage(name, message, time.monotonic_ns()))

    def send(self, name: str, message: dict[str, Any]) -> None: ...

    def exit_reason(self, name: str) -> str:
        return "was killed"


def test_a_fast_worker_may_send_before_a_slow_agent_has_replied() -> None:
    group = Group()
    group.receive("east", {"prepared": 1})
    group.receive("p0.s0", {"listening": 7})
    group.receive("west", {"prepared": 2})
    group.receive("p0.s1", {"listening": 8})
    assert group.wait_for("prepared", 1.0, of=["east", "west"]) == {"east": 1, "west": 2}
    assert group.wait_for("listening", 1.0) == {"p0.s0": 7, "p0.s1": 8}


@pytest.mark.parametrize(
    ("message", "error"), [({"error": "no room"}, "p0.s0 failed: no room"), (None, "p0.s0 was killed")]
)
def test_an_error_of_any_worker_is_raised_while_waiting_for_others(message: dict[str, Any] | None, error: str) -> None:
    group = Group()
    group.receive("east", {"prepared": 1})
    group.receive("p0.s0", message)
    with pytest.raises(WorkerError, match=error):
        group.wait_for("prepared", 1.0, of=["east", "west"])
