"""Estimates against the simulator and against the prices they are made of."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_jobs import job_of, random_job

from atlas.cost.arrange import arrange
from atlas.cost.cluster_arrays import cluster_arrays
from atlas.cost.memory import in_flight_cap, worker_memory
from atlas.cost.price import price
from atlas.errors import InfeasibleError
from atlas.ir.ops import Kind
from atlas.planner.candidate import Candidate, Group
from atlas.planner.estimate import Batch, _Hops, _stage_times, sync_s
from atlas.planner.judge import judge
from atlas.planner.objective import Objective
from atlas.planner.pool import frames, single_groups, useful_replicas
from atlas.planner.regions import deal
from atlas.planner.shapes import compositions
from atlas.planner.space import space_of
from atlas.planner.split import in_flight, sizes_of
from atlas.spec import override


def test_estimates_are_within_a_few_per_cent_of_the_simulator() -> None:
    ratios = []
    for seed in range(6):
        job = random_job(seed)
        space, cluster = space_of(job), cluster_arrays(job)
        entries, _, _ = single_groups(space, cluster, Objective())
        for entry in entries[::5]:
            try:
                ratios.append(entry.iteration_s / judge(space, cluster, entry.candidate).figures.iteration_s)
            except InfeasibleError:
                continue
    assert len(ratios) > 20
    assert 0.95 < float(np.median(ratios)) < 1.05
    assert float(np.percentile(np.abs(np.log(ratios)), 90)) < 0.2


@pytest.mark.parametrize("cell", [1, 2])
def test_hops_and_stages_cost_what_price_says(cell: int) -> None:
    job = job_of(cells=2 // cell, pipelines_per_cell=cell, tp=1)
    space, cluster = space_of(job), cluster_arrays(job)
    frame = next(f for f in frames(space, cluster) if (f.tp, f.microbatch) == (1, 1))
    shape = ((0, 2), (1, 2))
    batch = Batch(1, 1, 4, [shape], np.array([0]), np.array([2]), np.array([cell]))
    dc = np.array([[0, 0, 1, 1]])
    hops = _Hops(space, cluster, batch, dc)
    arrangement = arrange(job)
    costs = price(job, sharing=cell > 1, arrangement=arrangement)
    way = (costs.before_ns + costs.work_ns + costs.latency_ns)[:, 0].sum(axis=0) / 1e9
    assert hops.way_s[0] == pytest.approx(way, rel=1e-6)
    forward, again, backward, update = _stage_times(frame.speeds, dc, np.array([arrangement.layers_per_stage]))
    ns = costs.compute_ns[0]
    assert forward[0] == pytest.approx(ns[:, Kind.F] / 1e9, rel=1e-6)
    assert again[0, :-1] == pytest.approx(ns[:-1, Kind.R] / 1e9, rel=1e-6)
    assert backward[0] == pytest.approx(ns[:, Kind.B] / 1e9, rel=1e-6)
    assert update[0] == pytest.approx(ns[:, Kind.STEP] / 1e9, rel=1e-6)


@pytest.mark.parametrize(("nodes", "per_node"), [(4, 1), (2, 2), (1, 4), (4, 4)])
def test_the_ring_costs_what_price_says(nodes: int, per_node: int) -> None:
    names = [dc.name for dc in job_of().cluster.datacenters]
    sizes = [f"cluster.datacenters.{name}.nodes={nodes}" for name in names]
    sizes += [f"cluster.datacenters.{name}.gpus_per_node={per_node}" for name in names]
    job = override(job_of(), ["pp=2", "pipelines_per_cell=4", *sizes])
    cluster = cluster_arrays(job)
    batch = Batch(1, 1, 2, [((0, 1), (1, 1))], np.array([0]), np.array([4]), np.array([4]))
    layers = np.array([arrange(job).layers_per_stage])
    found = sync_s(False, cluster, sizes_of(job, 1, 1), batch, np.array([[0, 1]]), layers)
    assert found[0] == pytest.approx(price(job).compute_ns[0, :, Kind.SYNC] / 1e9, rel=1e-6)


def test_memory_is_counted_as_cost_counts_it() -> None:
    job = job_of()
    arrangement = arrange(job)
    cluster, sizes = cluster_arrays(job), sizes_of(job, 1, 1)
    dc, layers = np.array([[0, 0, 1, 1]]), np.array([arrangement.layers_per_stage])
    assert in_flight(job, cluster, sizes, dc, layers)[0] == pytest.approx(
        in_flight_cap(job, arrangement=arrangement), abs=1
    )
    static = [worker.static for worker in worker_memory(job, arrangement)]
    own = layers[0] * sizes.per_layer + sizes.reserved
    own[0] += sizes.first
    own[-1] += sizes.last
    assert own == pytest.approx(static, rel=1e-6)


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

    counts = deal(slots, replicas, fill, period)
    if counts is None:
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
