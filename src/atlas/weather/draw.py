"""New weather from a seed: random pieces of the recorded cross traffic, joined, as rows of a link's trace.

Random numbers are raw bits of PCG64, and the rest is plain arithmetic: the same seed gives the same rows, bit for bit,
on every machine.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from atlas.weather.cell import Floats
from atlas.weather.path_model import WINDOW_NS, PathModel

MEAN_BLOCK, BLOCK_SHARE = 200, 0.25
"""Mean number of windows in a piece: 20 s, or this share of a shorter recording. Longer pieces preserve more of the
correlation over time; shorter ones vary more."""
LEAST_SHARE = 0.02
"""Of the capacity: a sender that fills the path always gets some."""


class DrawnRows(NamedTuple):
    """By window: the share of the capacity that cross traffic leaves, and the delay of its queue."""

    rate: Floats
    extra_latency_ns: Floats


def drawn_rows(model: PathModel, seed: int, key: Sequence[object], num_windows: int, scale: float = 1.0) -> DrawnRows:
    """Windows of new weather. `key` tells draws of one seed apart; `scale` multiplies cross traffic."""
    return rows_of(model, drawn_cross(model, seed, key, num_windows), scale)


def drawn_cross(model: PathModel, seed: int, key: Sequence[object], num_windows: int) -> Floats:
    """Cross traffic of consecutive windows: pieces of random lengths from random moments of the recording."""
    entropy = [seed, *(zlib.crc32(str(part).encode()) for part in key)]
    bits = np.random.PCG64(np.random.SeedSequence(entropy))
    recorded, found, made = model.recorded_bps, np.empty(num_windows), 0
    num = len(recorded)
    longest = 2 * min(MEAN_BLOCK, max(1, int(BLOCK_SHARE * num))) - 1
    while made < num_windows:
        start, length = (int(raw) for raw in bits.random_raw(2))
        start, length = start % num, min(1 + length % longest, num_windows - made)
        found[made : made + length] = recorded[(start + np.arange(length)) % num]
        made += length
    return found


def rows_of(model: PathModel, cross_bps: Floats, scale: float = 1.0) -> DrawnRows:
    """What cross traffic leaves to a sender, and how long its own queue is where it exceeds the capacity."""
    share = cross_bps * (scale / model.capacity_bps)
    late = np.zeros(len(share))
    if (share > 1.0).any():
        late = np.array(queue_delays_ns(share.tolist(), model.buffer_bytes * 8e9 / model.capacity_bps))
    return DrawnRows(np.maximum(1.0 - share, LEAST_SHARE), late)


def queue_delays_ns(shares: Iterable[float], most_ns: float) -> list[float]:
    """By window, of cross traffic that takes these shares of the capacity: how long its own queue is."""
    queue_ns, found = 0.0, []
    for share in shares:
        queue_ns = min(max(queue_ns + (share - 1.0) * WINDOW_NS, 0.0), most_ns)
        found.append(queue_ns)
    return found


def mean_rows(model: PathModel, scale: float = 1.0) -> tuple[float, float]:
    """(rate, extra latency in ns) on average: what a link has without draws."""
    rate, late = rows_of(model, model.recorded_bps, scale)
    return math.fsum(rate) / len(rate), math.fsum(late) / len(late)
