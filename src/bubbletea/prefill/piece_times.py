"""How long a piece of prefill takes on this worker: from its arithmetic, corrected by what was measured.

The first pieces are judged by the flops and a warm-up; from then on by the slow ones among the last of their kind: a
prediction is there to keep training on time, so it errs upwards. Kinds are told apart because kernels are: a chunk
behind others takes another way through attention than the first one.

A device stands still now and then: a kernel is loaded when it is first used, a host is busy. One piece that took many
times what was expected says nothing of the next; and a pace so slow that nothing fits any wait would never be measured
again, so it is doubted. Knows durations; not bubbles.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from atlas.runtime.models.config import DecoderConfig

RECENT, FEW = 64, 8
CAUTION = 0.95
"""The share of recent pieces that took no longer than predicted."""
SURPRISE = 3.0
"""A piece slower than predicted by this factor counts only if the one before was, too."""


class _Kind(NamedTuple):
    """Pieces that the same kernels run: the size by powers of two."""

    num_new: int
    is_behind: bool
    is_head: bool


class PieceTimes:
    """`overhead_ns` for any piece, and `flops_per_ns`: from `calibrate`, or from what the operator knows."""

    def __init__(self, config: DecoderConfig, overhead_ns: int = 1_000_000, flops_per_ns: float = 1.0) -> None:
        self.config = config
        self.overhead_ns, self.flops_per_ns = overhead_ns, flops_per_ns
        self._layers = _Ratios()
        self._kinds: dict[_Kind, _Ratios] = {}

    def predict_ns(self, num_new: int, num_all: int, *, is_head: bool = False) -> int:
        return int(self._plain_ns(num_new, num_all) * self._ratios(num_new, num_all, is_head).slow)

    def hoped_ns(self, num_new: int, num_all: int, *, is_head: bool = False) -> int:
        """As fast as it has been of late."""
        return int(self._plain_ns(num_new, num_all) * self._ratios(num_new, num_all, is_head).fast)

    def doubt(self, num_new: int, num_all: int, *, is_head: bool = False) -> None:
        """Forgets the slowest of what this prediction rests on."""
        self._ratios(num_new, num_all, is_head).forget_slowest()

    def _ratios(self, num_new: int, num_all: int, is_head: bool) -> _Ratios:
        """A kind that has hardly been seen is judged by all layers."""
        found = self._kinds.get(_kind(num_new, num_all, is_head))
        return found if found is not None and len(found.recent) >= FEW else self._layers

    def observe(self, num_new: int, num_all: int, took_ns: int, *, is_head: bool = False) -> None:
        ratio = took_ns / self._plain_ns(num_new, num_all)
        self._kinds.setdefault(_kind(num_new, num_all, is_head), _Ratios()).add(ratio)
        if not is_head:
            self._layers.add(ratio)

    def calibrate(self, small: tuple[int, int], large: tuple[int, int]) -> None:
        """From two measured pieces, each (new tokens, nanoseconds), of prompts that begin with them."""
        (few, few_ns), (many, many_ns) = small, large
        more_flops = self.flops(many, many) - self.flops(few, few)
        more_ns = max(many_ns - few_ns, many_ns // 10, 1)  # a few may have been held up as long as many take
        self.flops_per_ns = more_flops / more_ns
        self.overhead_ns = max(0, few_ns - int(self.flops(few, few) / self.flops_per_ns))

    def flops(self, num_new: int, num_all: int) -> float:
        """Of one layer: its matrices, and attention over all tokens so far."""
        config = self.config
        heads = (2 * config.num_heads + 2 * config.num_kv_heads) * config.head_width
        matrices = config.width * (heads + (3 if config.gated else 2) * config.ffn_width)
        return 2.0 * num_new * matrices + 4.0 * num_new * num_all * config.num_heads * config.head_width

    def _plain_ns(self, num_new: int, num_all: int) -> float:
        return self.overhead_ns + self.flops(num_new, num_all) / self.flops_per_ns


def _kind(num_new: int, num_all: int, is_head: bool) -> _Kind:
    return _Kind(num_new.bit_length(), num_all > num_new, is_head)


class _Ratios:
    """Of measured to plain durations."""

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
