"""The defects of the first public implementation of the idea (docs/tvcache.md lists them): none of them here."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from tvcache import Cache, Snapshots, Tool
from tvcache.environments import Environment
from tvcache.history import History
from tvcache.keys import Task, ToolCall, key
from tvcache.stores import Ask, Lease, MemoryStore
from tvcache.values import Value

Make = Callable[[], Environment]


def test_1_a_read_in_the_history_does_not_shift_what_is_replayed(cache: Cache, make: Make, executed: list[str]) -> None:
    with cache.rollout("t", make) as first:
        for name, arguments in (("write", {"text": "1"}), ("read", {}), ("write", {"text": "2"})):
            first.call(name, arguments)
    executed.clear()
    with cache.rollout("t", make) as second:
        for name, arguments in (("write", {"text": "1"}), ("read", {}), ("write", {"text": "2"})):
            second.call(name, arguments)
        assert second.call("write", {"text": "3"}) == 3
        assert executed in (["write 1", "write 2", "write 3"], ["write 2", "write 3"], ["write 3"])
        assert second.environment().state == ["1", "2", "3"]  # type: ignore[attr-defined]


def test_2_a_reward_belongs_to_the_whole_history(cache: Cache, make: Make) -> None:
    def score(environment: Any) -> str:
        return "".join(environment.state)

    def rewarded(*texts: str) -> Any:
        with cache.rollout("t", make) as rollout:
            for text in texts:
                rollout.call("write", {"text": text})
            return rollout.reward("score", score), rollout.hits

    assert rewarded("a", "c") == ("ac", 0)
    assert rewarded("a", "b", "c") == ("abc", 1)
    assert rewarded("a", "b", "c") == ("abc", 4)


def test_3_a_reward_of_a_b_a_is_not_a_reward_of_a(cache: Cache, make: Make) -> None:
    with cache.rollout("t", make) as rollout:
        for text in "aba":
            rollout.call("write", {"text": text})
        rollout.reward("score", lambda _: 1.0)
    with cache.rollout("t", make) as rollout:
        rollout.call("write", {"text": "a"})
        assert rollout.reward("score", lambda _: 0.0) == 0.0


def test_4_a_prefix_of_a_stored_history_is_not_a_hit() -> None:
    store, task = MemoryStore(), Task("t")
    x, y, z = (ToolCall(name, {}) for name in "xyz")
    at_x = key(History(task).state, x)
    at_y = key(at_x, y)
    store.finish(Ask.of(task, at_y, z, True), Lease(), Value(b'{"json":null}'))
    assert isinstance(store.begin(Ask.of(task, at_x, y, True), 0.0), Lease)
    assert store.begin(Ask.of(task, at_y, z, True), 0.0) == Value(b'{"json":null}')


class Slow:
    """A copy takes until the test releases it."""

    def __init__(self, during: Callable[[], None] | None = None) -> None:
        self.during, self.closed = during, False

    def fork(self) -> Slow:
        if self.during is not None:
            self.during()
        assert not self.closed, "closed while it was copied"
        return Slow(self.during)

    def execute(self, name: str, arguments: Any) -> Any:
        return None

    def close(self) -> None:
        self.closed = True


def grown(name: str, calls: int = 1, seconds: float = 1.0) -> History:
    history = History(Task(name))
    for number in range(calls):
        call = ToolCall("f", {"n": number})
        history.append(call, key(history.state, call), b"", seconds)
    return history


def test_5_listing_does_not_evict_a_snapshot_during_its_fork() -> None:
    snapshots, one, other = Snapshots(max_count=1), grown("one"), grown("other", seconds=9.0)
    snapshots.consider(Slow(), one, 1)

    def meanwhile() -> None:
        list(snapshots._kept), len(snapshots), snapshots.used_bytes  # looking changes nothing
        snapshots.consider(Slow(), other, 1)
        assert one.state in snapshots
        assert other.state not in snapshots

    with snapshots.lease(one.state) as leased:
        assert leased is not None
        meanwhile()
    snapshots.consider(Slow(), other, 1)
    assert other.state in snapshots
    assert one.state not in snapshots


def test_6_no_lease_remains_when_a_rollout_uses_its_own_environment(make: Make) -> None:
    cache = Cache(tools=[Tool("read", "reads")], audit=0.0, snapshots=Snapshots(policy="always"))
    for ending in "xyz":
        with cache.rollout("t", make) as rollout:
            for text in ("a", "b", ending, ending):
                rollout.call("write", {"text": text})
    now_s = time.monotonic()
    assert len(cache.snapshots) > 0
    assert not any(one.leased(now_s) or one.leases for one in cache.snapshots._kept.values())


def test_7_and_8_a_first_miss_and_a_missing_reward_need_no_option(make: Make) -> None:
    with Cache() as plain, plain.rollout("t", make) as rollout:
        assert rollout.reward("score", lambda _: 0.5) == 0.5
        assert rollout.call("write", {"text": "a"}) == 1
        assert rollout.reward("score", lambda _: 1.0) == 1.0
