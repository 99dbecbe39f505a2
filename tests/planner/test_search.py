"""The search: as good as looking at everything, never worse than the paper's, within what there is."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_jobs import job_of, random_job, two_regions

from atlas.cost.arrange import arrange
from atlas.cost.memory import memory_rule
from atlas.errors import InfeasibleError, SpecError
from atlas.planner.candidate import Candidate
from atlas.planner.objective import Objective
from atlas.planner.run import explore, make_plan, start
from atlas.planner.search import MAX_SIMULATIONS, Search
from atlas.spec import Job, Place, parse_job


def searched(job: Job, strategy: str, objective: Objective | None = None, **options: object) -> Search:
    search = start(job, objective or Objective(), **options)  # type: ignore[arg-type]
    explore(search, strategy)
    return search


def best_score(search: Search) -> float:
    assert search.best is not None
    return search.score(search.best)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("minimise", ["throughput", "cost"])
def test_ours_is_as_good_as_simulating_everything(seed: int, minimise: str) -> None:
    job, goal = random_job(seed), Objective(minimise)  # type: ignore[arg-type]
    every = searched(job, "exhaustive", goal)
    ours = searched(job, "ours", goal)
    assert best_score(ours) <= 1.01 * best_score(every)
    assert ours.num_simulated <= MAX_SIMULATIONS


def three(nodes: int) -> Job:
    """Of 1,365 candidates with 8 nodes many have a lower floor than the best one, and none of these comes near it."""
    dcs = [
        {"name": f"d{i}", "nodes": n, "gpus_per_node": 1, "gpu": "A100-80", "net_gbps": gbps}
        for i, (n, gbps) in enumerate([(nodes, 50.0), (8, 100.0), (8, 50.0)])
    ]
    model = {"layers": 16, "hidden": 4096, "heads": 16, "vocab": 32_000, "seq_len": 2048}
    cluster = {"datacenters": dcs, "wan": {"latency_ms": 1.0, "pair_gbps": 8.0, "trunk_gbps": 20.0}}
    return job_of(model=model, cluster=cluster, num_microbatches=4, pp=4, pipelines_per_cell=3, recompute=False)


def two(nodes: int) -> Job:
    """With 12 nodes the best plan is a tenth slower than another under `1f1b-eager`, and a tenth faster under its
    searched order."""
    dcs = [
        {"name": f"d{i}", "nodes": n, "gpus_per_node": 1, "gpu": "A100-80", "net_gbps": gbps}
        for i, (n, gbps) in enumerate([(nodes, 400.0), (8, 100.0)])
    ]
    model = {"layers": 16, "hidden": 2048, "heads": 16, "vocab": 32_000, "seq_len": 4096}
    cluster = {"datacenters": dcs, "wan": {"latency_ms": 20.0, "pair_gbps": 50.0}}
    return job_of(model=model, cluster=cluster, num_microbatches=16, pipelines_per_cell=1, recompute=False)


def groups(nodes: int) -> Job:
    """With 8 nodes every datacenter has room for a group of its own; a group that two of them share is faster."""
    dcs = [
        {"name": f"d{i}", "nodes": n, "gpus_per_node": 1, "gpu": "A100-80", "net_gbps": gbps}
        for i, (n, gbps) in enumerate([(nodes, 400.0), (8, 400.0), (8, 100.0)])
    ]
    model = {"layers": 12, "hidden": 4096, "heads": 16, "vocab": 32_000, "seq_len": 4096}
    cluster = {"datacenters": dcs, "wan": {"latency_ms": 40.0, "pair_gbps": 50.0}}
    how = {"num_microbatches": 4, "pp": 3, "pipelines_per_cell": 2, "memory_gib": 16.0}
    return job_of(model=model, cluster=cluster, recompute=False, **how)


def equals(nodes: int) -> Job:
    """Three of the four datacenters are equal: with 6 nodes, lines that differ in the equal ones are many."""
    dcs = [
        {"name": f"d{i}", "nodes": n, "gpus_per_node": 1, "gpu": "A100-80", "net_gbps": gbps}
        for i, (n, gbps) in enumerate([(nodes, 100.0), (8, 50.0), (8, 50.0), (8, 50.0)])
    ]
    model = {"layers": 16, "hidden": 1024, "heads": 16, "vocab": 32_000, "seq_len": 2048}
    cluster = {"datacenters": dcs, "wan": {"latency_ms": 30.0, "pair_gbps": 50.0}}
    how = {"num_microbatches": 16, "pipelines_per_cell": 4, "memory_gib": 12.0}
    return job_of(model=model, cluster=cluster, recompute=True, **how)


SWEEPS = [(two, (8, 10, 12)), (three, (5, 8)), (groups, (6, 8)), (equals, (4, 6))]


@pytest.mark.parametrize(("with_nodes", "counts"), SWEEPS)
def test_more_nodes_are_never_worse(with_nodes: Callable[[int], Job], counts: tuple[int, ...]) -> None:
    seconds = [make_plan(with_nodes(nodes), global_batch=64).iteration_s for nodes in counts]
    assert all(more <= 1.001 * min(seconds[: k + 1]) for k, more in enumerate(seconds))


@pytest.mark.parametrize("seed", range(20, 28))
def test_ours_is_never_worse_than_algorithm_1(seed: int) -> None:
    job = random_job(seed)
    try:
        paper = searched(job, "algorithm1")
    except InfeasibleError:
        pytest.skip("the job's own degrees do not fit")
    assert best_score(searched(job, "ours")) <= best_score(paper)


@settings(max_examples=15)
@given(st.integers(100, 10_000))
def test_nothing_simulated_exceeds_gpus_or_memory(seed: int) -> None:
    job = random_job(seed)
    try:
        search = searched(job, "ours")
    except InfeasibleError:
        return
    for judged in search.judged.values():
        candidate = judged.candidate
        for name, used in candidate.gpus.items():
            dc = job.cluster.dc(name)
            assert used <= dc.nodes * (dc.gpus_per_node // candidate.tp) * candidate.tp
        assert candidate.slots >= search.space.total_microbatches(candidate.microbatch)
        assert judged.figures.peak_gib <= judged.figures.memory_gib
        for k in range(len(candidate.groups)):
            one = candidate.job(job, k)
            memory_rule(one, arrangement=arrange(one))


def test_the_same_search_twice_gives_the_same_plan() -> None:
    first, second = (searched(job_of(), "ours") for _ in range(2))
    assert list(first.judged) == list(second.judged)
    assert [first.score(j) for j in first.ranking()] == [second.score(j) for j in second.ranking()]


def test_every_candidate_trains_on_the_same_global_batch() -> None:
    search = searched(job_of(), "ours")
    assert search.space.sequences == 8 * 2
    assert {judged.figures.tokens for judged in search.judged.values()} == {16 * 2048}


def test_one_region_alone_wins_where_the_wan_is_slow_and_loses_where_it_is_fast() -> None:
    slow = job_of(cluster={**job_of().cluster.model_dump(), "wan": {"latency_ms": 100.0, "pair_gbps": 0.1}})
    best = searched(slow, "ours").best
    assert best is not None
    assert best.candidate.kind == "one"
    fast = job_of(cluster={**job_of().cluster.model_dump(), "wan": {"latency_ms": 0.1, "pair_gbps": 400.0}})
    best = searched(fast, "ours").best
    assert best is not None
    assert best.candidate.kind != "one"


def test_data_parallelism_across_regions_wins_where_the_model_is_small_and_the_wan_is_wide() -> None:
    dcs = [{"name": n, "nodes": 2, "gpus_per_node": 1, "gpu": "L4", "net_gbps": 100.0} for n in ("a", "b")]
    job = parse_job(
        {
            "model": {"layers": 4, "hidden": 512, "heads": 8, "vocab": 2048, "seq_len": 8192},
            "cluster": {"datacenters": dcs, "wan": {"latency_ms": 60.0, "pair_gbps": 50.0}},
            "num_microbatches": 16,
            "pp": 2,
            "cells": 2,
            "pipelines_per_cell": 1,
        }
    )
    best = searched(job, "ours").best
    assert best is not None
    assert best.candidate.kind == "data"
    assert len(best.candidate.groups) == 2


def test_a_fast_and_a_slow_region_share_the_batch_by_speed() -> None:
    dcs = [{"name": n, "nodes": 2, "gpus_per_node": 1, "gpu": g} for n, g in (("old", "L4"), ("new", "H100"))]
    job = parse_job(
        {
            "model": {"layers": 4, "hidden": 512, "heads": 8, "vocab": 2048, "seq_len": 8192},
            "cluster": {"datacenters": dcs, "wan": {"latency_ms": 60.0, "pair_gbps": 50.0}},
            "num_microbatches": 32,
            "pp": 2,
            "cells": 2,
            "pipelines_per_cell": 1,
        }
    )
    for judged in searched(job, "ours").judged.values():
        groups = {group.places[0][0]: group for group in judged.candidate.groups}
        if len(groups) == 2 and groups["old"].replicas == groups["new"].replicas:
            assert groups["old"].num_microbatches < groups["new"].num_microbatches
            return
    pytest.fail("no candidate with both regions was simulated")


@pytest.mark.parametrize(
    ("strategy", "tcp"),
    [("ours", "one"), ("ours", "many"), ("algorithm1", "many"), ("exhaustive", "one"), ("exhaustive", "many")],
)
def test_what_is_kept_stays_as_the_job_has_it(strategy: str, tcp: str) -> None:
    def has(job: Job, candidate: Candidate, key: str) -> bool:
        if key in ("tp", "microbatch"):
            return bool(getattr(candidate, key) == getattr(job, key))
        if key == "cells":
            return sum(group.cells for group in candidate.groups) == job.cells
        return {getattr(group, key) for group in candidate.groups} == {getattr(job, key)}

    num_held = 0
    for seed in (0, 1, 4, 6):
        job = random_job(seed)
        for keep in (("pp", "microbatch"), ("tp", "pipelines_per_cell"), ("cells",), ("pipelines_per_cell", "cells")):
            with suppress(InfeasibleError, SpecError):
                found = searched(job, strategy, keep=keep, tcp=tcp).judged
                assert all(has(job, candidate, key) for candidate in found for key in keep), (seed, keep)
                num_held += len(found)
    assert num_held


@pytest.mark.parametrize("tcp", ["one", "many"])
def test_kept_cells_hold_in_groups_along_a_tour(tcp: str) -> None:
    """On many datacenters."""
    dcs = [{"name": f"d{i}", "nodes": 2 + i, "gpus_per_node": 1, "gpu": "A100-40"} for i in range(6)]
    job = job_of(cluster={"datacenters": dcs, "wan": {"latency_ms": 5.0, "pair_gbps": 50.0}})
    found = searched(job, "ours", keep=("pipelines_per_cell",), tcp=tcp, kind="data").judged
    assert found
    assert {group.pipelines_per_cell for candidate in found for group in candidate.groups} == {2}


def test_plans_on_one_connection_take_no_turns() -> None:
    """Groups along a tour are as large as their pipelines allow."""
    dcs = [{"name": f"d{i}", "nodes": 2 + i, "gpus_per_node": 1, "gpu": "A100-40"} for i in range(6)]
    cluster = {"datacenters": dcs, "wan": {"latency_ms": 5.0, "pair_gbps": 50.0}}
    found = searched(job_of(cluster=cluster), "ours", tcp="one").judged
    assert {candidate.kind for candidate in found} == {"one", "pipeline", "data"}
    assert not any(candidate.sharing for candidate in found)


def test_links_that_are_not_there_are_not_used() -> None:
    dcs = [{"name": n, "nodes": 2, "gpus_per_node": 1, "gpu": "A100-40"} for n in ("a", "b", "c")]
    links = [{"between": ["a", "b"], "latency_ms": 5.0}, {"between": ["b", "c"], "latency_ms": 5.0}]
    for strategy in ("ours", "exhaustive"):
        for candidate in searched(job_of(cluster={"datacenters": dcs, "links": links}), strategy).judged:
            for group in candidate.groups:
                names = [name for name, _ in group.places]
                assert ("a", "c") not in itertools.pairwise(names)
                assert ("c", "a") not in itertools.pairwise(names)


def test_an_infeasible_job_says_what_would_make_it_fit() -> None:
    huge = job_of(model={"layers": 40, "hidden": 8192, "heads": 64, "vocab": 32_000, "seq_len": 2048})
    with pytest.raises(InfeasibleError, match=r"no plan fits: .* GiB .*nodes in east instead of 4") as caught:
        make_plan(huge)
    assert "GiB for the job" in str(caught.value)


def test_no_memory_is_suggested_for_a_job_that_fits_but_takes_too_long() -> None:
    with pytest.raises(InfeasibleError, match="one op takes longer") as caught:
        make_plan(job_of(efficiency=1e-9))
    assert "GiB" not in str(caught.value)
    with pytest.raises(InfeasibleError, match="more than 100,000 in one iteration"):
        make_plan(job_of(), global_batch=10**9)


def test_a_plan_of_weeks_an_iteration_is_a_plan() -> None:
    assert make_plan(job_of(efficiency=1e-6, num_microbatches=5_000), tries=0).iteration_s > 1e6


def test_a_missing_link_is_named() -> None:
    dcs = [{"name": n, "nodes": 4, "gpus_per_node": 1, "gpu": "L4"} for n in ("a", "b", "c")]
    model = {"layers": 10, "hidden": 4096, "heads": 32, "vocab": 32_000, "seq_len": 1024}
    job = job_of(model=model, cluster={"datacenters": dcs, "links": [{"between": ["a", "b"], "latency_ms": 1.0}]})
    tight = job.model_copy(update={"memory_gib": 6.0})
    with pytest.raises(InfeasibleError, match="a link between"):
        make_plan(tight)


def test_an_interrupted_search_keeps_the_best_so_far() -> None:
    calls = 0

    def progress(what: str, done: int, total: int) -> None:
        nonlocal calls
        calls += what == "simulating"
        if calls == 4:
            raise KeyboardInterrupt

    planned = make_plan(job_of(), progress=progress)
    assert planned.interrupted
    assert planned.num_simulated == 3


def test_the_winner_is_searched_and_simulate_finds_the_same_figure() -> None:
    from atlas.evaluate import evaluate

    planned = make_plan(job_of(), tries=20)
    assert planned.schedule == "atlas"
    again = evaluate(planned.winner.candidate.job(planned.job), "atlas", budget=20, seed=0).row()
    assert again["iteration_s"] == pytest.approx(planned.iteration_s, rel=1e-9)
    assert planned.iteration_s <= planned.winner.figures.iteration_s


def test_a_profile_limits_the_search_to_what_was_measured(tmp_path: Path) -> None:
    layer = {"forward_s": 0.01, "backward_s": 0.02}
    entries = [{"gpu": "A100-40", "microbatch": 2, "tp": 1, "seq_len": 2048, "layer": layer}]
    path = tmp_path / "profile.json"
    path.write_text(json.dumps({"entries": entries}))
    search = searched(job_of(profile=str(path)), "ours")
    assert {candidate.microbatch for candidate in search.judged} == {2}


def test_the_search_ends_soon_on_many_datacenters() -> None:
    dcs = [{"name": f"d{i}", "nodes": 1 + i % 3, "gpus_per_node": 2, "gpu": "A100-40"} for i in range(40)]
    job = job_of(cluster={"datacenters": dcs, "wan": {"latency_ms": 20.0}})
    began = time.process_time()
    searched(job, "ours")
    assert time.process_time() - began < 20


def names_of(search: Search) -> set[frozenset[str]]:
    return {frozenset(judged.candidate.gpus) for judged in search.judged.values()}


@pytest.mark.parametrize("strategy", ["ours", "algorithm1", "exhaustive"])
def test_kept_datacenters_are_all_used_and_no_others(strategy: str) -> None:
    dcs = [{"name": n, "nodes": 4, "gpus_per_node": 1, "gpu": "A100-40"} for n in ("east", "west", "north")]
    job = job_of(cluster={"datacenters": dcs, "wan": {"latency_ms": 20.0}}, pp=2, num_microbatches=4)
    assert names_of(searched(job, "ours", keep=("datacenters", "microbatch"))) == {frozenset(("east", "west", "north"))}
    placed = job.model_copy(update={"placement": (Place(dc="east", stages=1), Place(dc="west", stages=1))})
    found = names_of(searched(placed, strategy, keep=("datacenters", "microbatch", "tp", "pp")))
    assert found == {frozenset(("east", "west"))}


def test_six_kept_datacenters_are_all_used() -> None:
    dcs = [{"name": f"d{i}", "nodes": 2 + i, "gpus_per_node": 1, "gpu": "A100-40"} for i in range(6)]
    search = searched(job_of(cluster={"datacenters": dcs, "wan": {"latency_ms": 5.0}}), "ours", keep=("datacenters",))
    assert names_of(search) == {frozenset(f"d{i}" for i in range(6))}
    assert {judged.candidate.kind for judged in search.judged.values()} == {"pipeline", "data"}


@pytest.mark.parametrize("seed", [0, 6, 31])
def test_the_best_across_regions_is_as_good_as_what_is_found_when_nothing_else_is_allowed(seed: int) -> None:
    free = searched(two_regions(seed), "ours").best_of("pipeline")
    alone = searched(two_regions(seed), "ours", keep=("datacenters",)).best_of("pipeline")
    assert free is not None
    assert alone is not None
    assert free.figures.iteration_s <= 1.01 * alone.figures.iteration_s


def test_divided_optimizer_state_lets_more_plans_fit() -> None:
    """One GPU holds the model only if 8 pipelines divide its optimizer state."""

    def best(zero: int, memory_gib: float) -> tuple[int, float]:
        dcs = [{"name": "east", "nodes": 1, "gpus_per_node": 8, "gpu": "A100-40"}]
        sizes = {"num_microbatches": 64, "pipelines_per_cell": 1, "memory_gib": memory_gib}
        job = job_of(cluster={"datacenters": dcs}, zero=zero, **sizes)
        ours, every = (searched(job, strategy) for strategy in ("ours", "exhaustive"))
        assert best_score(ours) <= 1.01 * best_score(every)
        assert ours.best is not None
        memory_rule(ours.best.candidate.job(job), arrange(ours.best.candidate.job(job)))  # raises if it does not fit
        return ours.best.candidate.replicas, best_score(ours)

    (few, slow), (many, fast) = best(0, 9.0), best(1, 9.0)
    assert (few, many) == (4, 8)
    assert fast < slow
    assert best(1, 40.0) == best(0, 40.0), "where all fits, nothing changes"
