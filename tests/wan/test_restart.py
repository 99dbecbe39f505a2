"""The rule that starts bbr again, and the channel that follows it, without a socket."""

from __future__ import annotations

import itertools

from atlas.wan.congestion.restart import FIRST_PAUSE_TRIPS, SLOW_SPANS, RestartRule
from atlas.wan.transport.channel_tuner import ChannelTuner
from atlas.wan.transport.outbox import Outbox
from atlas.wan.transport.settings import TransportSettings
from atlas.wan.transport.stream import TcpFacts
from atlas.wan.transport.stream_slot import StreamSlot

SPAN_S, RTT_S, RATE_BPS = 0.05, 0.04, 400e6


class Spans:
    """Passes spans to a rule one after the other."""

    def __init__(self) -> None:
        self.rule, self.now, self.num_full, self.has_queue = RestartRule(), 100.0, 0, False

    def starts(self, share: float, num: int, known_bps: float = RATE_BPS, *, is_full: bool = False) -> list[float]:
        """When streams start again, of `num` spans at a share of the rate."""
        found = []
        for _ in range(num):
            self.now += SPAN_S
            self.num_full += is_full
            figures = (share * RATE_BPS, known_bps, self.num_full, self.now, RTT_S)
            if self.rule.should_restart(*figures, lambda: self.has_queue):
                found.append(self.now)
        return found


def test_streams_start_again_when_only_the_kernel_holds_the_path_back() -> None:
    spans = Spans()
    assert not spans.starts(1.0, 10)
    began = spans.now
    assert [round((at - began) / SPAN_S) for at in spans.starts(0.5, SLOW_SPANS)] == [SLOW_SPANS]


def test_a_single_slow_span_is_no_reason() -> None:
    spans = Spans()
    for _ in range(5):
        assert not spans.starts(0.5, SLOW_SPANS - 1) + spans.starts(0.9, 1)


def test_a_queue_or_the_limit_in_flight_explains_a_slow_path() -> None:
    spans = Spans()
    spans.has_queue = True
    assert not spans.starts(1.0, 1) + spans.starts(0.5, 40)
    spans.has_queue = False
    assert not spans.starts(0.5, 40, is_full=True)


def test_starts_that_do_not_help_become_rare() -> None:
    spans = Spans()
    spans.starts(1.0, 1)
    starts = spans.starts(0.5, 200)
    pauses = [b - a for a, b in itertools.pairwise(starts)]
    assert len(pauses) >= 3
    assert all(later > 1.8 * earlier for earlier, later in itertools.pairwise(pauses))
    spans.starts(1.0, 1)
    again = spans.starts(0.5, round(FIRST_PAUSE_TRIPS * RTT_S / SPAN_S) + 200)
    assert again[1] - again[0] < pauses[-1], "a fast span forgets them"


def test_a_rate_that_fell_is_remembered_for_a_minute() -> None:
    spans = Spans()
    spans.starts(1.0, 10)
    assert spans.starts(0.5, 10, known_bps=0.5 * RATE_BPS)
    spans = Spans()
    spans.starts(1.0, 10)
    spans.has_queue = True
    spans.starts(0.5, round(61 / SPAN_S), known_bps=0.5 * RATE_BPS)
    spans.has_queue = False
    assert not spans.starts(0.5, 20, known_bps=0.5 * RATE_BPS)


class FakeStream:
    """Reports a round trip, and counts how often it starts again."""

    def __init__(self, rtt_s: float = RTT_S, *, has_paused: bool = False) -> None:
        self.rtt_s, self.has_paused, self.num_starts = rtt_s, has_paused, 0

    def facts(self) -> TcpFacts:
        return TcpFacts(self.rtt_s, RTT_S, 1 << 20, 700, 0, 0, 0)

    def restart(self) -> None:
        self.num_starts += 1

    def tune(self, *_: object, **__: object) -> None: ...


def slow_channel(*streams: FakeStream) -> None:
    """A channel whose path carried RATE_BPS and now delivers a quarter of it, over its first stream."""
    slots = [StreamSlot(i) for i in range(len(streams))]
    outbox = Outbox()
    tuner = ChannelTuner(slots, outbox, TransportSettings(num_streams=1), light=False)
    for slot, stream in zip(slots, streams, strict=True):
        slot.stream = stream  # type: ignore[assignment]
        tuner.rotation.join(slot)
    tuner.note_rtt(RTT_S)
    tuner.meter.learn(RATE_BPS, 100.0)
    tuner.retune()
    for k in range(100):
        tuner.acknowledged(round(RATE_BPS / 8 / 4 * 0.01), 100.0 + 0.01 * k)


def test_a_channel_starts_the_streams_that_work_again() -> None:
    working, resting = FakeStream(), FakeStream()
    slow_channel(working, resting)
    assert working.num_starts >= 1
    assert resting.num_starts == 0


def test_a_channel_leaves_streams_behind_a_queue_alone() -> None:
    queued, paused = FakeStream(rtt_s=1.5 * RTT_S), FakeStream(has_paused=True)
    slow_channel(queued)
    slow_channel(paused)
    assert (queued.num_starts, paused.num_starts) == (0, 0)
