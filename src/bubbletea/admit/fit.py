"""The arithmetic of a placement: layers of a chunk into windows, stage by stage of a lane, and KV onto the network.
Compiled, because one decision reads thousands of windows.

A lane is a flow shop: requests keep their order on each of its workers. So the state of a lane is one Track: when each
worker is free, how much KV it holds and until when, and when its network has sent all KV. Knows arrays only; requests,
deadlines and queues are in `state`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from atlas.ir.program import Ints
from atlas.jit import kept

FREE, HELD, OUT, CLEAR = 0, 1, 2, 3
"""Rows of a Track [4, stages]: accelerator free at; bytes of KV held; until (the last one copied to the host by then);
network clear of KV at."""
NEVER = 2**62
"""A time, in nanoseconds, that does not come."""
Numbers = Ints | NDArray[np.float64]
COLUMNS = 7
"""Of a slice: worker, start, end, first layer, end layer, first token, end token."""


class WorkerArrays(NamedTuple):
    """Windows, networks and costs of every worker, as flat arrays. Windows of worker w are `ptr[w] : ptr[w + 1]`."""

    anchor_ns: int
    period_ns: int
    phase_ns: Ints
    ptr: Ints
    start_ns: Ints
    end_ns: Ints
    before_ns: Ints
    """By window: the sum of the worker's earlier windows."""
    idle_ns: Ints
    """By worker: the sum of its windows."""
    net_ptr: Ints
    net_at_ns: Ints
    net_bytes: NDArray[np.float64]
    rate: NDArray[np.float64]
    """[worker, 4]: floor, base, token, pair of `costs.LayerTime`."""
    head_ns: Ints
    """By worker."""
    room_bytes: Ints
    """By worker: memory for KV, without weights and workspace."""
    pcie_bytes_per_ns: float
    kv_bytes: float
    """Of one token in one layer."""
    hop_ns: float
    """Time of a chunk to the lane's next worker: this, plus the next value per token."""
    hop_token_ns: float
    parts: int
    """A layer may be cut into this many parts of its chunk, of at least `least_tokens`: `costs.grain_of`."""
    least_tokens: int


@kept
def first_above(values: Numbers, low: int, high: int, limit: float) -> int:
    """The first index from `low` on whose value is above `limit`; `high` if none is. Several times faster than numba's
    searchsorted."""
    while low < high:
        middle = (low + high) >> 1
        if values[middle] > limit:
            high = middle
        else:
            low = middle + 1
    return low


@kept
def layer_ns(arrays: WorkerArrays, worker: int, tokens: int, context: int) -> int:
    rate = arrays.rate[worker]
    pairs = tokens * (context + tokens / 2.0)
    return int(np.ceil(max(rate[0], rate[1] + rate[2] * tokens + rate[3] * pairs)))


@kept
def sent_ns(arrays: WorkerArrays, worker: int, from_ns: int, count: float) -> int:
    """When the last of `count` bytes has been sent, from `from_ns` on, with the bandwidth that training leaves."""
    low, high = arrays.net_ptr[worker], arrays.net_ptr[worker + 1]
    at, left = arrays.net_at_ns, arrays.net_bytes
    total = left[high - 1]
    if total <= 0.0:
        return NEVER
    turn = (from_ns - arrays.anchor_ns) // arrays.period_ns
    offset = (from_ns - arrays.anchor_ns) - turn * arrays.period_ns
    i = min(first_above(at, low, high, offset) - 1, high - 2)
    gone = left[i] + (left[i + 1] - left[i]) * (offset - at[i]) / (at[i + 1] - at[i])
    wanted = gone + count
    turns = int(wanted // total)
    wanted -= turns * total
    j = first_above(left, low, high, np.nextafter(wanted, -np.inf))  # the first that is at least `wanted`
    if j == low:
        return int(arrays.anchor_ns + (turn + turns) * arrays.period_ns)
    part = (wanted - left[j - 1]) / (left[j] - left[j - 1])
    inside = at[j - 1] + part * (at[j] - at[j - 1])
    return max(from_ns, int(arrays.anchor_ns + (turn + turns) * arrays.period_ns + np.ceil(inside)))


@kept
def cut_to(arrays: WorkerArrays, worker: int, first: int, last: int, grain: int, room_ns: int) -> int:
    """The end of the part of a layer over tokens `[first, last)` that fits into `room_ns`: `last`, or a whole number of
    grains; `first` if none fits."""
    if layer_ns(arrays, worker, last - first, first) <= room_ns:
        return last
    cut = first + (last - first - 1) // grain * grain
    while cut > first and layer_ns(arrays, worker, cut - first, first) > room_ns:
        cut -= grain
    return cut


@kept
def run_layers(
    arrays: WorkerArrays,
    worker: int,
    from_ns: int,
    one_ns: int,
    layers: tuple[int, int],
    tokens: tuple[int, int],
    grain: int,
    ways: Ints,
    out: Ints,
    row: int,
) -> tuple[int, int]:
    """Layers of `one_ns` over a chunk of tokens, into the worker's windows from `from_ns` on: (end, rows written);
    (NEVER, row) if nothing ever fits. Whole layers, then as many grains of the next layer as fit before the end of the
    window; its rest is first in the next window. With grain 0 no layer is cut.

    The KV of every slice is copied out and sent while the next one runs: `ways` (when the host has everything, when the
    network is clear) is moved on."""
    low, high = arrays.ptr[worker], arrays.ptr[worker + 1]
    ends, starts = arrays.end_ns[low:high], arrays.start_ns[low:high]
    origin = arrays.anchor_ns + arrays.phase_ns[worker]
    base = origin + (from_ns - origin) // arrays.period_ns * arrays.period_ns
    i, at, layer, token = first_above(ends, 0, len(ends), from_ns - base), from_ns, layers[0], tokens[0]
    barren = 0
    while layer < layers[1]:
        if i >= len(ends):
            i, base = 0, base + arrays.period_ns
            barren += 1
            if barren > 2 or not len(ends):
                return NEVER, row
        begin, close = max(at, base + starts[i]), base + ends[i]
        while layer < layers[1]:
            whole = min(layers[1] - layer, max(0, close - begin) // one_ns) if token == tokens[0] else 0
            if whole > 0:
                count, each, until = whole, one_ns, tokens[1]
            else:
                until = cut_to(arrays, worker, token, tokens[1], grain, close - begin) if grain > 0 else token
                if until == token:
                    break
                count, each = 1, layer_ns(arrays, worker, until - token, token)
            at, barren = begin + count * each, 0
            if row < len(out):
                out[row, 0], out[row, 1], out[row, 2] = worker, begin, at
                out[row, 3], out[row, 4], out[row, 5], out[row, 6] = layer, layer + count, token, until
            row += 1
            size = (until - token) * arrays.kv_bytes
            copy = size / arrays.pcie_bytes_per_ns
            ways[0] = max(max(ways[0], begin + each) + int(np.ceil(count * copy)), at + int(np.ceil(copy)))
            sent = sent_ns(arrays, worker, max(ways[1], begin + each), count * size)
            ways[1] = max(sent, sent_ns(arrays, worker, ways[0], size))
            begin, token = at, until
            if until < tokens[1]:
                break
            layer, token = layer + count, tokens[0]
        i += 1
    return at, row


@kept
def place(
    arrays: WorkerArrays,
    track: Ints,
    workers: Ints,
    first_layer: Ints,
    tokens: tuple[int, int, int],
    chunk: int,
    times: tuple[int, int],
    cached: int,
    out: Ints,
) -> tuple[int, int, int]:
    """Tokens `[first, end)` of a prompt of so many through a lane whose Track is `track`, which is moved on.

    `times` are when the prompt is ready and the earliest that anything may start. What lies before `first` is loaded
    from the host; of it `cached` tokens have still to be delivered. Returns (slices, computed, delivered); more slices
    than `out` has rows for are counted, not written. NEVER for both times when it fits no window.
    """
    ready0, floor_ns = times
    num, row, computed, grain = len(workers), 0, 0, max(arrays.least_tokens, chunk // arrays.parts)
    ways = np.empty(2, np.int64)
    first, last = tokens[0], tokens[0]
    while last < tokens[1]:
        first, last = last, min(tokens[1], last + chunk)
        ready = ready0
        for j in range(num):
            w, depth = workers[j], first_layer[j + 1] - first_layer[j]
            per_token = depth * arrays.kv_bytes
            start = max(track[FREE, j], ready, floor_ns)
            if first == tokens[0]:
                start = max(start, ready0 + int(first * per_token / arrays.pcie_bytes_per_ns))
                whole = int(tokens[2] * per_token)
                if start >= track[OUT, j]:
                    track[HELD, j] = 0
                elif track[HELD, j] + whole > arrays.room_bytes[w]:
                    start, track[HELD, j] = track[OUT, j], 0
                track[HELD, j] += whole
                if cached > 0:
                    track[CLEAR, j] = sent_ns(arrays, w, max(ready0, track[CLEAR, j]), cached * per_token)
            one, layers = layer_ns(arrays, w, last - first, first), (first_layer[j], first_layer[j + 1])
            ways[0], ways[1] = track[OUT, j], track[CLEAR, j]
            end, row = run_layers(arrays, w, start, one, layers, (first, last), grain, ways, out, row)
            track[OUT, j], track[CLEAR, j] = ways
            if end < NEVER and j == num - 1 and last == tokens[2] and arrays.head_ns[w] > 0:
                head = (layers[1], layers[1] + 1)
                end, row = run_layers(arrays, w, end, arrays.head_ns[w], head, (last, last), 0, ways, out, row)
                if end < NEVER and row - 1 < len(out):
                    out[row - 1, 4], out[row - 1, 5] = layers[1], first
            if end >= NEVER:
                return row, NEVER, NEVER
            track[FREE, j] = end
            ready = end + int(np.ceil(arrays.hop_ns + arrays.hop_token_ns * (last - first)))
            computed = max(computed, end)
    delivered = computed
    for j in range(num):
        delivered = max(delivered, track[CLEAR, j])
    return row, computed, delivered


@kept
def idle_until(arrays: WorkerArrays, worker: int, from_ns: int, need_ns: float) -> float:
    """When a worker's windows from `from_ns` on add up to `need_ns`, without rounding to layers."""
    low, high = arrays.ptr[worker], arrays.ptr[worker + 1]
    total = arrays.idle_ns[worker]
    if total <= 0:
        return float(NEVER)
    starts, before = arrays.start_ns, arrays.before_ns
    origin = arrays.anchor_ns + arrays.phase_ns[worker]
    turn = (from_ns - origin) // arrays.period_ns
    offset = from_ns - origin - turn * arrays.period_ns
    i = first_above(arrays.end_ns, low, high, offset)
    gone = total if i >= high else before[i] + max(0, offset - starts[i])
    wanted = gone + need_ns
    turns = int(wanted // total)
    wanted -= turns * total
    j = first_above(before, low, high, wanted) - 1
    return float(origin + (turn + turns) * arrays.period_ns + starts[j] + (wanted - before[j]))


@kept
def best_lanes(
    arrays: WorkerArrays,
    tracks: Ints,
    workers: Ints,
    first_layer: Ints,
    lanes: Ints,
    tokens: tuple[int, int],
    chunk: int,
    now_ns: int,
    best: Ints,
    when: NDArray[np.float64],
) -> int:
    """The lanes among `lanes` that would finish first, best first, and when: windows are added up without rounding to
    layers."""
    found = 0
    size = min(chunk, tokens[1] - tokens[0])
    count = (tokens[1] - tokens[0]) / size
    for n in range(len(lanes)):
        lane, end, last = lanes[n], float(now_ns), workers.shape[1] - 1
        while workers[lane, last] < 0:
            last -= 1
        for j in range(last + 1):  # the first chunk through all stages, the others behind it through the last
            w = workers[lane, j]
            one = (first_layer[lane, j + 1] - first_layer[lane, j]) * layer_ns(arrays, w, size, tokens[0])
            begin = max(int(end), tracks[lane, FREE, j])
            end = idle_until(arrays, w, begin, one * (count if j == last else 1.0))
            if found == len(best) and end >= when[found - 1]:
                break
        if found == len(best) and end >= when[found - 1]:
            continue
        at = min(found, len(best) - 1)
        while at > 0 and when[at - 1] > end:
            when[at], best[at] = when[at - 1], best[at - 1]
            at -= 1
        when[at], best[at] = end, lane
        found = min(found + 1, len(best))
    return found


@kept
def delivered_on(
    arrays: WorkerArrays,
    tracks: Ints,
    workers: Ints,
    first_layer: Ints,
    lanes: Ints,
    tokens: int,
    chunks: Ints,
    now_ns: int,
    soon_ns: int,
    out: Ints,
) -> int:
    """A whole prompt at the end of each of `lanes`: rows of (lane, chunk, delivered), earliest first. Of the chunk
    sizes the one that delivers first; if it would start after `soon_ns`, the first that fits."""
    found, row = 0, np.empty((1, COLUMNS), np.int64)
    for n in range(len(lanes)):
        lane, size = lanes[n], workers.shape[1]
        while workers[lane, size - 1] < 0:
            size -= 1
        chunk, first = 0, NEVER
        for c in range(len(chunks)):
            even = -(-tokens // -(-tokens // chunks[c]))
            where = (workers[lane, :size], first_layer[lane, : size + 1])
            times, all_of_it = (now_ns, now_ns), (0, tokens, tokens)
            track = tracks[lane, :, :size].copy()
            _, _, delivered = place(arrays, track, where[0], where[1], all_of_it, even, times, 0, row)
            if delivered < first:
                chunk, first = chunks[c], delivered
            if delivered < NEVER and row[0, 1] > soon_ns:
                break
        if first < NEVER:
            at = found
            while at > 0 and out[at - 1, 2] > first:
                out[at] = out[at - 1]
                at -= 1
            out[at, 0], out[at, 1], out[at, 2] = lane, chunk, first
            found += 1
    return found
