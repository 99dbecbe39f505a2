"""Competing TCP flows inside the namespace emulator: each keeps a congestion window by the rules of CUBIC, and its
packets join the queue of a link. Unlike recorded cross traffic they react: they yield to a sender that takes more.

A flow sends without end. Its packets exist only as entries of a ring: when they were sent, and when their
acknowledgement (or the news of their loss) is back. Knows no devices and no real packets.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from atlas.jit import entry, njit

# Columns of the flows' table of floats and of their table of integers.
CWND, SSTHRESH, W_MAX, ORIGIN, W_EST, EPOCH_NS, K_S = range(7)
ROUND_LEAST_NS, ROUND_START_NS, TRAIN_NS, NUM_FLOATS = range(7, 11)
HEAD, TAIL, RECOVER, ROUND_END, ROUND_ACKS, NUM_INTS = range(6)

RING = 8192
"""Packets that one flow may have in flight."""
SEGMENT_BYTES = 1448
"""Payload of a full segment: an MTU of 1500 bytes less headers and the timestamp option."""
FIRST_WINDOW = 10.0
BETA, CUBE, FRIENDLY = 0.7, 0.4, 3 * 0.3 / 1.7
"""Of CUBIC (RFC 9438): what remains of the window after a loss, its curve, and the growth of a Reno flow beside it."""
UNKNOWN_GROWTH = 0.05
"""Of the window, per round trip at least: before the first loss nothing is known of the capacity."""
HYSTART_WINDOW, HYSTART_ACKS, HYSTART_LEAST_NS, HYSTART_MOST_NS = 16.0, 8, 4e6, 16e6
TRAIN_GAP_NS = 2e6
"""Slow start ends (as in Linux) when the first acknowledgements of a round are later than the least round trip by an
eighth of it, within these bounds, or when acknowledgements this close together last for half of it."""


Tables = tuple[Any, Any, Any]
"""Floats, integers and rings of flows."""


def rival_tables(num_flows: int) -> Tables:
    """Of flows that have not started."""
    floats = np.zeros((num_flows, NUM_FLOATS))
    return floats, np.zeros((num_flows, NUM_INTS), np.int64), np.zeros((num_flows, RING, 2), np.int64)


def segment_bytes(bdp_bytes: float, queue_bytes: float) -> int:
    """Larger on fast paths, so that the ring holds a full path and a slow start that overshoots it."""
    return max(SEGMENT_BYTES, round((bdp_bytes + queue_bytes) * 2.5 / RING))


def start_rivals(tables: Tables, now_ns: int, round_trip_ns: float) -> None:
    """The flows begin a handshake now."""
    floats, ints, ring = tables
    floats[:] = 0.0
    ints[:] = 0
    floats[:, CWND], floats[:, SSTHRESH] = 1.0, np.inf
    floats[:, EPOCH_NS], floats[:, ROUND_LEAST_NS] = -1.0, np.inf
    ints[:, TAIL] = 1
    ring[:, 0, 0], ring[:, 0, 1] = now_ns, now_ns + round(round_trip_ns)


@entry
def advance_rivals(
    floats: Any,
    ints: Any,
    ring: Any,
    free_ns: float,
    until_ns: int,
    ns_per_byte: float,
    queue_bytes: float,
    round_trip_ns: float,
    size: int,
) -> float:
    """Lets the flows of one link react to everything until `until_ns`; returns when the link's queue is empty."""
    while True:
        flow, at_ns = -1, until_ns + 1
        for k in range(floats.shape[0]):
            back_ns = abs(ring[k, ints[k, HEAD] % RING, 1])
            if ints[k, HEAD] < ints[k, TAIL] and back_ns < at_ns:
                flow, at_ns = k, back_ns
        if flow < 0:
            return free_ns
        state, count = floats[flow], ints[flow]
        sent_ns, back_ns = ring[flow, count[HEAD] % RING]
        _acknowledged(state, count, at_ns, float(at_ns - sent_ns), round_trip_ns, back_ns < 0)
        window = min(max(int(state[CWND]), 1), RING - 1)
        while count[TAIL] - count[HEAD] < window:
            start_ns = max(free_ns, float(at_ns))
            full = (start_ns - at_ns) / ns_per_byte + size > queue_bytes
            due_ns = np.int64(start_ns + round_trip_ns)
            if not full:
                free_ns = start_ns + size * ns_per_byte
                due_ns = np.int64(free_ns + round_trip_ns)
            ring[flow, count[TAIL] % RING, 0] = at_ns
            ring[flow, count[TAIL] % RING, 1] = -due_ns if full else due_ns
            count[TAIL] += 1


@njit
def _acknowledged(state: Any, count: Any, now_ns: int, rtt_ns: float, least_ns: float, lost: bool) -> None:
    """One packet less in flight; the window grows, or shrinks once for all losses of a round trip."""
    number = count[HEAD]
    count[HEAD] += 1
    if number == 0:
        state[CWND] = FIRST_WINDOW  # the handshake
    elif lost:
        if number >= count[RECOVER]:
            before = state[CWND]
            state[W_MAX] = before * (1 + BETA) / 2 if before < state[W_MAX] else before
            state[CWND] = state[SSTHRESH] = max(2.0, before * BETA)
            state[EPOCH_NS], count[RECOVER] = -1.0, count[TAIL]
    elif number >= count[RECOVER]:
        if state[CWND] < state[SSTHRESH]:
            state[CWND] += 1
            _end_slow_start(state, count, now_ns, rtt_ns, least_ns)
        else:
            _grow(state, now_ns, least_ns)


@njit
def _end_slow_start(state: Any, count: Any, now_ns: int, rtt_ns: float, least_ns: float) -> None:
    """HyStart."""
    if count[HEAD] > count[ROUND_END]:
        count[ROUND_END], count[ROUND_ACKS], state[ROUND_LEAST_NS] = count[TAIL], 0, np.inf
        state[ROUND_START_NS] = state[TRAIN_NS] = now_ns
    count[ROUND_ACKS] += 1
    if count[ROUND_ACKS] <= HYSTART_ACKS:
        state[ROUND_LEAST_NS] = min(state[ROUND_LEAST_NS], rtt_ns)
    if now_ns - state[TRAIN_NS] <= TRAIN_GAP_NS:
        state[TRAIN_NS] = now_ns
    late_ns = min(max(least_ns / 8, HYSTART_LEAST_NS), HYSTART_MOST_NS)
    late = count[ROUND_ACKS] >= HYSTART_ACKS and state[ROUND_LEAST_NS] > least_ns + late_ns
    if state[CWND] >= HYSTART_WINDOW and (late or state[TRAIN_NS] - state[ROUND_START_NS] > least_ns / 2):
        state[SSTHRESH] = state[CWND]


@njit
def _grow(state: Any, now_ns: int, least_ns: float) -> None:
    """CUBIC's curve through the window of the last loss, but no slower than Reno."""
    window = state[CWND]
    if state[EPOCH_NS] < 0:
        state[EPOCH_NS] = float(now_ns)
        state[K_S] = ((state[W_MAX] - window) / CUBE) ** (1 / 3) if window < state[W_MAX] else 0.0
        state[ORIGIN] = max(state[W_MAX], window)
        state[W_EST] = window
    away_s = (now_ns - state[EPOCH_NS] + least_ns) / 1e9 - state[K_S]
    target = min(state[ORIGIN] + CUBE * away_s * away_s * away_s, 1.5 * window)
    step = (target - window) / window if target > window else 0.01 / window
    if state[W_MAX] == 0:
        step = max(step, UNKNOWN_GROWTH)
    state[W_EST] += FRIENDLY / window
    if state[W_EST] > window:
        step = max(step, (state[W_EST] - window) / window)
    state[CWND] = window + min(step, 0.5)
