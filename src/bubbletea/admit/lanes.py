"""Which workers form a lane: workers of one datacenter that share one copy of the prefill model, each with memory for
its part.

Neighbours form a lane: the same stage of the pipelines of one cell, whose windows open at nearly the same time. Layers
are distributed in proportion to the workers' windows, so that no worker of a lane is the bottleneck. Lanes of one kind
differ only in what is placed on them; admission considers the emptiest of each kind.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import cycle, groupby

import numpy as np

from atlas.errors import AtlasError
from atlas.ir.program import Ints
from bubbletea.admit.records import PrefillLane
from bubbletea.constants import GIB
from bubbletea.costs import PrefillCosts
from bubbletea.windows.bubbles import Pattern

KV_TOKENS = 16_384
"""Length of the prompt whose KV must fit on a lane beside weights and workspace."""


def weight_bytes(costs: PrefillCosts, layers: int, *, first: bool, last: bool) -> int:
    """Of one worker of a lane: its layers, the embedding on the first and the LM head on the last."""
    return layers * costs.layer_weight_bytes + (int(first) + int(last)) * costs.end_weight_bytes


def need_bytes(costs: PrefillCosts, layers: int, chunk: int, *, first: bool, last: bool) -> int:
    """The smallest arena with which a worker can serve that many layers."""
    kv = KV_TOKENS * layers * costs.kv_bytes
    return weight_bytes(costs, layers, first=first, last=last) + kv + costs.workspace_bytes(chunk)


def build_lanes(
    pattern: Pattern,
    costs: PrefillCosts,
    *,
    split: int | Sequence[int] | None = None,
    num_ranks: int,
    chunk: int,
    scale: float = 1.0,
) -> list[PrefillLane]:
    """Every lane with enough memory. `split`: the number of workers of each; None: the fewest that have enough memory.
    `scale`: real bytes for each byte of `pattern` and `costs`, for the message.

    With several sizes, each gets the same number of a datacenter's workers: narrow lanes waste least, wide ones are
    fast with long prompts.
    """
    choices = [[split]] if isinstance(split, int) else [list(split)] if split else [[1], [2], [4], [8], [16]]
    for sizes in choices:
        lanes = _of_sizes(pattern, costs, sizes, num_ranks, chunk)
        if lanes:
            return lanes
    missing = _missing_bytes(pattern, costs, sorted({size for sizes in choices for size in sizes}), num_ranks, chunk)
    wanted = "" if split is None else f" on {' or '.join(map(str, choices[0]))} worker{'s' * (choices[0] != [1])}"
    where = [
        f"{dc} has too few workers (or the model too few layers)"
        if least is None
        else f"{dc} lacks {scale * least[0] / GIB:.3g} GiB on each worker ({least[1]} per copy)"
        for dc, least in missing.items()
    ]
    raise AtlasError(
        f"no copy of the prefill model fits{wanted}: {', '.join(where)}. Reserve more memory for it "
        "(`reserved_gib` in the job, --arena-mib of `bubbletea serve`), or split it over another number of workers"
    )


def _missing_bytes(
    pattern: Pattern, costs: PrefillCosts, sizes: Sequence[int], num_ranks: int, chunk: int
) -> dict[str, tuple[int, int] | None]:
    """By datacenter: the least memory that each worker of a lane would need in addition, and the lane's size; None: it
    has too few workers with windows, or the model too few layers."""
    found: dict[str, tuple[int, int] | None] = dict.fromkeys(pattern.worker_dc)
    for size in sizes:
        for dc, workers, counts in _candidates(pattern, costs, [size], num_ranks):
            missing = max(need - int(pattern.memory_bytes[w]) for w, need in _needs(costs, workers, counts, chunk))
            found[dc] = min(found[dc] or (missing, size), (missing, size))
    return found


def _of_sizes(
    pattern: Pattern, costs: PrefillCosts, sizes: Sequence[int], num_ranks: int, chunk: int
) -> list[PrefillLane]:
    lanes: list[PrefillLane] = []
    for dc, workers, counts in _candidates(pattern, costs, sizes, num_ranks):
        if all(need <= pattern.memory_bytes[w] for w, need in _needs(costs, workers, counts, chunk)):
            first = tuple(int(n) for n in np.cumsum([0, *counts[:-1]]))
            lanes.append(PrefillLane(len(lanes), dc, workers, first, costs.model.layers))
    return lanes


def _candidates(
    pattern: Pattern, costs: PrefillCosts, sizes: Sequence[int], num_ranks: int
) -> Iterator[tuple[str, tuple[int, ...], list[int]]]:
    """Lanes whatever their memory: datacenter, workers, and the layers of each."""
    idle_ns = pattern.idle_ns.tolist()
    usable = [w for w in range(pattern.num_workers) if idle_ns[w] > 0]
    usable.sort(key=lambda w: (pattern.worker_dc[w], w % num_ranks, w // num_ranks))
    for dc, members in groupby(usable, key=lambda w: pattern.worker_dc[w]):
        for workers in _groups(list(members), sizes):
            counts = deal(costs.model.layers, [idle_ns[w] for w in workers])
            if counts is not None:
                yield dc, workers, counts


def _groups(ready: Sequence[int], sizes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Workers in order, the same number for each size in turn; the rest stays unused."""
    widest, at = max(sizes), 0
    for size in cycle(sizes):
        block, at = ready[at : at + widest], at + widest
        for k in range(0, len(block) - size + 1, size):
            yield tuple(block[k : k + size])
        if at >= len(ready):
            return


def _needs(costs: PrefillCosts, workers: Sequence[int], counts: Sequence[int], chunk: int) -> Iterator[tuple[int, int]]:
    """Of each worker of a lane: the arena that it needs."""
    last = len(workers) - 1
    for j, w in enumerate(workers):
        yield w, need_bytes(costs, counts[j], chunk, first=j == 0, last=j == last)


def deal(layers: int, weights: Sequence[int]) -> list[int] | None:
    """Distributes layers by weight, at least one each, as evenly as possible; None if there are too few."""
    if layers < len(weights):
        return None
    counts = [1] * len(weights)
    for _ in range(layers - len(weights)):
        # The one with the least load after getting another layer.
        counts[min(range(len(weights)), key=lambda j: (counts[j] + 1) / weights[j])] += 1
    return counts


def kinds(lanes: Sequence[PrefillLane], pattern: Pattern) -> Ints:
    """By lane: lanes with the same number have the same windows."""
    known: dict[tuple[object, ...], int] = {}
    found = []
    for lane in lanes:
        key: list[object] = [lane.first_layer]
        for w in lane.workers:
            own = slice(int(pattern.ptr[w]), int(pattern.ptr[w + 1]))
            key += [int(pattern.phase_ns[w]), pattern.start_ns[own].tobytes(), pattern.end_ns[own].tobytes()]
        found.append(known.setdefault((lane.dc, *key), len(known)))
    return np.array(found, np.int64)
