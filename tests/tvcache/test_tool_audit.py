"""A share of hits is executed again; what differs is dropped, named and counted."""

from __future__ import annotations

import itertools
import logging
from typing import Any

import pytest

from tvcache import Cache, Tool
from tvcache.environments.live import LiveEnvironment
from tvcache.environments.memory import MemoryEnvironment


class Plain:
    """A dictionary without a fingerprint."""

    def __init__(self, state: dict[str, Any], tools: Any) -> None:
        self.inner = MemoryEnvironment(state, tools)

    def fork(self) -> Plain:
        return Plain(dict(self.inner.state), self.inner.tools)

    def execute(self, name: str, arguments: Any) -> Any:
        return self.inner.execute(name, arguments)

    def close(self) -> None:
        pass


def sneak(state: dict[str, Any]) -> str:
    state["n"] = state.get("n", 0) + 1
    return "ok"


def look(state: dict[str, Any]) -> Any:
    return state.get("n", 0)


READS = [Tool("sneak", "reads"), Tool("look", "reads")]


def play(cache: Cache, kind: Any, tools: Any, *calls: str) -> list[Any]:
    with cache.rollout("t", lambda: kind({}, tools)) as rollout:
        found = [rollout.call(name, {}) for name in calls]
    cache.audit.drain()
    return found


def test_a_mutating_tool_declared_reads_is_found_by_the_fingerprint(caplog: pytest.LogCaptureFixture) -> None:
    cache, tools = (
        Cache(tools=[Tool("sneak", "reads"), Tool("look", "reads")], audit=1.0),
        {"sneak": sneak, "look": look},
    )
    play(cache, MemoryEnvironment, tools, "sneak", "look")
    with caplog.at_level(logging.WARNING, "tvcache"):
        play(cache, MemoryEnvironment, tools, "sneak")
    assert cache.counters.differences == {"sneak": 1}
    assert "'sneak', declared `reads`: it changed the environment" in caplog.text
    assert cache.tool("sneak").effect == "mutates"
    assert play(cache, MemoryEnvironment, tools, "sneak", "look") == ["ok", 1]
    assert play(cache, MemoryEnvironment, tools, "look") == [0]  # the wrong value was dropped
    cache.close()


def test_a_mutating_tool_declared_reads_is_found_by_its_effect_on_others() -> None:
    cache, tools = (
        Cache(tools=[Tool("sneak", "reads"), Tool("look", "reads")], audit=1.0),
        {"sneak": sneak, "look": look},
    )
    play(cache, Plain, tools, "sneak", "look")  # stores look = 1 for the first state
    play(cache, Plain, tools, "look")
    assert cache.counters.differences == {"look": 1}
    assert play(cache, Plain, tools, "look") == [0]
    cache.close()


def test_a_tool_that_differs_from_run_to_run_is_volatile_from_then_on() -> None:
    numbers = itertools.count()
    cache, tools = Cache(tools=[Tool("f", "reads")], audit=1.0), {"f": lambda state: next(numbers)}
    found = [play(cache, Plain, tools, "f")[0] for _ in range(4)]
    assert cache.counters.differences == {"f": 1}
    assert found[:2] == [0, 0]
    assert found[2] != found[3]
    cache.close()


def test_a_replayed_mutation_that_differs_is_named(caplog: pytest.LogCaptureFixture) -> None:
    numbers = itertools.count()

    def f(state: dict[str, Any]) -> int:
        state["n"] = next(numbers)
        return int(state["n"])

    cache, tools = Cache(tools=[Tool("look", "reads")], audit=0.0), {"f": f, "look": look}
    cache.snapshots.policy = "never"
    assert play(cache, Plain, tools, "f", "look") == [0, 0]
    with caplog.at_level(logging.WARNING, "tvcache"), cache.rollout("t", lambda: Plain({}, tools)) as rollout:
        assert rollout.call("f", {}) == 0
        rollout.call("f", {})
        assert rollout.private
    assert cache.counters.differences == {"f": 1}
    assert "'f', declared `mutates`" in caplog.text
    cache.close()


def test_a_correct_value_is_kept_by_the_audit(cache: Cache, make: Any) -> None:
    cache.audit.share = 1.0
    for _ in range(3):
        with cache.rollout("t", make) as rollout:
            for name, arguments in (("write", {"text": "a"}), ("read", {}), ("write", {"text": "b"}), ("read", {})):
                rollout.call(name, arguments)
        cache.audit.drain()
    assert cache.counters.audits == cache.counters.hits == 8
    assert not cache.counters.differences
    cache.close()


def test_about_one_hit_in_a_hundred_is_executed_again(make: Any) -> None:
    cache = Cache(tools=[Tool("read", "reads")], seed=1)
    chosen = sum(cache.audit.chosen() for _ in range(20_000))
    assert 120 < chosen < 280


def test_without_copies_only_reads_are_executed_again() -> None:
    executed: list[str] = []

    def run(name: str, arguments: Any) -> str:
        executed.append(name)
        return name

    cache = Cache(tools=[Tool("read", "reads")], audit=1.0)
    for _ in range(2):
        with cache.rollout("t", environment=LiveEnvironment(run)) as rollout:
            rollout.call("read", {})
            rollout.call("write", {})
    assert executed == ["read", "write", "read"]
    assert cache.counters.audits == 1
    assert cache.counters.audits_skipped == 1
