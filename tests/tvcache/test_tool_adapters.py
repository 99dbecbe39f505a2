"""Functions, tool groups and verl's tools through the cache. Classes here have the interface of SkyRL-gym 0.4 and verl
0.9; bench/tvcache_adapters.py does the same with the packages themselves."""

from __future__ import annotations

import asyncio
import gc
import sys
from typing import Any, ClassVar

import pytest

from tvcache import Cache, TvcacheError
from tvcache.adapters.functions import rollout_of, tool
from tvcache.adapters.skyrl import is_value, wrap
from tvcache.adapters.verl import Sessions, cached

EXECUTED: list[Any] = []


@pytest.fixture(autouse=True)
def _fresh() -> None:
    EXECUTED.clear()


@tool(effect="reads")
def search(query: str, limit: int = 3) -> list[str]:
    EXECUTED.append(query)
    return [query] * limit


@tool(effect="mutates", errors=(KeyError,))
def remove(name: str) -> str:
    EXECUTED.append(name)
    if name == "none":
        raise KeyError(name)
    return f"removed {name}"


def test_a_decorated_function_is_cached_in_a_rollout_and_plain_outside() -> None:
    cache = Cache(audit=0.0)
    assert search("x") == ["x"] * 3
    for _ in range(2):
        with rollout_of(cache, "t") as rollout:
            assert search("x") == search(query="x") == search("x", limit=3) == ["x"] * 3
            assert search("x", 2) == ["x"] * 2
            assert remove("a") == "removed a"
            assert search("x") == ["x"] * 3
            with pytest.raises(KeyError, match="none"):
                remove("none")
    assert rollout.hits == 7
    assert EXECUTED == ["x", "x", "x", "a", "x", "none"]
    assert search.__name__ == "search"


def test_a_coroutine_function_is_refused_with_a_message() -> None:
    async def later() -> None: ...

    with pytest.raises(TvcacheError, match="coroutine"):
        tool()(later)


class ToolGroup:
    """As in SkyRL-gym: `execute_tool` looks tools up by `get_tool`."""

    def __init__(self) -> None:
        self.rows: list[str] = []

    def get_tool_names(self) -> list[str]:
        return ["look", "insert"]

    def get_tool(self, name: str) -> Any:
        return {"look": self.look, "insert": self.insert}.get(name)

    def execute_tool(self, name: str, *args: Any, **kwargs: Any) -> Any:
        found = self.get_tool(name)
        if found:
            return found(*args, **kwargs)
        raise ValueError(f"Tool '{name}' not found")

    def look(self, turns_left: int) -> str:
        EXECUTED.append("look")
        return f"{self.rows} {turns_left}"

    def insert(self, row: str) -> int:
        EXECUTED.append(row)
        self.rows.append(row)
        return len(self.rows)


def test_a_wrapped_tool_group_gives_the_same_observations() -> None:
    cache = Cache(audit=0.0)
    hits = []
    for ending in ("b", "b", "c"):
        plain, group = ToolGroup(), ToolGroup()
        rollout = wrap(group, cache, task="t", reads={"look"})
        for call in (("look", 3), ("insert", "a"), ("look", 2), ("insert", ending), ("look", 1)):
            assert group.execute_tool(*call) == plain.execute_tool(*call)
        with pytest.raises(ValueError, match="not found"):
            group.execute_tool("drop")
        hits.append(rollout.hits)
        rollout.close()
    assert hits == [0, 5, 3]


def test_a_wrapped_tool_group_refuses_unknown_names() -> None:
    with pytest.raises(TvcacheError, match="has no 'sql': there are look, insert"):
        wrap(ToolGroup(), Cache(), task="t", reads={"sql"})


def test_a_timeout_of_a_query_is_not_stored() -> None:
    assert is_value("<observation>rows</observation>")
    assert not is_value("\n\n<observation>SQL Timeout:\nselect 1</observation>")


class ToolResponse:
    def __init__(self, text: str | None = None, image: Any = None) -> None:
        self.text, self.image, self.video = text, image, None


class BaseTool:
    """As in verl 0.9."""

    name = "base"

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        return instance_id or "real", ToolResponse()

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        return ToolResponse("?"), 0.0, {}

    async def release(self, instance_id: str, **kwargs: Any) -> None: ...


class Notes(BaseTool):
    """Keeps its state where verl says: in `agent_data`."""

    name = "note"
    created: ClassVar[list[Any]] = []

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        self.created.append(kwargs)
        return await super().create(instance_id)

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        notes = kwargs["agent_data"].extra_fields.setdefault("notes", [])
        await asyncio.sleep(0.002 if parameters["text"] == "slow" else 0)
        notes.append(parameters["text"])
        EXECUTED.append(parameters["text"])
        if parameters["text"] == "picture":
            return ToolResponse("see", ["pixels"]), 0.0, {}
        return ToolResponse(" ".join(notes)), float(len(notes)), {"n": len(notes)}


class AgentData:
    def __init__(self, request_id: str, **tools_kwargs: Any) -> None:
        self.request_id, self.tools_kwargs, self.extra_fields = request_id, tools_kwargs, dict[str, Any]()


async def turn(note: Any, agent_data: AgentData, *texts: str) -> list[Any]:
    """As verl's agent loop: all calls of a turn at once, an instance for each."""

    async def call(text: str) -> Any:
        instance_id, _ = await note.create(create_kwargs={"sample": 1})
        try:
            response, reward, metrics = await note.execute(instance_id, {"text": text}, agent_data=agent_data)
            return response.text, reward, metrics
        finally:
            await note.release(instance_id)

    return await asyncio.gather(*map(call, texts))


def test_calls_of_one_turn_keep_their_order_and_rollouts_share_values() -> None:
    sessions = Sessions(Cache(audit=0.0))
    note = cached(Notes, sessions=sessions)()
    plain = Notes()

    async def play() -> list[list[Any]]:
        found = []
        for request in range(3):
            agent_data = AgentData(f"r{request}", sample=1)
            found.append(await turn(note, agent_data, "slow", "b", "c"))
            found[-1] += await turn(note, agent_data, "d")
        return found

    async def uncached() -> list[Any]:
        agent_data = AgentData("plain")
        return [(await turn(plain, agent_data, text))[0] for text in ("slow", "b", "c", "d")]

    expected = asyncio.run(uncached())
    EXECUTED.clear()
    assert asyncio.run(play()) == [expected] * 3
    assert EXECUTED == ["slow", "b", "c", "d"]
    assert sessions.cache.counters.hits == 8


def test_a_miss_after_hits_executes_what_was_skipped_in_the_rollouts_own_state() -> None:
    sessions = Sessions(Cache(audit=0.0))
    note = cached(Notes, sessions=sessions)()

    async def play(request: str, last: str) -> tuple[list[Any], Any]:
        agent_data = AgentData(request, sample=1)
        found = await turn(note, agent_data, "a", "b", last)
        return [text for text, _, _ in found], agent_data.extra_fields

    assert asyncio.run(play("1", "c"))[0] == ["a", "a b", "a b c"]
    assert asyncio.run(play("2", "d")) == (["a", "a b", "a b d"], {"notes": ["a", "b", "d"]})


def test_other_arguments_share_nothing_and_images_are_not_stored() -> None:
    sessions = Sessions(Cache(audit=0.0))
    note = cached(Notes, sessions=sessions)()

    async def play(request: str, sample: int, text: str) -> Any:
        return (await turn(note, AgentData(request, sample=sample), text))[0]

    for number in range(2):
        asyncio.run(play(f"a{number}", number, "a"))
        asyncio.run(play(f"p{number}", 0, "picture"))
    assert EXECUTED == ["a", "picture", "a", "picture"]


def test_a_rollout_ends_when_verl_drops_its_data() -> None:
    sessions = Sessions(Cache(audit=0.0))
    note = cached(Notes, effect="mutates", sessions=sessions)()

    async def play() -> None:
        agent_data = AgentData("1")
        await turn(note, agent_data, "a")
        assert len(sessions) == 1

    asyncio.run(play())
    gc.collect()
    assert len(sessions) == 0


def test_a_class_that_is_not_a_verl_tool_is_refused() -> None:
    with pytest.raises(TvcacheError, match="not a verl BaseTool"):
        cached(ToolGroup)
    assert "verl" not in sys.modules
