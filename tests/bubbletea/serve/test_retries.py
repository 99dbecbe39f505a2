"""A 429's Retry-After holds: the same request, sent again at that time, is admitted although others have come in
between. On a clock of its own: requests end when the plan says, or later."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import random
import types
from collections import Counter
from collections.abc import Callable, Coroutine, Generator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from serving import TINY

from bubbletea.admit.records import Placement, PrefillRequest
from bubbletea.costs import LayerTime
from bubbletea.handoff import kv_store
from bubbletea.serve import admission
from bubbletea.serve.assemble import assemble
from bubbletea.serve.auth import ApiKeys
from bubbletea.serve.prefills import Refused
from bubbletea.serve.worker_windows import alone

SECOND = 1_000_000_000
NUM_WORKERS, ARENA_BYTES = 2, 64 << 20
LAYER = LayerTime(1e6, 1e6, 2e5, 0.0)
"""Of a worker that can do about 7 prompts of 200 tokens a second."""


class Clock:
    now_ns = 1000 * SECOND

    def monotonic_ns(self) -> int:
        return self.now_ns

    def monotonic(self) -> float:
        return self.now_ns / SECOND

    @types.coroutine
    def sleep(self, seconds: float) -> Generator[float, None, None]:
        yield seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in (admission, kv_store):
        monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(admission, "asyncio", SimpleNamespace(sleep=clock.sleep))
    return clock


class Clients:
    """Each client sends its next request when the last has ended. A refused request is sent again after its
    Retry-After, or is given up."""

    def __init__(
        self,
        clock: Clock,
        patience_s: float,
        *,
        returning: float = 1.0,
        store_tokens: int = 10**6,
        slow_s: float = 1.0,
        longest: int = 400,
    ) -> None:
        windows = replace(alone(NUM_WORKERS, ARENA_BYTES, 0.2, 0.3), layer=LAYER)
        parts = assemble(replace(TINY, split=1, arena_bytes=ARENA_BYTES), windows, ApiKeys.open_to_all())
        self.planner, self.admission = parts.dispatcher.planner, parts.dispatcher.admission
        self.store = parts.dispatcher.store
        self.store.budget_bytes = self.store.bytes_of(store_tokens)
        self.planner.set_alive(range(NUM_WORKERS), clock.now_ns)
        self.clock, self.patience_ns, self.returning = clock, int(patience_s * SECOND), returning
        self.slow_ns, self.longest = int(slow_s * SECOND), longest
        self.draw, self.numbers = random.Random(1), itertools.count()
        self.found: Counter[str] = Counter()
        self.late_ns: list[int] = []
        self._events: list[tuple[int, int, Callable[[], None]]] = []
        self._ends: dict[str, tuple[PrefillRequest, int]] = {}
        """By id: an admitted request, and the number of the event that ends it."""

    def run(self, num_clients: int, seconds: float) -> Counter[str]:
        for _ in range(num_clients):
            self._at(self.clock.now_ns, self._new)
        until_ns = self.clock.now_ns + int(seconds * SECOND)
        self._at(self.clock.now_ns, self._tick)
        while self._events[0][0] < until_ns:
            at_ns, _, happens = heapq.heappop(self._events)
            self.clock.now_ns = max(at_ns, self.clock.now_ns)
            happens()
        return self.found

    def _at(self, when_ns: int, happens: Callable[[], None]) -> int:
        number = next(self.numbers)
        heapq.heappush(self._events, (when_ns, number, happens))
        return number

    def _tick(self) -> None:
        self.admission.pass_time(self.clock.now_ns)
        for placement in self.planner.advance(self.clock.now_ns):
            self._follow(placement)
        self._at(self.clock.now_ns + 20_000_000, self._tick)

    def _new(self) -> None:
        self._ask(next(self.numbers), self.draw.randint(1, self.longest), "new")

    def _ask(self, number: int, tokens: int, what: str) -> None:
        now_ns = self.clock.now_ns
        request = PrefillRequest(f"{number} at {now_ns}", "", tokens, now_ns, now_ns + self.patience_ns)
        self._go_on(self.admission.admit(request, tokens + 4, number.to_bytes(8)), number, tokens, what)

    def ask(self, request: PrefillRequest, key: bytes = b"") -> None:
        """Raises Refused, or StopIteration if it is admitted."""
        self.admission.admit(request, request.prompt_tokens + 4, key).send(None)

    def _go_on(self, admitting: Coroutine[float, None, Any], number: int, tokens: int, what: str) -> None:
        try:
            sleeps_s = admitting.send(None)
            again = partial(self._go_on, admitting, number, tokens, what)
            self._at(self.clock.now_ns + int(sleeps_s * SECOND), again)
        except Refused as refused:
            self._refused(refused, number, tokens, what)
        except StopIteration as done:
            placement, request = done.value
            self.found[f"{what}, admitted"] += 1
            assert self.store.reserve(request.id, tokens, tokens + 4, at_workers=True) is not None
            self._ends[request.id] = request, -1
            if placement is not None:
                self._follow(placement)

    def _refused(self, refused: Refused, number: int, tokens: int, what: str) -> None:
        self.found[f"{what}, refused"] += 1
        assert refused.retry_s is not None
        if self.draw.random() < self.returning:
            at_ns = self.clock.now_ns + int(refused.retry_s * SECOND) + self.draw.randrange(self.slow_ns)
            self._at(at_ns, partial(self._ask, number, tokens, "back"))
        else:
            self._at(self.clock.now_ns + SECOND // 4, self._new)

    def _follow(self, placement: Placement) -> None:
        """It ends when the plan says, or a little later."""
        name = placement.request.id
        if name in self._ends:
            at_ns = placement.delivered_ns + self.draw.randrange(20_000_000)
            parcel = self.store.find(name)
            assert parcel is not None
            parcel.expected_s = placement.delivered_ns / SECOND
            number = self._at(at_ns, lambda: self._end(name, number))
            self._ends[name] = self._ends[name][0], number

    def _end(self, name: str, number: int) -> None:
        if name not in self._ends or self._ends[name][1] != number:
            return  # it was moved
        request, _ = self._ends.pop(name)
        assert request.deadline_ns is not None
        self.late_ns.append(self.clock.now_ns - request.deadline_ns)
        self.store.release(name)
        self.planner.complete(name, self.clock.now_ns)
        self.found["tokens"] += request.prompt_tokens
        self._new()


def share(found: Counter[str]) -> float:
    """Of the requests that came back, those that were admitted."""
    return found["back, admitted"] / (found["back, admitted"] + found["back, refused"])


@pytest.mark.parametrize(("patience_s", "slow_s", "longest"), [(0.5, 0.05, 100), (2.0, 1.0, 400)])
def test_a_request_that_comes_back_in_time_is_admitted(
    clock: Clock, patience_s: float, slow_s: float, longest: int
) -> None:
    """Clients that read milliseconds, and clients that round Retry-After up to whole seconds."""
    clients = Clients(clock, patience_s, slow_s=slow_s, longest=longest)
    found = clients.run(num_clients=64, seconds=60)
    assert found["new, refused"] > 100
    assert share(found) >= 0.95, found
    late_ns = sorted(clients.late_ns)
    assert late_ns[len(late_ns) * 95 // 100] < 0.1 * SECOND, "and is delivered in time"


def test_requests_that_do_not_come_back_leave_no_window_empty(clock: Clock) -> None:
    tokens = [Clients(clock, 1.0, returning=returning).run(64, 60)["tokens"] for returning in (1.0, 0.5, 0.0)]
    assert min(tokens) > 0.9 * tokens[0], tokens


def test_requests_that_come_back_for_memory_get_it(clock: Clock) -> None:
    found = Clients(clock, 60.0, store_tokens=2000).run(64, 60)
    assert found["new, refused"] > 50
    assert share(found) >= 0.95, found


def test_a_request_that_comes_back_to_fewer_lanes_is_admitted(clock: Clock) -> None:
    clients = Clients(clock, 2.0)
    clients.run(num_clients=64, seconds=10)
    refused = clients.found["back, refused"]
    clients.planner.set_alive([0], clock.now_ns)
    before = clients.found["back, admitted"]
    clients.run(num_clients=0, seconds=5)
    assert clients.found["back, admitted"] > before
    assert clients.found["back, refused"] == refused


def test_a_tenant_with_more_than_its_share_is_admitted_when_it_comes_back(clock: Clock) -> None:
    clients = Clients(clock, 60.0)
    clients.planner.charge("greedy", 200_000)
    retries_s = []
    for number in range(12):
        with contextlib.suppress(StopIteration):
            clients.ask(PrefillRequest(f"modest {number}", "modest", 400, clock.now_ns, clock.now_ns + 60 * SECOND))
    for number in range(2):
        request = PrefillRequest(f"greedy {number}", "greedy", 100, clock.now_ns, clock.now_ns + 60 * SECOND)
        with pytest.raises(Refused, match="share") as refused:
            clients.ask(request, b"greedy %d" % number)
        assert refused.value.retry_s is not None
        retries_s.append(refused.value.retry_s)
    assert retries_s[0] < retries_s[1], "the second one later: the first counts already"
    clock.now_ns += int(retries_s[0] * SECOND)
    back = PrefillRequest("back", "greedy", 100, clock.now_ns, clock.now_ns + 60 * SECOND)
    with pytest.raises(StopIteration):
        clients.ask(back, b"greedy 0")
