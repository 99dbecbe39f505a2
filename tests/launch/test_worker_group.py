"""Who leads a group hears answers in any order, and the first trouble at once."""

from __future__ import annotations

import time
from typing import Any

import pytest

from atlas.errors import WorkerError
from atlas.launch.worker_processes import WorkerGroup, WorkerMessage


class Group(WorkerGroup):
    """Two workers at two sites; what they say is put in by the test."""

    def __init__(self) -> None:
        super().__init__(["p0.s0", "p0.s1"])

    def say(self, name: str, message: dict[str, Any] | None) -> None:
        self._said.put(WorkerMessage(name, message, time.monotonic_ns()))

    def tell(self, name: str, message: dict[str, Any]) -> None: ...

    def how_it_died(self, name: str) -> str:
        return "was killed"


def test_a_quick_worker_may_speak_before_a_slow_site_has_answered() -> None:
    group = Group()
    group.say("east", {"prepared": 1})
    group.say("p0.s0", {"listening": 7})
    group.say("west", {"prepared": 2})
    group.say("p0.s1", {"listening": 8})
    assert group.hear("prepared", 1.0, of=["east", "west"]) == {"east": 1, "west": 2}
    assert group.hear("listening", 1.0) == {"p0.s0": 7, "p0.s1": 8}


@pytest.mark.parametrize(
    ("trouble", "told"), [({"error": "no room"}, "p0.s0 failed: no room"), (None, "p0.s0 was killed")]
)
def test_trouble_is_heard_whoever_was_asked(trouble: dict[str, Any] | None, told: str) -> None:
    group = Group()
    group.say("east", {"prepared": 1})
    group.say("p0.s0", trouble)
    with pytest.raises(WorkerError, match=told):
        group.hear("prepared", 1.0, of=["east", "west"])
