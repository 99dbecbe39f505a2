"""Estimates against the simulator and against the prices they are made of."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_jobs import job_of, random_job

from atlas.cost.cluster_arrays import cluster_arrays
from atlas.errors import InfeasibleError
from atlas.planner.candidate import Candidate, Group
from atlas.planner.estimated_candidates import single_groups, useful_replicas
from atlas.planner.group_set_estimates import deal
from atlas.planner.judge import judge
from atlas.planner.objective import Objective
from atlas.planner.regions import several_groups
from atlas.planner.run import start
from atlas.planner.shapes import compositions
from atlas.planner.space import space_of


@pytest.mark.parametrize("limits", [{}, {"tcp": "one", "keep": ("pipelines_per_cell",)}], ids=["any", "one connection"])
def test_estimates_are_within_a_few_per_cent_of_the_simulator(limits: dict[str, Any]) -> None:
    ratios = []
    for seed in range(6):
        job = random_job(seed)
        space, cluster = space_of(job, **limits), cluster_arrays(job)
        entries, _, _ = single_groups(space, cluster, Objective())
        for entry in entries[::5]:
            try:
                ratios.append(entry.iteration_s / judge(space, cluster, entry.candidate).figures.iteration_s)
            except InfeasibleError:
                continue
    assert len(ratios) > 20
    assert 0.95 < float(np.median(ratios)) < 1.05
    assert float(np.percentile(np.abs(np.log(ratios)), 90)) < 0.2


def test_no_searched_order_beats_its_floor() -> None:
    gaps = []
    for seed in range(6):
        search = start(random_job(seed), Objective())
        search.tries = 24
        space, cluster = search.space, search.cluster
        alone, _, worth = single_groups(space, cluster, search.objective)
        apart, _ = several_groups(space, cluster, search.objective, worth, by_floor=True)
        for entries in (alone, apart):
            for entry in sorted(entries, key=lambda e: e.floor)[:30:10]:
                judged = search.simulate(entry.candidate)
                if judged is not None:
                    gaps.append(search.score(judged) / entry.floor)
    assert len(gaps) > 20
    assert min(gaps) > 1 - 1e-6
    assert float(np.median(gaps)) < 1.1


@pytest.mark.parametrize("runtime", ["megatron", "torch"])
def test_a_floor_knows_stages_that_share_a_node_of_several(runtime: str) -> None:
    """They hand activations on over NVLink, four times as fast as this network."""
    dc = {"name": "east", "nodes": 2, "gpus_per_node": 4, "gpu": "A100-40", "net_gbps": 5.0}
    search = start(job_of(cluster={"datacenters": [dc]}, runtime=runtime, tp=1), Objective())
    search.tries = 24
    entries, _, _ = single_groups(search.space, search.cluster, search.objective)
    inside = [e for e in entries if all(g.pp > 1 and sum(e.candidate.gpus.values()) <= 4 for g in e.candidate.groups)]
    gaps = [search.score(judged) / e.floor for e in inside if (judged := search.simulate(e.candidate)) is not None]
    assert len(gaps) > 3
    assert min(gaps) > 1 - 1e-6


@pytest.mark.parametrize("runtime", ["atlas", "megatron", "torch"])
@pytest.mark.parametrize("seed", range(3))
def test_no_searched_order_beats_its_floor_with_several_gpus_a_node(seed: int, runtime: str) -> None:
    job = random_job(seed)
    dcs = [dc.model_copy(update={"gpus_per_node": 4, "net_gbps": 5.0}) for dc in job.cluster.datacenters]
    cluster = job.cluster.model_copy(update={"datacenters": tuple(dcs)})
    search = start(job.model_copy(update={"cluster": cluster, "runtime": runtime}), Objective())
    search.tries = 6
    entries, _, _ = single_groups(search.space, search.cluster, search.objective)
    few = sorted(entries, key=lambda entry: entry.floor)[:: max(1, len(entries) // 6)]
    gaps = [search.score(judged) / e.floor for e in few if (judged := search.simulate(e.candidate)) is not None]
    assert len(gaps) > 3
    assert min(gaps) > 1 - 1e-6


@given(st.integers(1, 400), st.integers(1, 60))
def test_useful_replicas_lose_no_number_of_microbatches(slots: int, most: int) -> None:
    useful = useful_replicas(slots, most)
    for replicas in range(1, min(slots, most) + 1):
        num_mb = -(-slots // replicas)
        assert any(-(-slots // r) == num_mb and r <= replicas for r in useful)


@given(
    st.lists(st.tuples(st.integers(1, 4), st.floats(0, 3), st.floats(0.1, 2)), min_size=1, max_size=3),
    st.integers(1, 16),
)
def test_no_other_deal_of_microbatches_ends_sooner(groups: list[tuple[int, float, float]], slots: int) -> None:
    replicas, fill, period = (list(part) for part in zip(*groups, strict=True))

    def ends(counts: Sequence[int]) -> float:
        return max(f + (n - 1) * p for f, p, n in zip(fill, period, counts, strict=True))

    lines = (np.array([part]) for part in (replicas, fill, period))
    counts = deal(np.array([slots]), *lines)[0].tolist()
    if not all(counts):
        return
    assert sum(r * n for r, n in zip(replicas, counts, strict=True)) >= slots
    every = product(range(1, slots + 1), repeat=len(groups))
    enough = [c for c in every if sum(r * n for r, n in zip(replicas, c, strict=True)) >= slots]
    assert ends(counts) <= min(map(ends, enough)) + 1e-9


def test_compositions_are_all_there() -> None:
    assert set(compositions(5, [3, 3, 3], 1000)) == {
        (a, b, c) for a in range(1, 4) for b in range(1, 4) for c in range(1, 4) if a + b + c == 5
    }


def test_a_long_run_is_continued_at_its_own_period(monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_of(num_microbatches=300)
    space, cluster = space_of(job), cluster_arrays(job)
    group = Group((("east", 2), ("west", 2)), (2, 2, 2, 2), 1, 2, 300)
    whole = judge(space, cluster, Candidate(1, 1, (group,), True)).figures.iteration_s
    monkeypatch.setattr("atlas.planner.judge.MANY_EVENTS", 1500)
    short = judge(space, cluster, Candidate(1, 1, (group,), True)).figures.iteration_s
    assert short == pytest.approx(whole, rel=0.01)
