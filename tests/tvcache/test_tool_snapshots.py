"""Which copies are kept, which go, and that losing one costs time but never a result."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from text_environment import Notebook

from tvcache import Cache, Snapshots, Tool
from tvcache.history import History
from tvcache.keys import Task, ToolCall, key
from tvcache.snapshots import Policy


class Box:
    """Of a given size; copies take no time."""

    def __init__(self, size: int = 1, works: bool = True) -> None:
        self.size, self.works, self.closed = size, works, False

    def fork(self) -> Box:
        if not self.works:
            raise OSError(28, "No space left on device")
        return Box(self.size)

    def execute(self, name: str, arguments: Any) -> Any:
        return None

    def close(self) -> None:
        self.closed = True

    def size_bytes(self) -> int:
        return self.size


def grown(seconds: list[float], task: str = "t") -> History:
    history = History(Task(task))
    for number, took_s in enumerate(seconds):
        call = ToolCall("f", {"n": number})
        history.append(call, key(history.state, call), b"", took_s)
    return history


def test_a_snapshot_is_kept_where_replay_takes_longer_than_copy_and_restore() -> None:
    snapshots, history = Snapshots(), grown([0.01, 0.01, 0.02, 0.1])
    snapshots._fork_s[history.states[0]] = 0.0175  # copy and restore: 0.035
    kept = []
    for length in range(1, 5):
        snapshots.consider(Box(), history, length)
        kept.append(history.states[length] in snapshots)
        snapshots._fork_s[history.states[0]] = 0.0175
    assert kept == [False, False, True, True]


@pytest.mark.parametrize(("policy", "count"), [("always", 4), ("never", 0)])
def test_always_and_never(policy: Policy, count: int) -> None:
    snapshots, history = Snapshots(policy=policy), grown([0.0] * 4)
    for length in range(1, 5):
        snapshots.consider(Box(), history, length)
    assert len(snapshots) == count


def test_budgets_hold_and_what_is_cheapest_to_rebuild_goes_first() -> None:
    snapshots = Snapshots(max_count=3, max_bytes=100)
    costly, cheap, middle = grown([9.0], "costly"), grown([1.0], "cheap"), grown([5.0], "middle")
    for history in (costly, cheap, middle):
        snapshots.consider(Box(30), history, 1)
    assert snapshots.used_bytes == 90
    newer = grown([6.0], "newer")
    snapshots.consider(Box(40), newer, 1)
    assert [h.state in snapshots for h in (costly, cheap, middle, newer)] == [True, False, True, True]
    snapshots.consider(Box(40), grown([2.0], "cheaper than all"), 1)  # not worth what would have to go
    assert [h.state in snapshots for h in (costly, cheap, middle, newer)] == [True, False, True, True]
    snapshots.consider(Box(1000), grown([99.0], "too large"), 1)
    assert snapshots.used_bytes <= 100
    assert len(snapshots) <= 3


def test_evicting_a_snapshot_raises_the_rebuild_cost_of_later_ones() -> None:
    snapshots, history = Snapshots(max_count=2), grown([1.0, 2.0])
    snapshots.consider(Box(), history, 1)
    snapshots.consider(Box(), history, 2)
    assert snapshots._kept[history.states[2]].rebuild_s == 2.0
    snapshots.consider(Box(), grown([1.5], "other"), 1)
    assert history.states[1] not in snapshots
    assert snapshots._kept[history.states[2]].rebuild_s == 3.0


def test_a_lease_that_is_never_released_expires() -> None:
    now_s = [0.0]
    snapshots = Snapshots(max_count=1, lease_s=10.0, clock=lambda: now_s[0])
    held, newer = grown([1.0], "held"), grown([2.0], "newer")
    snapshots.consider(Box(), held, 1)
    dead = snapshots.lease(held.state)
    dead.__enter__()  # and its owner is gone
    snapshots.consider(Box(), newer, 1)
    assert held.state in snapshots
    now_s[0] = 11.0
    snapshots.consider(Box(), newer, 1)
    assert newer.state in snapshots


def test_a_full_disk_means_no_snapshot(caplog: pytest.LogCaptureFixture) -> None:
    snapshots, history = Snapshots(), grown([1.0])
    snapshots.consider(Box(works=False), history, 1)
    assert len(snapshots) == 0
    assert "No space left" in caplog.text


def test_a_difference_drops_the_snapshots_after_it() -> None:
    snapshots, history, other = Snapshots(policy="always"), grown([1.0] * 3), grown([1.0], "other")
    for length in range(4):
        snapshots.consider(Box(), history, length)
    snapshots.consider(Box(), other, 1)
    snapshots.drop(history.states[2])
    assert [state in snapshots for state in history.states] == [True, True, False, False]
    assert other.state in snapshots


class Brittle(Notebook):
    """Whose copies may vanish: forking one fails."""

    broken = False

    def fork(self) -> Brittle:
        if self.broken:
            raise FileNotFoundError("the copy is gone")
        copy = super().fork()
        return Brittle(copy.state, self.executed, self.forks)


def test_a_snapshot_that_vanished_is_replaced_by_replay(
    executed: list[str], forks: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    cache = Cache(tools=[Tool("read", "reads")], audit=0.0, snapshots=Snapshots(policy="always"))

    def play(ending: str) -> Any:
        with cache.rollout("t", lambda: Brittle([], executed, forks)) as rollout:
            for text in ("a", "b", ending):
                rollout.call("write", {"text": text})
            return rollout.call("read", {})

    assert play("c") == "a\nb\nc"
    for one in cache.snapshots._kept.values():
        one.environment.broken = True  # type: ignore[attr-defined]
    executed.clear()
    assert play("d") == "a\nb\nd"
    assert executed == ["write a", "write b", "write d", "read"]
    assert "cannot be forked" in caplog.text


def test_a_miss_forks_the_nearest_snapshot_and_replays_the_rest(executed: list[str], forks: list[int]) -> None:
    cache = Cache(audit=0.0, snapshots=Snapshots(policy="always"))
    make: Callable[[], Notebook] = lambda: Notebook([], executed, forks)  # noqa: E731
    with cache.rollout("t", make) as rollout:
        for text in "abcd":
            rollout.call("write", {"text": text})
    third = next(state for state, one in cache.snapshots._kept.items() if one.length == 3)
    cache.snapshots._forget(third)
    executed.clear()
    with cache.rollout("t", make) as rollout:
        for text in "abc":
            rollout.call("write", {"text": text})
        assert rollout.call("write", {"text": "x"}) == 4
    assert executed == ["write c", "write x"]


def test_evicting_every_snapshot_removes_no_value(executed: list[str], forks: list[int]) -> None:
    cache = Cache(audit=0.0, snapshots=Snapshots(policy="always"))
    for _ in range(2):
        with cache.rollout("t", lambda: Notebook([], executed, forks)) as rollout:
            for text in "abc":
                rollout.call("write", {"text": text})
        cache.snapshots.close()
        assert len(cache.snapshots) == 0
    assert executed == ["write a", "write b", "write c"]


def test_a_long_history_stays_quick(executed: list[str], forks: list[int]) -> None:
    cache = Cache(tools=[Tool("read", "reads")], audit=0.0, snapshots=Snapshots(max_count=4))
    began_s = time.process_time()
    for _ in range(2):
        with cache.rollout("t", lambda: Notebook([], executed, forks)) as rollout:
            for number in range(2000):
                rollout.call("write", {"text": str(number)})
    assert time.process_time() - began_s < 20.0  # seconds of CPU; a quadratic walk took minutes
    assert cache.counters.hits == 2000
