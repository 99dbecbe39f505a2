"""How long a piece of prefill takes on this worker: from its arithmetic, corrected by what was measured.

The first pieces are judged by the flops and a warm-up; from then on by the slow ones among the last: a prediction is
there to keep training on time, so it errs upwards. Knows durations; not bubbles.
"""

from __future__ import annotations

from collections import deque

from atlas.runtime.models.config import DecoderConfig

RECENT = 64
CAUTION = 0.95
"""The share of recent pieces that took no longer than predicted."""


class Pace:
    """`overhead_ns` for any piece, and `flops_per_ns`: from `calibrate`, or from what the operator knows."""

    def __init__(self, config: DecoderConfig, overhead_ns: int = 1_000_000, flops_per_ns: float = 1.0) -> None:
        self.config = config
        self.overhead_ns, self.flops_per_ns = overhead_ns, flops_per_ns
        self._ratios: deque[float] = deque(maxlen=RECENT)
        self._correction = 1.0

    def predict_ns(self, num_new: int, num_all: int) -> int:
        return int(self._plain_ns(num_new, num_all) * self._correction)

    def observe(self, num_new: int, num_all: int, took_ns: int) -> None:
        self._ratios.append(took_ns / self._plain_ns(num_new, num_all))
        ordered = sorted(self._ratios)
        self._correction = ordered[min(len(ordered) - 1, int(CAUTION * len(ordered)))]

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
