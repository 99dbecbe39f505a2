"""Measures the path of a channel and tunes its streams: warm-up, number of streams, pace, in-flight limit, hedging.

The rules are in `congestion`; this is the state that they work on. Thread-safe as far as the channel's threads need it.
Knows streams and the outbox, no frames and no handshakes.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from atlas.wan.congestion.inflight_limit import InflightLimit
from atlas.wan.congestion.restart import RestartRule
from atlas.wan.congestion.stream_rotation import SHIFTS, StreamRotation
from atlas.wan.congestion.tuning import HEADROOM, NEAR_RTT_S, LossWatch, RateMeter, StreamChoice, choose, window_bytes
from atlas.wan.congestion.warm_up import KernelStats, WarmUp
from atlas.wan.transport.message import Chunk
from atlas.wan.transport.outbox import Outbox
from atlas.wan.transport.settings import TransportSettings
from atlas.wan.transport.stream import SocketStream, TcpFacts
from atlas.wan.transport.stream_slot import StreamSlot
from atlas.wan.transport.wire import MAX_CHUNK_BYTES

CONFIRMED = 0.85
"""A later warm-up replaces the rate of an earlier one if it finds at least this share of it; else the host was busy."""
QUEUED = 1.25
"""The path has a queue if round trips take this many times the shortest."""
RAISED = 1.5
"""Factor by which the known rate is raised if only the in-flight limit held a burst back."""
PAUSED_TRIPS = 0.25
"""Round trips after which the chunks of a paused stream are sent on another."""
HEDGE_S, HEDGE_TRIPS = 0.15, 3
"""An answer is late after this time plus this many usual ones. Sending sooner wastes bandwidth on healthy paths."""
PONG_WAIT_S, PONG_TRIPS = 0.05, 3
"""Wait for the first pongs, which give a better round trip than the greetings: so many round trips, at most so long."""
DRAIN_POLL_S = 0.005
"""How often to check whether a warm-up has drained."""
PROXY_TRIPS = 0.5
"""If the kernel's round trip is shorter than this share of ours, the connection ends at a proxy."""


class ChannelTuner:
    """`rtt_s` is the shortest round trip of greetings and pings: the kernel's own ends at the nearest proxy."""

    def __init__(
        self, slots: Sequence[StreamSlot], outbox: Outbox, settings: TransportSettings, *, light: bool
    ) -> None:
        self.outbox, self.settings, self._slots, self._light = outbox, settings, slots, light
        self.rtt_s = 0.0
        self.meter = RateMeter()
        self.rotation = StreamRotation[StreamSlot](time.monotonic())
        self.warm_up: WarmUp | None = None
        self.choice: StreamChoice | None = None
        self.max_chunk_bytes = MAX_CHUNK_BYTES
        self._losses, self._restarts = LossWatch(), RestartRule()
        self._tuned_bytes = 0

    def note_rtt(self, rtt_s: float) -> None:
        self.rtt_s = min(self.rtt_s or rtt_s, rtt_s)

    def warm(self, deadline: float) -> None:
        """Called when the first stream is connected. On a long path, sends until the rate is known."""
        time.sleep(min(PONG_WAIT_S, PONG_TRIPS * self.rtt_s))
        self.retune()
        # First all streams measure the path together, then each shift warms up the streams it will use.
        for shift in range(1 + SHIFTS):
            if self.outbox.inflight is None:  # the first pongs may have shown that the peer is near
                return
            known_bps, rate_bps = self.meter.rate_bps or 0.0, self._fill(deadline)
            # Later warm-ups start from a known rate and lose less, so their result is better, unless the host was busy.
            self.meter.learn(rate_bps if rate_bps > CONFIRMED * known_bps else known_bps, time.monotonic())
            self.retune()
            if shift and not self.rotation.apply(self.outbox.num_streams):
                return
            if shift:
                self.rotation.change(self.outbox.num_streams)
                self.outbox.wake()

    def _fill(self, deadline: float) -> float:
        """Runs one warm-up and returns the rate that it found."""
        now, known_bps = time.monotonic(), self.meter.rate_bps or 0.0
        if self.choice is not None and self.choice.pacing_bps:
            self._set_pace(HEADROOM * known_bps / self.choice.num_streams)  # at the known pace it could not find more
        self.warm_up = warm_up = WarmUp(
            self.rtt_s, known_bps, now, self.settings.warm_s, self._kernel_stats, self.outbox.num_streams
        )
        self.outbox.wake()
        while not (warm_up.over and not warm_up.out_bytes) and self._num_connected and time.monotonic() < deadline:
            time.sleep(DRAIN_POLL_S)
        self.warm_up = None
        self._losses.warmed(is_lossy=warm_up.is_lossy)
        return warm_up.rate_bps

    def acknowledged(self, num_bytes: int, now: float) -> None:
        """Called while something waits for the path. If only the kernel holds it back, the streams start again."""
        span_bps, limit = self.meter.acknowledged(num_bytes, now), self.outbox.inflight
        if span_bps is None or limit is None or self.warm_up is not None:
            return
        known_bps = self.meter.rate_bps or 0.0
        if self._restarts.should_restart(span_bps, known_bps, limit.num_full, now, self.rtt_s, self._has_queue):
            for stream in self._working:
                if not stream.has_paused:
                    stream.restart()

    @property
    def _working(self) -> list[SocketStream]:
        """Streams that may send now."""
        working = [slot for slot in self._slots if self.rotation.place(slot) < self.outbox.num_streams]
        return [slot.stream for slot in working if slot.stream is not None]

    def _has_queue(self) -> bool:
        """By the round trips of the streams that work. If they end at a proxy nearby, one is assumed."""
        facts = [facts for stream in self._working if (facts := stream.facts())]
        return not facts or self._is_queued(facts)

    def _is_queued(self, facts: list[TcpFacts]) -> bool:
        return any(f.rtt_s > QUEUED * f.min_rtt_s or f.min_rtt_s < PROXY_TRIPS * self.rtt_s for f in facts)

    def watch(self, now: float) -> None:
        """Called a few times a second."""
        if self.outbox.delivered_bytes != self._tuned_bytes:
            self._tuned_bytes = self.outbox.delivered_bytes
            self.retune()
        if self.outbox.inflight is not None and self.rotation.watch(self.outbox.num_streams, now):
            self.outbox.wake()

    def retune(self) -> None:
        """Chooses the number of streams, the chunks, the pace and the in-flight limit from what is known now."""
        if not self.rtt_s or self.warm_up is not None:
            return
        if (limit := self.outbox.inflight) is not None and self.outbox.is_empty and limit.had_room():
            self.meter.raise_by(RAISED)
        if limit is not None and (fallen_bps := limit.fallen_bps()) is not None:
            self.meter.learn(fallen_bps, time.monotonic())
        rate_bps = None if self._light else self.meter.rate_bps
        if rate_bps and limit is not None and limit.is_slow:
            rate_bps = max(rate_bps, limit.rate_bps)
        choice = choose(self.rtt_s, rate_bps, len(self._slots), window_bytes(), lossy=self._is_lossy())
        if self.settings.num_streams is not None:
            choice = choice.with_streams(self.settings.num_streams)
        self.choice = choice
        least_bytes = min(choice.least_chunk_bytes, self.max_chunk_bytes)
        self.outbox.tune(min(choice.chunk_bytes, self.max_chunk_bytes), choice.num_streams, least_bytes)
        if self._light or self.rtt_s < NEAR_RTT_S:
            self.outbox.inflight = None
        elif self.outbox.inflight is None:
            self.outbox.inflight = InflightLimit(self.rtt_s)
        if (limit := self.outbox.inflight) is not None and (rate_bps := self.meter.rate_bps):
            limit.learn(rate_bps, choice.chunk_bytes, self.rtt_s)
        self._set_pace(choice.pacing_bps)

    def _set_pace(self, pacing_bps: float | None) -> None:
        assert self.choice is not None
        for slot in self._slots:
            if (stream := slot.stream) is not None:
                stream.tune(self.choice.lowat_bytes, pacing_bps, near=self.rtt_s < NEAR_RTT_S)

    def _kernel_stats(self) -> KernelStats | None:
        """Of all streams together. If they end at a proxy nearby, the kernel cannot see a queue: one is assumed."""
        facts = self._facts()
        if len(facts) < self._num_connected:
            return None
        return KernelStats(
            sum(f.delivered_bytes for f in facts), sum(f.num_retransmits for f in facts), self._is_queued(facts)
        )

    @property
    def _num_connected(self) -> int:
        return sum(slot.stream is not None for slot in self._slots)

    @property
    def num_retransmits(self) -> int:
        """Of the streams that are open now."""
        return sum(facts.num_retransmits for facts in self._facts())

    def _facts(self) -> list[TcpFacts]:
        return [facts for slot in self._slots if slot.stream and (facts := slot.stream.facts())]

    def _is_lossy(self) -> bool:
        if self._light or self.rtt_s < NEAR_RTT_S:
            return False
        sent_twice = sum(f.retransmitted_bytes for f in self._facts())
        return self._losses.is_lossy(time.monotonic(), self.outbox.delivered_bytes, sent_twice)

    def paced_s(self, num_bytes: int) -> float:
        """How long this many bytes take at our pace; zero without one."""
        return num_bytes * 8 / self.outbox.inflight.pace_bps if self.outbox.inflight is not None else 0.0

    def check_s(self, place: int) -> float:
        """How often a stream without work checks whether others are late."""
        return self.rtt_s * PAUSED_TRIPS if self._may_pause and place < self.outbox.num_streams else self._late_s / 4

    def steal(self, stream: SocketStream) -> Chunk | None:
        """A chunk of another stream to send a second time, because its answer is late."""
        others = [slot.stream for slot in self._slots if slot.stream is not None] if self._may_pause else []
        paused = [other for other in others if other.has_paused]
        return self.outbox.steal(stream, self._late_s, paused=paused, paused_s=self.rtt_s * PAUSED_TRIPS)

    @property
    def _may_pause(self) -> bool:
        """Whether all streams are needed, so that none can rest when bbr would pause."""
        return self.outbox.inflight is not None and not self.rotation.apply(self.outbox.num_streams)

    @property
    def _late_s(self) -> float:
        """How late an answer must be before an idle stream sends the chunk too."""
        return HEDGE_S + HEDGE_TRIPS * max(self.rtt_s, self.outbox.usual_s)
