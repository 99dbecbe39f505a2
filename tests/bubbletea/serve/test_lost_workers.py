"""Workers that come and go under what was admitted: tasks are where the dispatcher believes them to be, and every
request ends once. The workers here are records of what they were sent; all else is real."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from serving import TINY
from torch import Tensor

from bubbletea.costs import LayerTime
from bubbletea.frames import WireFrame
from bubbletea.kv_blocks import KvBlock
from bubbletea.prefill.job import PrefillTask
from bubbletea.prefill.messages import REPORT
from bubbletea.serve.assemble import assemble
from bubbletea.serve.auth import ApiKeys
from bubbletea.serve.connections import ConnectedWorker, WorkerConnections
from bubbletea.serve.dispatch import Dispatcher
from bubbletea.serve.prefills import HandedBack, Prefilled, Prompt, Refused
from bubbletea.serve.slowdown_limit import SlowdownLimit
from bubbletea.serve.worker_windows import alone

NUM_WORKERS, ARENA_BYTES = 3, 64 << 20
LAYER = LayerTime(1e5, 1e5, 2e3, 0.0)
SECOND = 1_000_000_000


class Workers:
    """In place of WorkerConnections."""

    of_lane = WorkerConnections.of_lane

    def __init__(self) -> None:
        self.listener: Dispatcher
        self.members: dict[int, ConnectedWorker] = {}
        self.held: dict[ConnectedWorker, dict[tuple[int, int], PrefillTask]] = {}
        """By worker: the tasks it has, by job and attempt."""
        self.allowed = 1.0
        """The share of every wait that the workers may use."""

    def join(self, worker: int) -> None:
        transport = (f"w{worker}", "127.0.0.1", 1)
        fake: Any = SimpleNamespace()
        member = ConnectedWorker(worker, f"w{worker}", "here", 1, transport, fake, fake, ready=True)
        self.members[worker], self.held[member] = member, {}
        self.listener.joined(member)

    def hear(self, worker: int) -> None:
        """It reports that it has waited, once more."""
        nothing: dict[str, Any] = {"ran": [], "waits": [], "loads": []}
        WorkerConnections._take(cast(Any, self), self.members[worker], WireFrame(REPORT, nothing))

    def leave(self, worker: int) -> None:
        member = self.members.pop(worker)
        del self.held[member]
        self.listener.left(member)

    def send(self, member: ConnectedWorker, task: PrefillTask, tokens: Sequence[int], cached: Sequence[Tensor]) -> None:
        assert self.members[member.worker] is member
        self.held[member][task.job, task.attempt] = task

    def share(self, share: float) -> None:
        self.allowed = share

    def cancel(self, member: ConnectedWorker, job: int, attempt: int) -> None:
        if member in self.held:
            self.held[member].pop((job, attempt), None)

    def finish(self, worker: int) -> None:
        """The worker's most urgent task, from its first token to its last."""
        held = self.held[self.members[worker]]
        if not held:
            return
        job, attempt = min(held, key=lambda key: (held[key].due_ns, key))
        task, config = held.pop((job, attempt)), TINY.served.config
        kv = torch.zeros(2, config.num_kv_heads, task.length, config.head_width)
        for layer in range(config.num_layers):
            self.listener.block(job, attempt, KvBlock("", TINY.served.id, layer, 0, task.length, kv))
        self.listener.logits(job, attempt, torch.zeros(config.vocabulary))

    @property
    def all_held(self) -> set[tuple[int, int]]:
        return {key for held in self.held.values() for key in held}


class Played:
    """A dispatcher on such workers, inside an event loop; its clock is ticked by hand."""

    def __init__(self, lane_s: float = 60.0, limit: SlowdownLimit | None = None) -> None:
        windows = replace(alone(NUM_WORKERS, ARENA_BYTES, 0.2), layer=LAYER)
        parts = assemble(replace(TINY, split=1, arena_bytes=ARENA_BYTES), windows, ApiKeys.open_to_all())
        self.workers, old = Workers(), parts.dispatcher
        connections, metrics = cast(WorkerConnections, self.workers), old.metrics
        self.dispatcher = Dispatcher(connections, old.planner, old.store, old.prefixes, metrics, 30.0, lane_s, limit)
        self.planner, self.tasks = old.planner, list[asyncio.Task[Prefilled]]()

    async def ask(self, length: int, *, offline: bool = False) -> None:
        due_ns = None if offline else time.monotonic_ns() + 60 * SECOND
        kind: Any = "offline" if offline else "online"
        prompt = Prompt([number % 256 for number in range(length)], "tenant", 4, due_ns, kind)
        self.tasks.append(asyncio.create_task(self.dispatcher.prefill(prompt)))
        await asyncio.sleep(0)

    async def tick(self, later_s: float = 0.0) -> None:
        self.dispatcher._pass_time(time.monotonic_ns() + int(later_s * SECOND))
        await asyncio.sleep(0)  # who was answered takes leave

    def check(self) -> None:
        """What was sent is known, to the task; nothing is with a worker that is not there."""
        believed = {member: set[tuple[int, int]]() for member in self.workers.held}
        for run in self.dispatcher._runs.values():
            for member in run.sent:
                believed[member].add((run.job, run.attempt))
        assert {member: set(held) for member, held in self.workers.held.items()} == believed
        admitted = set(self.planner._admitted)
        assert admitted == {run.request.id for run in self.dispatcher._runs.values()}

    async def finish_all(self) -> list[object]:
        """Every worker works until nothing is left."""
        for _ in range(20_000):
            if all(task.done() for task in self.tasks):
                break
            for worker in list(self.workers.members):
                self.workers.finish(worker)
            await self.tick()
            await asyncio.sleep(0.001)
        else:
            pytest.fail(f"{sum(not task.done() for task in self.tasks)} requests never ended")
        return list(await asyncio.gather(*self.tasks, return_exceptions=True))


def play(story: Callable[[Played], Awaitable[None]], lane_s: float = 60.0) -> None:
    async def whole() -> None:
        played = Played(lane_s)
        await story(played)
        played.check()
        assert not played.dispatcher._runs
        assert not played.planner._admitted

    asyncio.run(whole())


def move_costs(played: Played, factor: float) -> None:
    """As when the workers' reports say that layers take another time."""
    played.planner.costs = replace(played.planner.costs, layer=played.planner.costs.layer.times(factor))
    played.planner._costs_moved = True


def test_tasks_of_a_lost_worker_are_sent_to_another_after_replanning() -> None:
    async def story(played: Played) -> None:
        for worker in range(2):
            played.workers.join(worker)
        for number in range(24):
            await played.ask(40 + 20 * number)
        for factor in (3.0, 0.4):
            move_costs(played, factor)
            await played.tick()
            played.check()
        played.workers.leave(1)
        await played.tick()
        played.check()
        assert len(played.workers.all_held) == 24
        assert all(isinstance(one, Prefilled) for one in await played.finish_all())

    play(story)


def test_a_lane_that_is_back_takes_requests_that_have_not_started() -> None:
    async def story(played: Played) -> None:
        played.planner.costs = replace(played.planner.costs, layer=LayerTime(5e7, 0.0, 0.0, 0.0))
        played.workers.join(0)
        for _ in range(8):
            await played.ask(100)
        played.workers.join(1)
        await played.tick()
        played.check()
        assert 2 <= len(played.workers.held[played.workers.members[1]]) <= 6
        assert all(isinstance(one, Prefilled) for one in await played.finish_all())

    play(story)


@pytest.mark.parametrize("offline", [False, True])
def test_repeated_loss_of_all_workers_does_not_fail_a_request(offline: bool) -> None:
    async def story(played: Played) -> None:
        for worker in range(NUM_WORKERS):
            played.workers.join(worker)
        await played.ask(100, offline=offline)
        await played.tick()
        for _ in range(4):
            for worker in range(NUM_WORKERS):
                played.workers.leave(worker)
                await played.tick()
                played.check()
            assert not played.tasks[0].done()
            for worker in range(NUM_WORKERS):
                played.workers.join(worker)
        assert isinstance((await played.finish_all())[0], Prefilled)

    play(story)


@pytest.mark.parametrize("share", [1.0, 0.2])
def test_what_is_admitted_fits_the_share_of_the_waits_that_prefill_may_use(
    share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_ns = time.monotonic_ns()
    monkeypatch.setattr(time, "monotonic_ns", lambda: now_ns)  # a busy host would be late, and plan again and again

    async def whole() -> None:
        limit = SlowdownLimit(0.005)
        played = Played(limit=limit)
        played.planner.costs = replace(played.planner.costs, layer=LayerTime(3e7, 0.0, 0.0, 0.0))
        played.workers.join(0)
        limit.share = share
        await played.tick()
        took_ns = 3e7 * TINY.served.config.num_layers
        for _ in range(int(2 * 60 * SECOND / took_ns)):
            await played.ask(100)  # due in 60 s
        admitted = sum(not task.done() for task in played.tasks)
        assert 0.6 < admitted * took_ns / (share * 60 * SECOND) <= 1
        answers = await played.finish_all()
        assert sum(isinstance(one, Refused) for one in answers) == len(answers) - admitted

    asyncio.run(whole())


def test_a_cut_of_the_share_applies_to_requests_admitted_after_it() -> None:
    async def whole() -> None:
        limit = SlowdownLimit(0.005)
        played = Played(limit=limit)
        played.workers.join(0)
        await played.tick()
        await played.ask(100)
        limit.share = 0.2
        await played.tick()
        assert played.workers.allowed == 1.0, "what was admitted before is due as planned"
        await played.finish_all()
        await played.ask(100)
        await played.tick()
        assert played.workers.allowed == 0.2
        await played.tick(later_s=61)
        limit.share = 0.15
        await played.tick(later_s=61)
        assert played.workers.allowed == 0.15, "nor for longer than a minute"

    asyncio.run(whole())


@pytest.mark.parametrize("offline", [False, True])
def test_a_request_without_a_lane_is_handed_back_in_time(offline: bool) -> None:
    async def story(played: Played) -> None:
        played.workers.join(0)
        await played.ask(100, offline=offline)
        await played.ask(100, offline=offline)
        played.workers.leave(0)
        await played.tick(later_s=9.0)
        assert not any(task.done() for task in played.tasks)
        await played.tick(later_s=11.0)
        await played.tick()
        assert [type(one) for one in await played.finish_all()] == [HandedBack] * 2

    play(story, lane_s=10.0)


def test_a_request_that_its_worker_cannot_run_is_handed_back() -> None:
    async def story(played: Played) -> None:
        played.workers.join(0)
        await played.ask(100, offline=True)
        for _ in range(8):
            await played.tick()
            for job, attempt in list(played.workers.all_held):
                played.dispatcher.failed(job, attempt, "of its length")
                played.workers.held[played.workers.members[0]].pop((job, attempt), None)
        (found,) = await played.finish_all()
        assert isinstance(found, HandedBack)
        assert "of its length" in str(found)

    play(story)


def test_a_request_without_progress_is_restarted_and_finishes() -> None:
    async def story(played: Played) -> None:
        played.workers.join(0)
        await played.ask(100, offline=True)
        await played.tick()
        (before,) = played.workers.all_held
        await played.tick(later_s=40.0)
        await played.tick()
        assert played.workers.all_held == {(before[0], before[1] + 1)}
        assert isinstance((await played.finish_all())[0], Prefilled)

    play(story)


def test_a_request_that_its_lane_does_not_run_moves_to_another() -> None:
    async def story(played: Played) -> None:
        for worker in range(2):
            played.workers.join(worker)
        await played.ask(100)
        await played.tick()
        (before,) = (worker for worker, member in played.workers.members.items() if played.workers.held[member])
        run = next(iter(played.dispatcher._runs.values()))
        for _ in range(3):  # it is placed again on its lane as long as it is only late
            await played.tick(later_s=0.9)
            assert run.attempt == 0
        run.expected_ns = run.since_ns
        await played.tick(later_s=5.0)
        await played.tick()
        played.check()
        (after,) = (worker for worker, member in played.workers.members.items() if played.workers.held[member])
        assert after != before
        assert isinstance((await played.finish_all())[0], Prefilled)

    play(story)


@pytest.mark.parametrize("returns", [False, True])
def test_a_worker_that_hangs_holds_up_no_request(returns: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its connection stays, as that of a stopped process does. Offline and online requests, and new ones."""
    clock_ns = [time.monotonic_ns()]
    monkeypatch.setattr(time, "monotonic_ns", lambda: clock_ns[0])

    async def story(played: Played) -> None:
        for worker in range(2):
            played.workers.join(worker)
        hangs, works = (played.workers.members[worker] for worker in range(2))
        for number in range(12):
            await played.ask(100 + 20 * number, offline=number % 2 == 0)
        hangs.heard_ns += 10_000_000  # its last report follows its last result
        for _ in range(500):  # 10 s
            clock_ns[0] += 20_000_000
            works.heard_ns = clock_ns[0]
            played.workers.finish(1)
            await played.tick()
            played.check()
        assert all(task.done() for task in played.tasks)
        for _ in range(4):
            await played.ask(100)
        assert not played.workers.held[hangs]
        assert len(played.workers.held[works]) == 4
        if returns:
            played.workers.hear(0)
            for _ in range(4):
                await played.ask(100)
            await played.tick()
            assert played.workers.held[hangs]
        assert all(isinstance(one, Prefilled) for one in await played.finish_all())

    play(story)


@pytest.mark.parametrize("seed", range(5))
def test_every_request_ends_once_when_workers_are_lost(seed: int) -> None:
    draw = random.Random(seed)

    async def story(played: Played) -> None:
        for worker in range(NUM_WORKERS):
            played.workers.join(worker)
        for _ in range(150):
            there = list(played.workers.members)
            absent = [worker for worker in range(NUM_WORKERS) if worker not in there]
            event = draw.random()
            if event < 0.35 and there:
                await played.ask(draw.randint(1, 1500), offline=draw.random() < 0.5)
            elif event < 0.45 and there:
                played.workers.leave(draw.choice(there))
            elif event < 0.6 and absent:
                played.workers.join(draw.choice(absent))
            elif event < 0.65:
                move_costs(played, draw.choice([0.3, 3.0]))
            elif event < 0.7 and (open_ := [task for task in played.tasks if not task.done()]):
                draw.choice(open_).cancel()
                await asyncio.sleep(0)
                await asyncio.sleep(0)
            elif there:
                played.workers.finish(draw.choice(there))
            await played.tick()
            played.check()
        for worker in range(NUM_WORKERS):
            if worker not in played.workers.members:
                played.workers.join(worker)
        found = await played.finish_all()
        assert {type(one) for one in found} <= {Prefilled, asyncio.CancelledError}, found
        assert not any(played.workers.held.values())

    play(story)
