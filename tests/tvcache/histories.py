"""Random rollouts on a small world, played with a cache and without: outputs and final states have to be equal.

The world has tools of every effect: reads, mutations, failures that change half of the state, errors that are values,
volatile reads and a volatile mutation that writes which rollout made it. Used by the tests and by
`bench/tvcache_histories.py`.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tvcache import Cache, Snapshots, Tool
from tvcache.environments.memory import MemoryEnvironment
from tvcache.stores import CallStore

Call = tuple[str, dict[str, Any]]
SEAT = threading.local()
"""Which rollout this thread plays: what a volatile mutation sees of the world outside."""


def get(state: dict[str, Any], k: str) -> Any:
    return state["kv"].get(k)


def total(state: dict[str, Any]) -> Any:
    return {"n": state["n"], "keys": sorted(state["kv"])}


def find(state: dict[str, Any], k: str) -> Any:
    return state["kv"][k]


def raw(state: dict[str, Any]) -> bytes:
    return repr(state["kv"]).encode()


def put(state: dict[str, Any], k: str, v: Any) -> Any:
    old = state["kv"].get(k)
    state["kv"][k] = v
    return old


def bump(state: dict[str, Any]) -> int:
    state["n"] += 1
    return int(state["n"])


def take(state: dict[str, Any], k: str) -> Any:
    if k not in state["kv"]:
        state["n"] += 10
        raise LookupError("no key", k)
    return state["kv"].pop(k)


def half(state: dict[str, Any], k: str) -> str:
    state["kv"][k] = "half"
    if state["n"] % 2:
        raise ValueError("odd", state["n"])
    return "whole"


def odd_output(state: dict[str, Any]) -> Any:
    state["n"] += 2
    return (state["n"], "a tuple is no JSON")


def peek(state: dict[str, Any]) -> Any:
    return {"seen": state["n"], "by": SEAT.value}


def shake(state: dict[str, Any]) -> Any:
    state["kv"]["shaken"] = SEAT.value
    return SEAT.value


WORLD = {f.__name__: f for f in (get, total, find, raw, put, bump, take, half, odd_output, peek, shake)}
TOOLS = [
    *(Tool(name, "reads") for name in ("get", "total", "raw")),
    Tool("find", "reads"),
    Tool("put", "mutates"),
    Tool("take", "mutates", errors=(LookupError,)),
    Tool("peek", "volatile", changes_state=False),
    Tool("shake", "volatile"),
]
"""bump, half and odd_output are not declared: they mutate."""
KEYS, VALUES = ("a", "b"), (1, 2.5, "SKIP", "", None, [1], {"z": 1, "a": 2})


class Unreliable(MemoryEnvironment):
    """Whose copies fail now and then, and whose kept copies may vanish."""

    chance: random.Random
    share = 0.0

    def fork(self) -> Unreliable:
        if self.chance.random() < self.share:
            raise OSError(28, "No space left on device")
        copy = super().fork()
        made = Unreliable(copy.state, copy.tools)
        made.chance, made.share = self.chance, self.share
        return made


def random_call(chance: random.Random) -> Call:
    name = chance.choices(list(WORLD), weights=[6, 3, 3, 2, 6, 4, 3, 1, 1, 1, 0.5])[0]
    needs = {"get": ("k",), "find": ("k",), "take": ("k",), "half": ("k",), "put": ("k", "v")}.get(name, ())
    return name, {word: chance.choice(KEYS if word == "k" else VALUES) for word in needs}


def random_group(chance: random.Random, num_rollouts: int = 8, max_calls: int = 12) -> list[list[Call]]:
    """Rollouts that share beginnings, as those of one task do."""
    group: list[list[Call]] = []
    for _ in range(num_rollouts):
        begin = chance.choice(group) if group and chance.random() < 0.7 else []
        kept = begin[: chance.randint(0, len(begin))]
        group.append(kept + [random_call(chance) for _ in range(chance.randint(0, max_calls - len(kept)))])
    return group


def new_state() -> dict[str, Any]:
    return {"kv": {}, "n": 0}


def outcome(call: Any) -> Any:
    """What a call gave, or raised."""
    try:
        return call()
    except (LookupError, ValueError) as error:
        return type(error).__name__, error.args


def uncached(seat: int, calls: Sequence[Call]) -> tuple[list[Any], Any]:
    SEAT.value = seat
    world = MemoryEnvironment(new_state(), WORLD)
    return [outcome(lambda n=n, a=a: world.execute(n, dict(a))) for n, a in calls], world.state


def cached(cache: Cache, task: str, seat: int, calls: Sequence[Call], make: Any) -> tuple[list[Any], Any]:
    SEAT.value = seat
    with cache.rollout(task, make) as rollout:
        outputs = [outcome(lambda n=n, a=a: rollout.call(n, dict(a))) for n, a in calls]
        return outputs, rollout.environment().state  # type: ignore[attr-defined]


def check_group(group: Sequence[Sequence[Call]], seed: int, store: CallStore | None = None, task: str = "t") -> Cache:
    """Play a group twice, eight at once, with a random policy, budget and failing copies; compare each rollout."""
    chance = random.Random(seed)
    share = chance.choice((0.0, 0.0, 0.3))

    def make() -> Unreliable:
        made = Unreliable(new_state(), WORLD)
        made.chance, made.share = chance, share
        return made

    snapshots = Snapshots(max_count=chance.choice((0, 1, 3, 64)), policy=chance.choice(("measured", "always", "never")))
    cache = Cache(store, TOOLS, snapshots=snapshots, audit=chance.choice((0.0, 0.2)), seed=seed)
    expected = [uncached(seat, calls) for seat, calls in enumerate(group)]
    with ThreadPoolExecutor(8) as pool:
        for again in range(2):
            found = list(pool.map(lambda p: cached(cache, task, p[0], p[1], make), enumerate(group)))
            for seat, (got, want) in enumerate(zip(found, expected, strict=True)):
                assert got == want, f"seed {seed}, pass {again}, rollout {seat}: {group[seat]}\n got {got}\nwant {want}"
    cache.audit.drain()
    assert not cache.counters.differences, f"seed {seed}: {cache.counters.differences}"
    assert len(snapshots) <= snapshots.max_count
    return cache
