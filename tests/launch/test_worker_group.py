"""A worker group accepts replies in any order and raises the first error at once."""

from __future__ import annotations

import time
from typing import Any

import pytest

from atlas.errors import WorkerError
from atlas.launch.clocks import NUM_QUESTIONS, offsets_ns
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


class HostGroup(WorkerGroup):
    """Four workers on two hosts with clocks of their own; a worker's step arrives with each reply."""

    def __init__(self, ahead_ns: dict[str, int]) -> None:
        super().__init__([f"p{n}.s0" for n in range(4)])
        self.ahead_ns, self.num_asked, self.num_steps = ahead_ns, 0, 0

    @property
    def clock_of(self) -> dict[str, str]:
        return {name: f"east/site{number // 2}" for number, name in enumerate(self.names)}

    def send(self, name: str, message: dict[str, Any]) -> None:
        now_ns = time.monotonic_ns()
        self.num_asked, self.num_steps = self.num_asked + 1, self.num_steps + 1
        self._received.put(WorkerMessage("p0.s0", {"step": self.num_steps}, now_ns))
        self._received.put(WorkerMessage(name, {"clock": now_ns + self.ahead_ns[name]}, now_ns))

    def exit_reason(self, name: str) -> str:
        return ""


def test_the_clock_of_a_host_is_asked_once_for_all_its_workers_and_other_messages_keep_their_order() -> None:
    group = HostGroup({"east/site0": 0, "east/site1": 7_000_000_000})
    found = offsets_ns(group)
    assert group.num_asked == 2 * NUM_QUESTIONS
    assert [round(found[name] / 1e9) for name in group.names] == [0, 0, 7, 7]
    steps: list[int] = []

    def note(name: str, message: dict[str, Any]) -> bool:
        steps.append(message["step"])
        return True

    group._received.put(WorkerMessage("p0.s0", {"result": True}, 0))
    group.wait_for("result", 1, of=["p0.s0"], meanwhile=note)
    assert steps == list(range(1, group.num_steps + 1))


def test_a_warning_that_every_host_has_is_shown_once() -> None:
    group, shown = Group(), list[str]()
    group.warn = shown.append
    for name in group.names:
        group.receive(name, {"warning": "no compiler", "once": True})
        group.receive(name, {"warning": "slow disk"})
        group.receive(name, {"ready": True})
    group.wait_for("ready", 1.0)
    assert shown == ["worker p0.s0: no compiler", "worker p0.s0: slow disk", "worker p0.s1: slow disk"]
