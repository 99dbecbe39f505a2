"""The order of samples: a permutation of 0..n-1 for every epoch that is computed, not stored, so that a trillion
samples need no memory and any position is found at once.

A Feistel network permutes the next power of four; results outside n are permuted again until they are inside.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Positions = NDArray[np.int64]
NUM_ROUNDS = 6
"""Of the Feistel network: more than the four that make a pseudo-random permutation."""
_MIX1, _MIX2, _GOLDEN = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB), 0x9E3779B97F4A7C15
_MASK64 = (1 << 64) - 1


@dataclass(frozen=True)
class SampleOrder:
    """The sample at each position; positions count through all epochs."""

    num_samples: int
    seed: int

    def __post_init__(self) -> None:
        assert self.num_samples > 0

    def samples(self, positions: Positions) -> Positions:
        """Every epoch (`num_samples` positions) has every sample once, in its own order."""
        epochs, places = np.divmod(positions, self.num_samples)
        found = np.empty_like(places)
        for epoch in np.unique(epochs):
            chosen = epochs == epoch
            found[chosen] = self._permuted(places[chosen], int(epoch))
        return found

    def _permuted(self, places: Positions, epoch: int) -> Positions:
        half_bits = max(1, ((self.num_samples - 1).bit_length() + 1) // 2)
        keys = _keys(self.seed, epoch)
        values = _feistel(places.astype(np.uint64), half_bits, keys)
        while (outside := values >= self.num_samples).any():
            values[outside] = _feistel(values[outside], half_bits, keys)
        return values.astype(np.int64)


def _keys(seed: int, epoch: int) -> NDArray[np.uint64]:
    """A key per round, from seed and epoch alone."""
    start = _mix(np.array([seed & _MASK64], np.uint64))
    start = _mix(start ^ _mix(np.array([(epoch * _GOLDEN + 1) & _MASK64], np.uint64)))
    steps = np.array([(_GOLDEN * (round_ + 1)) & _MASK64 for round_ in range(NUM_ROUNDS)], np.uint64)
    return _mix(start + steps)


def _feistel(values: NDArray[np.uint64], half_bits: int, keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    bits, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = values >> bits, values & mask
    for key in keys:
        left, right = right, left ^ (_mix(right + key) & mask)
    return (left << bits) | right


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finalizer of splitmix64: every bit of the input moves every bit of the output."""
    values = (values ^ (values >> np.uint64(30))) * _MIX1
    values = (values ^ (values >> np.uint64(27))) * _MIX2
    mixed: NDArray[np.uint64] = values ^ (values >> np.uint64(31))
    return mixed
