"""A model of a GPU's stream with its own clock: queued pieces run in order and take the modelled time, while the host
continues. The real guard, engine and filling run on it, without waiting and with the same result on every machine.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest

from atlas.runtime.device import Span
from bubbletea.prefill import filling
from bubbletea.prefill.job import HEAD, PrefillPiece, together

US, MS = 1_000, 1_000_000
WAKE_NS = 60 * US
"""How late a sleeping thread wakes up."""
LAUNCH_NS = 500 * US
"""The host's time to put a piece into the queue."""


class Clock:
    """Replaces the module `time`, and an event that is never set."""

    def __init__(self) -> None:
        self.now_ns = 1_000 * MS

    def monotonic_ns(self) -> int:
        self.now_ns += US
        return self.now_ns

    def sleep(self, seconds: float) -> None:
        self.now_ns += max(0, round(seconds * 1e9)) + WAKE_NS

    def wait(self, seconds: float) -> bool:
        self.sleep(seconds)
        return False

    def clear(self) -> None: ...

    def set(self) -> None: ...


class Queued(NamedTuple):
    result: Any
    span: Span
    clock: Clock

    @property
    def done(self) -> bool:
        return self.clock.monotonic_ns() >= self.span.end_ns

    def wait(self) -> Span:
        self.clock.now_ns = max(self.clock.now_ns, self.span.end_ns)
        return self.span


@dataclass
class Stream:
    """The device of a filling (a `SharedDevice`) and of training. `piece_ns`: the time of a piece."""

    clock: Clock
    piece_ns: Callable[[PrefillPiece], int]
    free_ns: int = 0
    pieces: list[Span] = field(default_factory=list)
    ops: list[Span] = field(default_factory=list)

    def begin(self, work: Callable[[], Any], cost_ns: int = 0) -> Queued:
        """`work` runs the next pieces of some jobs."""
        took_ns = self.piece_ns(together([job.piece for job in work.args[0]]))  # type: ignore[attr-defined]
        begun_ns = self.clock.now_ns
        self.clock.now_ns += LAUNCH_NS
        return Queued(work(), self._occupy(begun_ns, took_ns), self.clock)

    def settle(self, running: Queued) -> Span:
        self.pieces.append(running.wait())
        return running.span

    def train(self, took_ns: int) -> Span:
        """An op of training: the host waits for its end."""
        span = self._occupy(self.clock.now_ns, took_ns)
        self.clock.now_ns = span.end_ns + WAKE_NS
        self.ops.append(span)
        return span

    def _occupy(self, begun_ns: int, took_ns: int) -> Span:
        start_ns = max(begun_ns, self.free_ns)
        self.free_ns = max(start_ns + took_ns, self.clock.now_ns)
        return Span(start_ns, self.free_ns)


def llama_on_h200(rng: random.Random, scale: int) -> Callable[[PrefillPiece], int]:
    """A layer of a Llama-3-8B over 2048 tokens: about 1.8 ms, a third more after earlier chunks. `scale`: real tokens
    per token of the test."""

    def piece_ns(piece: PrefillPiece) -> int:
        spread = 1 + abs(rng.gauss(0, 0.02))
        if piece.layer == HEAD:
            return round(300 * US * spread)
        behind = 4 / 3 if piece.first else 1.0
        return round((60 * US + 0.85 * US * scale * (piece.last - piece.first)) * behind * spread)

    return piece_ns


@contextmanager
def modelled_time() -> Iterator[Clock]:
    clock = Clock()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(filling, "time", clock)
        yield clock
