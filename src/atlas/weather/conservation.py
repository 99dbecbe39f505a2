"""How many bytes of cross traffic join the queue between two packets, by conservation of bytes: while the queue is
busy, the bytes that arrive are those that leave plus the growth of the queue, which the packets' delays show."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from atlas.weather.cell import Floats
from atlas.weather.packets import Ints, PacketTable
from atlas.weather.path_model import WINDOW_NS, PathModel


class Inflow(NamedTuple):
    """By gap between two packets that arrived."""

    end_ns: Ints
    """When the second was sent."""
    length_ns: Ints
    busy: NDArray[np.bool_]
    """Whether the queue was not empty."""
    num_bytes: Floats
    """Cross traffic that joined; 0 where the queue was empty."""


LEAST_QUEUE_NS, LEAST_QUEUE = 1e6, 0.02
"""A delay beyond the least round trip shows a queue if it is longer than 1 ms and than this share of the round trip."""
BUSY_QUEUE = 0.25
"""Of that delay: as long a queue before a packet was not empty since the packet before."""
BUSY_WINDOWS = 5
"""Of WINDOW_NS: in a longer gap between two packets the queue may have been empty."""


def queue_floor_ns(least_ns: float) -> float:
    """A longer delay than the least round trip plus this shows a queue."""
    return max(LEAST_QUEUE_NS, LEAST_QUEUE * least_ns)


def inflow(table: PacketTable, model: PathModel) -> Inflow:
    arrived = ~table.lost
    sent, size, rtt = table.sent_ns[arrived], table.num_bytes[arrived], table.rtt_ns[arrived]
    per_ns = model.capacity_bps / 8e9
    behind = np.maximum(0.0, (rtt - model.rtt_ns) * per_ns)  # the queue with the packet itself
    before = np.maximum(0.0, behind - size)
    gap_ns = np.diff(sent)
    busy = (before[1:] > queue_floor_ns(model.rtt_ns) * per_ns * BUSY_QUEUE) & (gap_ns < BUSY_WINDOWS * WINDOW_NS)
    # A busy queue: before_{i+1} = behind_i + (c - b) dt
    return Inflow(sent[1:], gap_ns, busy, np.where(busy, before[1:] - behind[:-1] + per_ns * gap_ns, 0.0))
