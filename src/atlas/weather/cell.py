"""The packet cell computes the delay of each packet: a FIFO queue of `buffer_bytes` in front of a link of `capacity`,
shared with cross traffic.

    q_i = clip(q_{i-1} + s_{i-1} + (c - b) dt_i, 0, K)      delay_i = p + (q_i + s_i) / b      lost: q_i + s_i > K

Only additions, products and comparisons in a fixed order: the same bits on every machine.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from atlas.weather.packets import LOST, Ints

Floats = NDArray[np.float64]


def packet_rtts(
    at_ns: Ints,
    num_bytes: Ints,
    cross_bps: Floats,
    *,
    capacity_bps: float,
    rtt_ns: float,
    buffer_bytes: float,
    first_queue_bytes: float = 0.0,
) -> Ints:
    """Round trips of packets that reach the queue at `at_ns`, `LOST` for lost ones. `cross_bps` is by packet."""
    ns_per_byte, drain = 8e9 / capacity_bps, capacity_bps / 8e9
    found = np.empty(len(at_ns), np.int64)
    queue, before = first_queue_bytes, int(at_ns[0]) if len(at_ns) else 0
    cross = cross_bps / 8e9
    for i, (now, size, inflow) in enumerate(zip(at_ns.tolist(), num_bytes.tolist(), cross.tolist(), strict=True)):
        queue += (inflow - drain) * (now - before)
        queue = 0.0 if queue < 0.0 else buffer_bytes if queue > buffer_bytes else queue
        before = now
        if queue + size > buffer_bytes:
            found[i] = LOST
        else:
            queue += size
            found[i] = int(rtt_ns + queue * ns_per_byte)
    return found
