"""Whether a card and its traces fit together: world size against parallelism, ranks against files, steps, parameters
against the model's shape, FLOPs against the peak.

What makes a figure wrong is an error (`require_plausible`); the rest is reported (`findings`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from atlas.errors import SpecError
from atlas.evidence.card import DEGREES, Card
from atlas.evidence.ccl import RankFigures
from atlas.evidence.metric import Metric

MIN_STEPS = 5
"""CCL-Bench asks for at least five recorded steps."""
PARAMS_RANGE = (0.3, 3.0)
"""Stated parameters over those that the shape suggests (12 L h^2 and the embedding). MLPs differ by this much."""


def require_plausible(card: Card | None, trace: Path, metrics: Iterable[Metric]) -> None:
    """Raise SpecError where the model of the card cannot have run in the time of the trace."""
    for metric in metrics:
        if card is not None and metric.name in ("mfu", "flops_utilization") and (metric.value or 0.0) > 100:
            raise SpecError(
                where=str(card.path),
                key=metric.name,
                value=round(metric.value or 0.0, 1),
                rule=f"more than 100 % of the hardware's peak: the card does not belong to {trace}",
                remedy="Check batch_size, seq_len, num_params and total_count, or name the right traces",
            )


def findings(card: Card | None, ranks: Sequence[RankFigures]) -> list[str]:
    """One sentence for each thing that does not fit."""
    found = [] if card is None else [f"card: {note}" for note in card.notes]
    if card is not None:
        found += _world(card, ranks)
        found += _params(card)
    else:
        found += _gaps(ranks)
    return found + _files(ranks) + _steps(ranks)


def _world(card: Card, ranks: Sequence[RankFigures]) -> list[str]:
    found = []
    total = card.number("workload.hardware.xpu_spec.total_count")
    degrees = {name: card.degree(name) for name in DEGREES}
    if total is not None and all(degree is not None for degree in degrees.values()):
        product = math.prod(degree or 1 for degree in degrees.values())
        if product != total:
            words = " x ".join(f"{name} {degree}" for name, degree in degrees.items())
            found.append(f"card: total_count is {total:.0f}, but {words} is {product}")
    expected = card.number("atlas.num_traces") or total
    numbers = {rank.rank for rank in ranks if rank.rank is not None}
    if expected is not None and len(ranks) != expected:
        lost = sorted(set(range(int(expected))) - numbers)[:8] if expected == total else []
        which = f" (no file of rank {', '.join(map(str, lost))})" if lost and len(ranks) < expected else ""
        found.append(f"ranks: the card has {expected:.0f}, the folder has {len(ranks)}{which}")
    sizes = {rank.world_size for rank in ranks if rank.world_size is not None}
    if total is not None and sizes and sizes != {int(total)}:
        found.append(f"ranks: the card has {total:.0f} devices, the traces say world size {_list(sizes)}")
    return found


def _gaps(ranks: Sequence[RankFigures]) -> list[str]:
    """Without a card: ranks below the highest that have no file."""
    numbers = {rank.rank for rank in ranks if rank.rank is not None}
    lost = set(range(max(numbers, default=0))) - numbers
    return [f"ranks: there is no file of rank {_list(lost)}"] if lost and len(numbers) > 1 else []


def _params(card: Card) -> list[str]:
    shape = card.shape
    total = card.number("workload.model.model_arch.num_params")
    if shape is None or not total or card.get("workload.model.moe") is True:
        return []
    hidden = shape.num_heads * shape.head_dim
    suggested = 12 * shape.num_layers * hidden**2 + 2 * shape.num_params_embedding
    if not PARAMS_RANGE[0] <= total / suggested <= PARAMS_RANGE[1]:
        return [
            f"card: num_params is {total:.3g}, but {shape.num_layers:.0f} layers of width {hidden:.0f} suggest "
            f"about {suggested:.2g}"
        ]
    return []


def _files(ranks: Sequence[RankFigures]) -> list[str]:
    found = [f"{rank.name}: {rank.damage}" for rank in ranks if rank.damage]
    for rank in ranks:
        if rank.num_unusable:
            found.append(f"{rank.name}: {rank.num_unusable:,} events without a valid start or length are left out")
        if rank.stated_rank is not None and rank.rank not in (None, rank.stated_rank):
            found.append(f"{rank.name}: the trace says rank {rank.stated_rank}")
        if rank.num_capital:
            found.append(f"{rank.name}: category `Kernel` is counted as `kernel`; CCL-Bench's tools leave it out")
    twice = [
        str(number) for number, count in Counter(rank.stated_rank for rank in ranks).items() if count > 1 and number
    ]
    if twice:
        found.append(f"ranks: several traces say rank {', '.join(twice[:8])}")
    if not any(rank.num_kernels for rank in ranks):
        found.append("no kernels: the profiler recorded no accelerator (CPU only)")
    elif not any(rank.has_collectives for rank in ranks):
        found.append("no collective has sizes: volumes and bandwidths are unknown")
    return found


def _steps(ranks: Sequence[RankFigures]) -> list[str]:
    counts = {rank.num_steps for rank in ranks}
    found = [
        f"{r.name}: {r.repeated_steps} steps repeat the number of an earlier step" for r in ranks if r.repeated_steps
    ]
    if counts == {0}:
        return [*found, "no ProfilerStep#N: the whole file counts as one step, and there is no step time"]
    if len(counts) > 1:
        found.append(f"ranks have different numbers of steps: {_list(counts)}")
    fewest = min(counts)
    kept = fewest - 2 if fewest > 2 else fewest
    if kept < MIN_STEPS:
        which = "all but the first and the last" if fewest > 2 else "including the first, a warm-up step"
        found.append(f"steps: {kept} are counted ({which}); CCL-Bench asks for at least {MIN_STEPS}")
    return found


def _list(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(numbers)[:8]))
