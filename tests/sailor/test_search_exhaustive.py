"""The search against an enumeration of every plan, on problems small enough to have one."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import combinations, product
from pathlib import Path

import pytest
from sailor_samples import write_inputs

from atlas.errors import InfeasibleError
from atlas.planner.objective import Objective
from atlas.sailor.check import check
from atlas.sailor.inputs import Inputs, read_inputs
from atlas.sailor.judge import judge
from atlas.sailor.money import money
from atlas.sailor.plan_file import Replica, SailorPlan
from atlas.sailor.search import search

CASES = {
    "two equal regions": {"counts": {"X-40_east-a": 4, "X-40_west-a": 4}},
    "slow WAN": {"counts": {"X-40_east-a": 4, "X-40_west-a": 4}, "wan": 0.05},
    "fast WAN": {"counts": {"X-40_east-a": 4, "X-40_west-a": 4}, "wan": 1.5},
    "uneven regions": {"counts": {"X-40_east-a": 4, "X-40_west-a": 2}, "num_layers": 6},
    "odd counts": {"counts": {"X-40_east-a": 3, "X-40_west-a": 3}},
    "three zones, two of a region": {"counts": {"X-40_east-a": 2, "X-40_east-b": 2, "X-40_west-a": 2}, "num_layers": 4},
    "memory is short": {"counts": {"X-40_east-a": 4, "X-40_west-a": 4}, "params": 500_000_000},
    "heavy gradients": {"counts": {"X-40_east-a": 4, "X-40_west-a": 4}, "params": 300_000_000, "wan": 0.6},
    "two GPU types": {"counts": {"X-40_east-a": 2, "Y-16_east-a": 4}, "gpus": {"X-40": 1.0, "Y-16": 2.2}},
    "two GPU types, two regions": {"counts": {"X-40_east-a": 2, "Y-16_west-a": 4}, "gpus": {"X-40": 1.0, "Y-16": 1.6}},
}


GOALS = (Objective(), Objective("cost"))


@pytest.mark.parametrize("name", CASES)
def test_the_search_finds_the_best_plan_there_is(name: str, tmp_path: Path) -> None:
    trace = write_inputs(tmp_path, **CASES[name])  # type: ignore[arg-type]
    inputs = read_inputs(tmp_path, trace, "toy")
    scores = [scores_of(inputs, plan) for plan in every_plan(inputs)]
    for goal, best in zip(GOALS, map(min, zip(*scores, strict=True)), strict=True):
        found = search(inputs, goal)
        check(inputs, found.plan)
        assert found.score in scores_of(inputs, found.plan)
        assert found.score <= 1.01 * best


def scores_of(inputs: Inputs, plan: SailorPlan) -> tuple[float, float]:
    """By each of the goals."""
    verdict = judge(inputs, plan)
    return verdict.iteration_s, money(inputs, plan, verdict).total_usd


def every_plan(inputs: Inputs) -> Iterator[SailorPlan]:
    """Every feasible plan with one tp for each stage and GPU type, up to the order of its pipelines."""
    total = sum(pool.num_gpus for pool in inputs.pools)
    for mbs in inputs.microbatches():
        most = math.ceil(inputs.global_batch / mbs)
        for num_stages in range(1, min(inputs.num_layers, total) + 1):
            for num_columns in range(1, min(most, total // num_stages) + 1):
                yield from _sized(inputs, mbs, num_stages, num_columns)


def _sized(inputs: Inputs, mbs: int, num_stages: int, num_columns: int) -> Iterator[SailorPlan]:
    kinds = [Replica(p.zone, p.gpu, tp, tp) for p in inputs.pools for tp in inputs.tps(p.gpu, mbs)]
    splits = [
        tuple(tuple(range(a, b)) for a, b in zip((0, *cut), (*cut, inputs.num_layers), strict=True))
        for cut in combinations(range(1, inputs.num_layers), num_stages - 1)
    ]
    for replicas in _grids(inputs, list(product(kinds, repeat=num_stages)), num_columns):
        for layers in splits:
            plan = SailorPlan(mbs, layers, tuple(zip(*replicas, strict=True)))
            try:
                check(inputs, plan)
            except InfeasibleError:
                continue
            yield plan


def _grids(inputs: Inputs, columns: list[tuple[Replica, ...]], num: int) -> Iterator[tuple[tuple[Replica, ...], ...]]:
    """Sequences of columns that the counts allow. Equal columns stand together, which never lengthens a ring."""
    num_gpus = {pool.zone_gpu: pool.num_gpus for pool in inputs.pools}

    def grow(
        chosen: tuple[tuple[Replica, ...], ...], left: dict[object, int]
    ) -> Iterator[tuple[tuple[Replica, ...], ...]]:
        if len(chosen) == num:
            yield chosen
            return
        for column in columns:
            if column in chosen and chosen[-1] != column:
                continue
            rest = dict(left)
            for replica in column:
                rest[replica.zone_gpu] -= replica.tp
            if min(rest.values()) >= 0:
                yield from grow((*chosen, column), rest)

    yield from grow((), dict(num_gpus))
