"""Waits are filled to their ends, on a modelled stream: what guard, engine and filling lose, and what they never do."""

from __future__ import annotations

import random
import sys
import threading
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from modelled_stream import MS, US, Stream, llama_on_h200, modelled_time
from prefill_samples import LLAMA, Collector, even_ends
from torch import Tensor

from atlas.runtime.device import Paced, Span
from atlas.runtime.models.block import KvSlab
from atlas.runtime.waits import Arrival, Position, SharedDevice
from atlas.wan.transport.base import Handle
from bubbletea.prefill.arena import Arena
from bubbletea.prefill.engine import PrefillEngine
from bubbletea.prefill.filling import WaitFilling
from bubbletea.prefill.guard import Guard
from bubbletea.prefill.job import PrefillTask
from bubbletea.prefill.piece_times import PieceTimes
from bubbletea.prefill.shard import ModelShard, Served

sys.path.insert(0, str(Path(__file__).parents[3] / "bench"))

from common.idle_time import Idle, Wait, attribute

MARGIN_NS = 100 * US
TINY = Served(replace(LLAMA, width=16, num_heads=1, num_kv_heads=1, ffn_width=16))
CHUNK, STANDS_FOR = 64, 32
"""Tokens of a chunk, and how many of a real one each stands for."""
PERIOD_NS, OP_NS = 400 * MS, 60 * MS
ARRIVE_NS = (100 * MS, 250 * MS)
"""Two inputs a period; behind each, two ops of training."""


class Idler(ModelShard):
    """Its layers compute nothing: only how long they are said to take matters here."""

    def layer(self, index: int, x: Tensor, slab: KvSlab) -> Tensor:
        slab.length += x.shape[1]
        return x


class Endless(Collector):
    """Prompts without end: one that is done is offered again."""

    engine: PrefillEngine

    def kv(self, *_: object) -> None: ...

    def done(self, task: PrefillTask) -> None:
        self.offer(task.job + 8)

    def offer(self, job: int) -> None:
        length = 2 * CHUNK
        self.engine.offer(PrefillTask(job, 0, length, 0, even_ends(length, CHUNK), 0, job), [1] * length)


def endless() -> PrefillEngine:
    pace = PieceTimes(TINY.config)
    pace.calibrate((8, 280 * US), (CHUNK, 1800 * US))
    outlet = Endless(TINY, 2 * CHUNK)
    outlet.engine = PrefillEngine(Idler(TINY, TINY.cuts((4,))[0], Arena(8 << 20, 64 << 20)), outlet, pace=pace)
    for job in range(8):
        outlet.offer(job)
    return outlet.engine


@dataclass
class Trained:
    """What came of some periods of training, the first ones left out."""

    idle: Idle
    busy: float
    late_ns: list[int] = field(default_factory=list)


def train(
    rng: random.Random, periods: int, *, op_spread: float = 0.0, wan_spread_ns: int = 0, skip: int = 6
) -> Trained:
    """`op_spread`: of training's ops. `wan_spread_ns`: of the moments at which inputs come."""
    waits, late_ns = list[Wait](), list[int]()
    with modelled_time() as clock:
        engine, stream = endless(), Stream(clock, llama_on_h200(rng, STANDS_FOR))
        engine.changed = clock  # type: ignore[assignment]
        filling = WaitFilling(engine, Guard(0.25), stream, MARGIN_NS)  # type: ignore[arg-type]
        start_ns = clock.now_ns
        for number in range(periods):
            for index, arrive_ns in enumerate(ARRIVE_NS):
                ready_ns = start_ns + number * PERIOD_NS + arrive_ns + round(rng.gauss(0, wan_spread_ns))
                began_ns = clock.now_ns
                filling.fill(Position(number, index), lambda ready_ns=ready_ns: clock.now_ns >= ready_ns)  # type: ignore[misc]
                clock.sleep(max(0, ready_ns - clock.now_ns) / 1e9)
                filling.over(Position(number, index), began_ns, max(began_ns, ready_ns))
                waits.append(Wait(began_ns, ready_ns, filling.stop_ns, filling.stop_ns + MARGIN_NS))
                for op in range(2):
                    span = stream.train(round(OP_NS * (1 + rng.gauss(0, op_spread))))
                    if number >= skip and op == 0:
                        late_ns.append(span.start_ns - ready_ns)
        within = Span(start_ns + skip * PERIOD_NS, start_ns + (periods - 1) * PERIOD_NS)
    idle = attribute(within, stream.ops, stream.pieces, waits)
    return Trained(idle, 1 - idle.total / (within.end_ns - within.start_ns), late_ns)


def test_a_steady_wait_is_filled_to_its_end() -> None:
    found = train(random.Random(1), 14)
    assert found.busy > 0.99, found.idle
    assert max(found.late_ns) < 0.5 * MS


def test_slower_ops_before_a_wait_do_not_shorten_its_use() -> None:
    """The WAN keeps time; training's ops do not."""
    found = train(random.Random(2), 20, op_spread=0.03)
    assert found.busy > 0.985, found.idle
    assert max(found.late_ns) < 0.5 * MS


def test_an_uncertain_wan_costs_its_spread_and_no_more() -> None:
    found = train(random.Random(3), 24, wan_spread_ns=2 * MS)
    assert found.busy > 0.97, found.idle
    assert sum(found.late_ns) / len(found.late_ns) < MS


@pytest.mark.parametrize("paced_ns", [None, 2 * MS])
def test_a_prediction_that_admits_nothing_is_lowered(paced_ns: int | None) -> None:
    """As after a host that was busy for a while: what was measured then fits no wait, so that nothing would ever be."""
    with modelled_time() as clock:
        engine, stream = endless(), Stream(clock, llama_on_h200(random.Random(4), STANDS_FOR))
        engine.changed = clock  # type: ignore[assignment]
        for took_ns in (1800 * US, *(900 * MS,) * 4):
            engine.pace.observe(CHUNK, CHUNK, took_ns)
        pace = None if paced_ns is None else (lambda piece: paced_ns)
        filling = WaitFilling(engine, Guard(0.25, {0: 100 * MS}), stream, MARGIN_NS, pace)  # type: ignore[arg-type]
        for number in range(6):
            began_ns = clock.now_ns
            filling.fill(Position(number, 0), lambda: clock.now_ns >= began_ns + 100 * MS)  # noqa: B023
            clock.sleep(max(0, began_ns + 100 * MS - clock.now_ns) / 1e9)
            filled_ns = filling.over(Position(number, 0), began_ns, began_ns + 100 * MS)
    assert filled_ns > 80 * MS


def test_waits_too_short_for_a_paced_piece_do_not_lower_predictions() -> None:
    with modelled_time() as clock:
        engine, stream = endless(), Stream(clock, llama_on_h200(random.Random(4), STANDS_FOR))
        engine.changed = clock  # type: ignore[assignment]
        for took_ns in (1800 * US, *(2500 * US,) * 8):
            engine.pace.observe(CHUNK, CHUNK, took_ns)
        before_ns = engine.pace.predict_ns(CHUNK, CHUNK)
        guard = Guard(0.25, {0: 5 * MS})
        filling = WaitFilling(engine, guard, stream, MARGIN_NS, lambda piece: 10 * MS)  # type: ignore[arg-type]
        for number in range(6):
            began_ns = clock.now_ns
            filling.fill(Position(number, 0), lambda: clock.now_ns >= began_ns + 5 * MS)  # noqa: B023
            clock.sleep(max(0, began_ns + 5 * MS - clock.now_ns) / 1e9)
            assert filling.over(Position(number, 0), began_ns, began_ns + 5 * MS) == 0
    assert engine.pace.predict_ns(CHUNK, CHUNK) == before_ns


# ---- the guard ---------------------------------------------------------------------------------------------------
def see(guard: Guard, index: int, *waited_ns: int) -> None:
    """Waits that begin whenever they like."""
    for number, waited in enumerate(waited_ns):
        began_ns = 10_000 * (number + 1) + 137 * number**2
        guard.observe(index, began_ns, began_ns + waited)


def test_the_guard_uses_the_schedule_then_observed_waits() -> None:
    guard = Guard(0.1, {3: 1000})
    assert guard.wait_ns(3, 0) == 900
    assert guard.wait_ns(4, 0) == 0
    see(guard, 3, 1200, 1300, 1250, 1240)
    assert guard.wait_ns(3, 10**6) == 1200
    see(guard, 3, 300)
    assert guard.wait_ns(3, 10**6) == 270
    see(guard, 3, 900, 910, 920)
    assert guard.wait_ns(3, 10**6) == 900


def test_the_guard_counts_from_the_previous_input_if_that_is_steadier() -> None:
    guard = Guard(0.1)
    for number, early in enumerate((0, 70, 20, 90, 40)):
        start_ns = number * 1000
        guard.observe(0, start_ns + 90, start_ns + 100)
        guard.observe(1, start_ns + 400 - early, start_ns + 500)
    guard.observe(0, 5090, 5100)
    assert guard.wait_ns(1, 5310) == 190, "the input comes 400 after the one before, whenever the wait begins"
    assert guard.wait_ns(1, 5490) == 10
    assert guard.wait_ns(1, 5600) == 0


def test_an_input_without_a_wait_has_no_known_arrival_time() -> None:
    guard = Guard(0.1)
    for start_ns in range(0, 5000, 1000):
        guard.observe(0, start_ns + 90, start_ns + 100)
        guard.observe(1, start_ns + 300, start_ns + 300)
    assert guard.wait_ns(1, 5200) == 0


def test_waits_that_were_over_when_they_began_do_not_shorten_the_prediction() -> None:
    """As on a busy host: nothing can run in such a wait, so it says nothing about the others."""
    guard = Guard(0.1, {0: 1000})
    see(guard, 0, 0)
    assert guard.wait_ns(0, 10**6) == 0, "until other waits were observed, the schedule is not trusted"
    see(guard, 0, 900, 0, 910, 0, 0, 920, 0, 0, 0, 905, 0)
    assert guard.wait_ns(0, 10**6) == 900
    see(guard, 0, 300)
    assert guard.wait_ns(0, 10**6) == 270, "but a short one does"


# ---- where idle time goes ----------------------------------------------------------------------------------------
def test_idle_time_is_split_by_cause() -> None:
    training = [Span(0, 100), Span(110, 200), Span(1005, 1100)]
    pieces = [Span(230, 400), Span(420, 700), Span(700, 900)]
    found = attribute(Span(0, 1100), training, pieces, [Wait(210, 1000, 940, 960)])
    assert found == Idle(
        between_ops=20, after_wait=5, before_first=20, between_pieces=20, no_fit=40, margin=20, doubt=40
    )
    unused = attribute(Span(0, 1100), training, [], [Wait(210, 1000, 205, 206)])
    assert (unused.unused_wait, unused.between_ops, unused.after_wait) == (790, 20, 5)


Spans = st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 100)).map(lambda at: Span(at[0], at[0] + at[1])))


@given(Spans, Spans, st.lists(st.integers(0, 1000), max_size=8, unique=True))
def test_idle_and_busy_times_add_up(training: list[Span], pieces: list[Span], marks: list[int]) -> None:
    marks.sort()
    waits = [Wait(a, b, (a + b) // 2, (a + b) // 2 + 3) for a, b in zip(marks[::2], marks[1::2], strict=False)]
    busy = {at for span in (*training, *pieces) for at in range(span.start_ns, span.end_ns)}
    found = attribute(Span(50, 900), training, pieces, waits)
    assert found.total == sum(at not in busy for at in range(50, 900))
    assert min(found.rows().values()) >= 0


class CountedEvent(threading.Event):
    num_waits = 0

    def wait(self, timeout: float | None = None) -> bool:
        self.num_waits += 1
        return super().wait(timeout)


def test_a_wait_without_work_sleeps_until_its_input_arrives() -> None:
    engine = PrefillEngine(Idler(TINY, TINY.cuts((4,))[0], Arena(8 << 20, 64 << 20)), Collector(TINY, CHUNK))
    engine.changed = events = CountedEvent()
    filling = WaitFilling(engine, Guard(0.25, {0: 60_000 * MS}), SharedDevice(Paced(), lambda span: None), MARGIN_NS)
    handle = Handle("an input")
    threading.Timer(0.2, handle.finish).start()
    filling.fill(Position(0, 0), Arrival([handle]))
    assert handle.done
    assert time.monotonic_ns() - handle.end_ns < 20_000 * MS, "it woke up, long before the predicted end"
    assert events.num_waits <= 2, "polling would wake up each millisecond"
