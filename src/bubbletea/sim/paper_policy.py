"""The policy of the paper, for comparison: a prefill is placed as a whole in the first bubbles that are long enough,
one bubble on each worker of a lane, or it is rejected. Remaining time of a used bubble can be used again.

(The other comparison, accelerators that only prefill, is `simulated_cluster.dedicated` with BubbleTea's admission.)
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from atlas.ir.program import Ints
from atlas.jit import kept
from bubbletea.admit.fit import NEVER, WorkerArrays, layer_ns, sent_ns
from bubbletea.admit.records import AdmissionRefusal, Placement, PrefillRequest, PrefillSlice
from bubbletea.admit.state import AdmissionState

TURNS = 8
"""Periods ahead that are considered."""


class PaperPolicy:
    """Whole prefill in one bubble, first fit. Its lanes are all of one size."""

    def __init__(self, state: AdmissionState) -> None:
        self.state = state
        self._used = np.zeros((TURNS, len(state.arrays.start_ns)), np.int64)
        """By period (a ring buffer) and window: the end of the used part."""
        self._turn = 0

    def arrive(self, request: PrefillRequest, now_ns: int) -> Sequence[Placement | AdmissionRefusal]:
        state = self.state
        self._forget(now_ns)
        stages = state.sizes[0]
        spans = np.empty((2, stages, 4), np.int64)
        where = (state.workers, state.first_layer)
        lane = first_fit(state.arrays, self._used, *where, request.prompt_tokens, now_ns, spans)
        if lane < 0:
            return (AdmissionRefusal(request, "too-long"),)
        best = spans[0]
        layer_bytes = request.prompt_tokens * state.arrays.kv_bytes
        delivered = max(
            sent_ns(state.arrays, int(state.workers[lane, j]), int(best[j, 1]), layer_bytes) for j in range(stages)
        )
        if request.deadline_ns is not None and delivered > request.deadline_ns:
            return (AdmissionRefusal(request, "deadline", delivered, now_ns + delivered - request.deadline_ns),)
        slices = []
        for j in range(stages):
            start, end, turn, window = (int(x) for x in best[j])
            self._used[turn % TURNS, window] = end
            layers = state.lanes[lane].layers(j)
            slices.append(PrefillSlice(int(state.workers[lane, j]), start, end, *layers, 0, request.prompt_tokens))
        ends = (request.prompt_tokens,)
        return (Placement(request, state.lanes[lane], 0, tuple(slices), ends, slices[-1].end_ns, delivered),)

    def pass_time(self, now_ns: int) -> Sequence[Placement]:
        return ()

    def _forget(self, now_ns: int) -> None:
        """Clears the rows of past periods for future ones."""
        turn = (now_ns - self.state.arrays.anchor_ns) // self.state.arrays.period_ns - 1
        for gone in range(self._turn, min(turn, self._turn + TURNS)):
            self._used[gone % TURNS] = 0
        self._turn = max(self._turn, turn)


@kept
def first_fit(
    arrays: WorkerArrays, used: Ints, workers: Ints, first_layer: Ints, tokens: int, now_ns: int, spans: Ints
) -> int:
    """The lane on which it can start first, or -1; `spans[0]` is by stage: start, end, period, window."""
    found = -1
    for lane in range(len(workers)):
        ready, fits = now_ns, True
        for j in range(workers.shape[1]):
            w = workers[lane, j]
            need = (first_layer[lane, j + 1] - first_layer[lane, j]) * layer_ns(arrays, w, tokens, 0)
            if j == workers.shape[1] - 1:
                need += arrays.head_ns[w]
            start, turn, window = one_bubble(arrays, used, w, ready, need)
            if start >= NEVER or (found >= 0 and j == 0 and start >= spans[0, 0, 0]):
                fits = False
                break
            spans[1, j, 0], spans[1, j, 1], spans[1, j, 2], spans[1, j, 3] = start, start + need, turn, window
            ready = start + need + int(np.ceil(arrays.hop_ns + arrays.hop_token_ns * tokens))
        if fits:
            found = lane
            spans[0] = spans[1]
    return found


@kept
def one_bubble(arrays: WorkerArrays, used: Ints, worker: int, from_ns: int, need_ns: int) -> tuple[int, int, int]:
    """(start, period, window) of the first bubble with enough time; NEVER if none is long enough."""
    low, high = arrays.ptr[worker], arrays.ptr[worker + 1]
    origin = arrays.anchor_ns + arrays.phase_ns[worker]
    turn = (from_ns - origin) // arrays.period_ns
    i = low + np.searchsorted(arrays.end_ns[low:high], from_ns - origin - turn * arrays.period_ns, side="right")
    last = turn + len(used) - 2
    while turn < last:
        for k in range(i, high):
            base = origin + turn * arrays.period_ns
            start = max(from_ns, base + arrays.start_ns[k], used[turn % len(used), k])
            if start + need_ns <= base + arrays.end_ns[k]:
                return start, turn, k
        turn, i = turn + 1, low
    return NEVER, 0, 0
