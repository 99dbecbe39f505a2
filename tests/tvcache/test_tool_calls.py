"""What one process's cache does with calls: values, errors, volatile tools, bad arguments, equal calls at once."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tvcache import Cache, Task, Tool, TvcacheError
from tvcache.environments import Environment
from tvcache.environments.live import LiveEnvironment
from tvcache.environments.memory import MemoryEnvironment
from tvcache.errors import ReplayError
from tvcache.keys import ToolCall
from tvcache.stores import Ask, Lease, MemoryStore
from tvcache.values import Value

Make = Callable[[], Environment]


def one_tool(function: Callable[..., Any]) -> Make:
    return lambda: MemoryEnvironment({}, {"f": function})


@pytest.mark.parametrize("output", [b"", b"\x00\xff", "", None, "SKIP", 0, False, [], {}, {"b": 1, "a": 2}, "é\u2028"])
def test_every_stored_output_decodes_to_itself(output: Any) -> None:
    cache = Cache(tools=[Tool("f", "reads")], audit=0.0)
    for hits in (0, 1):
        with cache.rollout("t", one_tool(lambda _: output)) as rollout:
            found = rollout.call("f", {})
            assert found == output
            assert type(found) is type(output)
            assert rollout.hits == hits
            if isinstance(output, dict):
                assert list(found) == list(output)  # an agent reads the text: the order counts


@pytest.mark.parametrize("output", [(1, 2), {1: 2}, float("nan"), object(), "\ud83d", [b"x"], "x" * (17 << 20)])
def test_an_output_that_json_would_change_is_not_stored(output: Any) -> None:
    cache = Cache(tools=[Tool("f", "reads")], audit=0.0)
    for _ in range(2):
        with cache.rollout("t", one_tool(lambda _: output)) as rollout:
            assert rollout.call("f", {}) is output
            assert rollout.hits == 0


def test_changing_a_returned_output_does_not_change_the_stored_value() -> None:
    cache = Cache(tools=[Tool("f", "reads")], audit=0.0)
    for _ in range(3):
        with cache.rollout("t", one_tool(lambda _: {"rows": [1]})) as rollout:
            found = rollout.call("f", {})
            assert found == {"rows": [1]}
            found["rows"].append(2)


def test_changing_arguments_after_a_call_does_not_change_the_history(cache: Cache, make: Make) -> None:
    for _ in range(2):
        with cache.rollout("t", make) as rollout:
            arguments = {"text": "a"}
            rollout.call("write", arguments)
            arguments["text"] = "z"
            rollout.call("write", {"text": "b"})
            assert rollout.environment().state == ["a", "b"]  # type: ignore[attr-defined]


def test_errors_are_stored_only_if_the_tool_declares_them() -> None:
    tried: list[str] = []

    def f(_: Any) -> None:
        tried.append("f")
        raise LookupError("gone", 7)

    for tool, executions in ((Tool("f", "reads"), 2), (Tool("f", "reads", errors=(LookupError,)), 1)):
        tried.clear()
        cache = Cache(tools=[tool], audit=0.0)
        for _ in range(2):
            with cache.rollout("t", one_tool(f)) as rollout, pytest.raises(LookupError) as raised:
                rollout.call("f", {})
            assert raised.value.args == ("gone", 7)
        assert len(tried) == executions


def test_an_output_that_the_tool_does_not_accept_is_not_a_value() -> None:
    outputs = iter(["SQL Timeout", "rows", "never"])
    cache = Cache(tools=[Tool("f", "reads", accept=lambda text: "Timeout" not in text)], audit=0.0)
    found = []
    for _ in range(3):
        with cache.rollout("t", one_tool(lambda _: next(outputs))) as rollout:
            found.append(rollout.call("f", {}))
    assert found == ["SQL Timeout", "rows", "rows"]


def test_a_mutation_that_fails_half_way_makes_the_rest_private() -> None:
    def half(state: dict[str, Any]) -> None:
        state["n"] = state.get("n", 0) + 1
        raise OSError("half way")

    cache = Cache(tools=[Tool("look", "reads")], audit=0.0)
    tools = {"half": half, "look": lambda state: dict(state)}
    for _ in range(2):
        with cache.rollout("t", lambda: MemoryEnvironment({}, tools)) as rollout:
            assert rollout.call("look", {}) == {}
            with pytest.raises(OSError, match="half way"):
                rollout.call("half", {})
            assert rollout.private
            assert rollout.call("look", {}) == {"n": 1}
    assert cache.counters.hits == 1


def test_a_volatile_tool_is_never_cached_and_its_mutation_makes_the_rest_private(cache: Cache, make: Make) -> None:
    cache.declare(Tool("undo", "volatile"))
    for _ in range(2):
        with cache.rollout("t", make) as rollout:
            rollout.call("write", {"text": "a"})
            assert not rollout.private
            assert rollout.call("undo", {}) == "a"
            assert rollout.private
            assert rollout.call("write", {"text": "b"}) == 1
            assert rollout.call("read", {}) == "b"
    assert cache.counters.private == 6
    assert cache.counters.hits == 1


def test_a_volatile_read_leaves_the_rollout_shared(cache: Cache, make: Make) -> None:
    cache.declare(Tool("read", "volatile", changes_state=False))
    for hits in (0, 2):
        with cache.rollout("t", make) as rollout:
            rollout.call("write", {"text": "a"})
            rollout.call("read", {})
            rollout.call("write", {"text": "b"})
            assert rollout.hits == hits


def test_a_version_that_changes_during_a_run_begins_new_keys() -> None:
    cache = Cache(tools=[Tool("f", "reads", version="1")], audit=0.0)
    with cache.rollout("t", one_tool(lambda _: "old")) as rollout:
        assert rollout.call("f", {}) == "old"
    cache.declare(Tool("f", "reads", version="2"))
    with cache.rollout("t", one_tool(lambda _: "new")) as rollout:
        assert rollout.call("f", {}) == "new"


def test_two_tasks_with_one_name_and_different_images_share_nothing() -> None:
    cache = Cache(tools=[Tool("f", "reads")], audit=0.0)
    for image in ("sha256:a", "sha256:b"):
        with cache.rollout(Task("t", image), one_tool(lambda _, image=image: image)) as rollout:
            assert rollout.call("f", {}) == image


@pytest.mark.parametrize("arguments", [{"x": float("nan")}, {"x": object()}, {"x": "y" * 10_000_000}, {"x": {1: 2}}])
def test_uncacheable_arguments_are_executed_and_logged_once(arguments: Any, caplog: pytest.LogCaptureFixture) -> None:
    cache = Cache(tools=[Tool("f", "reads")], audit=0.0)
    with caplog.at_level(logging.WARNING, "tvcache"):
        for _ in range(2):
            with cache.rollout("t", one_tool(lambda _, x: "done")) as rollout:
                assert rollout.call("f", arguments) == "done"
                assert not rollout.private  # it only reads
    assert len(caplog.records) == 1
    assert "'f' runs without a cache" in caplog.text
    assert cache.counters.uncacheable == 2


def test_a_mutation_with_arguments_that_cannot_be_cached_makes_the_rest_private() -> None:
    cache = Cache(audit=0.0)
    with cache.rollout("t", one_tool(lambda _, x: "done")) as rollout:
        rollout.call("f", {"x": float("nan")})
        assert rollout.private


def test_64_equal_calls_at_once_are_executed_once() -> None:
    started, executed = threading.Barrier(64), []

    def f(_: Any) -> int:
        executed.append(1)
        return len(executed)

    cache = Cache(tools=[Tool("f", "reads")], audit=0.0)

    def play(_: int) -> Any:
        with cache.rollout("t", one_tool(f)) as rollout:
            started.wait(30)
            return rollout.call("f", {})

    with ThreadPoolExecutor(64) as pool:
        assert set(pool.map(play, range(64))) == {1}
    assert len(executed) == 1


def test_when_the_executing_caller_fails_the_others_execute_the_call() -> None:
    waiting, executed = threading.Event(), []

    def f(_: Any) -> str:
        executed.append(1)
        if len(executed) == 1:
            assert waiting.wait(30)
            raise ConnectionError("once")
        return "done"

    store = MemoryStore()
    cache = Cache(store, [Tool("f", "reads")], audit=0.0)

    def play() -> Any:
        with cache.rollout("t", one_tool(f)) as rollout:
            return rollout.call("f", {})

    with ThreadPoolExecutor(4) as pool:
        first = pool.submit(play)
        while not executed:
            pass
        others = [pool.submit(play) for _ in range(3)]
        waiting.set()
        with pytest.raises(ConnectionError):
            first.result(30)
        assert [other.result(30) for other in others] == ["done"] * 3


def test_a_call_that_never_ends_blocks_others_only_until_the_deadline() -> None:
    now_s = [0.0]
    store = MemoryStore(flight_s=10.0, clock=lambda: now_s[0])
    ask = Ask.of(Task("t"), b"", ToolCall("f", {}), False)
    dead = store.begin(ask, 0.0)
    assert isinstance(dead, Lease)
    assert dead.number
    assert store.begin(ask, 0.0) == Lease(0)  # no patience: executes beside it
    now_s[0] = 11.0
    second = store.begin(ask, 0.0)
    assert isinstance(second, Lease)
    assert second.number not in (0, dead.number)
    assert store.finish(ask, second, Value(b'{"json":2}')) == Value(b'{"json":2}')
    assert store.finish(ask, dead, Value(b'{"json":1}')) == Value(b'{"json":2}')  # the first wins


def test_a_live_environment_executes_skipped_calls_before_a_miss() -> None:
    cache = Cache(tools=[Tool("look", "reads")], audit=0.0)

    def played(ending: str) -> tuple[list[str], Any]:
        lines: list[str] = []

        def run(name: str, arguments: Any) -> Any:
            if name == "look":
                return list(lines)
            lines.append(arguments["text"])
            return len(lines)

        with cache.rollout("t", environment=LiveEnvironment(run)) as rollout:
            for text in ("a", "b", ending):
                rollout.call("add", {"text": text})
            return lines, rollout.call("look", {})

    assert played("c") == (["a", "b", "c"], ["a", "b", "c"])
    assert played("d") == (["a", "b", "d"], ["a", "b", "d"])
    assert played("d") == ([], ["a", "b", "d"])


def test_a_failed_replay_is_an_error_that_names_the_call(cache: Cache) -> None:
    fail = [False]

    def write(state: list[str], text: str) -> int:
        if fail[0]:
            raise ConnectionError("no network")
        state.append(text)
        return len(state)

    cache.snapshots.policy = "never"
    for text in ("b", "c"):
        with cache.rollout("t", lambda: MemoryEnvironment([], {"write": write})) as rollout:
            rollout.call("write", {"text": "a"})
            if text == "b":
                rollout.call("write", {"text": text})
                fail[0] = True
                continue
            with pytest.raises(ReplayError, match=r"call 1 \(write\) failed when it was executed again: no network"):
                rollout.call("write", {"text": text})


def test_a_task_name_is_only_a_name(cache: Cache, make: Make) -> None:
    for name in ("../../etc/passwd", "", "a" * 4000, "x\x00y"):
        with cache.rollout(name, make) as rollout:
            assert rollout.call("write", {"text": name}) == 1


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: Tool("f", "idempotent"),  # type: ignore[arg-type]
        lambda: Cache(audit=1.5),
        lambda: Cache().rollout("t"),
        lambda: Cache().rollout("t", dict, environment=LiveEnvironment(lambda name, arguments: None)),  # type: ignore[arg-type]
    ],
)
def test_contradictory_arguments_are_refused_with_a_message(wrong: Callable[[], object]) -> None:
    with pytest.raises(TvcacheError, match=r"declare|give|default"):
        wrong()


def test_a_reward_changes_nothing_for_the_calls_after_it(cache: Cache, make: Make) -> None:
    def scribble(environment: Any) -> int:
        environment.execute("write", {"text": "scribble"})
        return len(environment.state)

    for _ in range(2):
        with cache.rollout("t", make) as rollout:
            rollout.call("write", {"text": "a"})
            assert rollout.reward("score", scribble) == 2
            assert rollout.call("read", {}) == "a"
            assert rollout.environment().state == ["a"]  # type: ignore[attr-defined]
