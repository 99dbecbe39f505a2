"""Predicts how long a piece of prefill takes on this worker: from its flops, corrected by measured durations.

The first pieces are predicted from the flops and a warm-up, later ones by the slowest of the recent pieces of their
kind: predictions protect training, so they err on the long side. Kinds are distinguished because they use different
kernels: the first chunk of a prompt and later ones differ in attention.

A device sometimes stalls: a kernel is loaded on first use, or the host is busy. So a single piece that took many times
its prediction is ignored. A prediction so long that no piece fits any wait would never be corrected, so the slowest
measurement is then dropped (`drop_slowest`). Knows durations; not bubbles.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from atlas.runtime.models.config import DecoderConfig

RECENT, FEW = 64, 8
CAUTION = 0.95
"""The share of recent pieces that took no longer than predicted."""
SURPRISE = 3.0
"""A piece slower than predicted by this factor counts only if the previous one was too."""


class _PieceKind(NamedTuple):
    """Pieces that use the same kernels; sizes are grouped by powers of two."""

    num_new: int
    is_behind: bool
    is_head: bool


class PieceTimes:
    """`overhead_ns` of any piece, and `flops_per_ns`: set by `calibrate`."""

    def __init__(self, config: DecoderConfig) -> None:
        self.config = config
        self.overhead_ns, self.flops_per_ns = 1_000_000, 1.0
        self._layers = _Ratios()
        self._kinds: dict[_PieceKind, _Ratios] = {}

    def predict_ns(self, num_new: int, num_all: int, *, is_head: bool = False) -> int:
        return int(self._plain_ns(num_new, num_all) * self._ratios(num_new, num_all, is_head).slow)

    def fastest_ns(self, num_new: int, num_all: int, *, is_head: bool = False) -> int:
        """The shortest recent time."""
        return int(self._plain_ns(num_new, num_all) * self._ratios(num_new, num_all, is_head).fast)

    def drop_slowest(self, num_new: int, num_all: int, *, is_head: bool = False) -> None:
        """Drops the slowest measurement behind this prediction."""
        self._ratios(num_new, num_all, is_head).forget_slowest()

    def _ratios(self, num_new: int, num_all: int, is_head: bool) -> _Ratios:
        """For a kind with few measurements, those of all layers."""
        found = self._kinds.get(_kind(num_new, num_all, is_head))
        return found if found is not None and len(found.recent) >= FEW else self._layers

    def observe(self, num_new: int, num_all: int, took_ns: int, *, is_head: bool = False) -> None:
        ratio = took_ns / self._plain_ns(num_new, num_all)
        self._kinds.setdefault(_kind(num_new, num_all, is_head), _Ratios()).add(ratio)
        if not is_head:
            self._layers.add(ratio)

    def calibrate(self, small: tuple[int, int], large: tuple[int, int]) -> None:
        """From two measured first chunks, each (tokens, nanoseconds)."""
        (few, few_ns), (many, many_ns) = small, large
        more_flops = self.flops(many, many) - self.flops(few, few)
        more_ns = max(many_ns - few_ns, many_ns // 10, 1)  # the small one may have been delayed
        self.flops_per_ns = more_flops / more_ns
        self.overhead_ns = max(0, few_ns - int(self.flops(few, few) / self.flops_per_ns))

    def flops(self, num_new: int, num_all: int) -> float:
        """Flops of one layer: its matrices, and attention over all tokens so far."""
        config = self.config
        heads = (2 * config.num_heads + 2 * config.num_kv_heads) * config.head_width
        matrices = config.width * (heads + (3 if config.gated else 2) * config.ffn_width)
        return 2.0 * num_new * matrices + 4.0 * num_new * num_all * config.num_heads * config.head_width

    def _plain_ns(self, num_new: int, num_all: int) -> float:
        return self.overhead_ns + self.flops(num_new, num_all) / self.flops_per_ns


def _kind(num_new: int, num_all: int, is_head: bool) -> _PieceKind:
    return _PieceKind(num_new.bit_length(), num_all > num_new, is_head)


class _Ratios:
    """Ratios of measured durations to those from the flops alone."""

    def __init__(self) -> None:
        self.recent: deque[float] = deque(maxlen=RECENT)
        self.slow = self.fast = 1.0
        self._surprised = False

    def add(self, ratio: float) -> None:
        self._surprised = ratio > SURPRISE * self.slow and not self._surprised
        if not self._surprised:
            self.recent.append(ratio)
            self._judge()

    def forget_slowest(self) -> None:
        if len(self.recent) > 1:
            self.recent.remove(max(self.recent))
            self._judge()

    def _judge(self) -> None:
        ordered = sorted(self.recent)
        self.fast, self.slow = ordered[0], ordered[min(len(ordered) - 1, int(CAUTION * len(ordered)))]
