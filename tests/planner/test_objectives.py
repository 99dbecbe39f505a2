"""Money, limits and deadlines."""

from __future__ import annotations

import pytest
from plan_jobs import job_of

from atlas.cost.cluster_arrays import cluster_arrays
from atlas.cost.compute import embedding_params, head_params, layer_params
from atlas.errors import InfeasibleError, SpecError
from atlas.planner.candidate import Candidate, Group
from atlas.planner.judge import judge
from atlas.planner.objective import Objective, amount, objective_of, require_prices
from atlas.planner.run import explore, make_plan, start
from atlas.planner.space import space_of


def best(objective: Objective):  # type: ignore[no-untyped-def]
    search = start(job_of(), objective)
    explore(search, "ours")
    return search


def test_the_cheapest_plan_is_cheaper_and_slower_than_the_fastest() -> None:
    fast, cheap = best(Objective()).best.figures, best(Objective("cost")).best.figures
    assert cheap.usd_per_iteration < fast.usd_per_iteration
    assert cheap.iteration_s > fast.iteration_s


def test_limits_are_kept_by_the_simulated_figures() -> None:
    fast = best(Objective()).best.figures
    within = best(Objective(max_usd_per_hour=0.6 * fast.usd_per_hour)).best.figures
    assert within.usd_per_hour <= 0.6 * fast.usd_per_hour
    assert within.iteration_s > fast.iteration_s
    enough = best(Objective("cost", min_tokens_per_s=0.7 * fast.tokens_per_s)).best.figures
    assert enough.tokens_per_s >= 0.7 * fast.tokens_per_s
    assert enough.usd_per_iteration <= fast.usd_per_iteration


def test_the_cheapest_fast_enough_plan_is_the_one_that_looking_at_everything_finds() -> None:
    fast = best(Objective()).best.figures
    goal = Objective("cost", min_tokens_per_s=0.8 * fast.tokens_per_s)
    every = start(job_of(), goal, keep=("microbatch",))
    explore(every, "exhaustive")
    ours = start(job_of(), goal, keep=("microbatch",))
    explore(ours, "ours")
    assert every.best is not None
    assert ours.best is not None
    assert ours.score(ours.best) <= 1.01 * every.score(every.best)


def test_a_limit_that_no_plan_meets_is_refused_with_the_nearest_plan() -> None:
    with pytest.raises(InfeasibleError, match=r"the closest misses it by .* \$2\.00 an hour"):
        make_plan(job_of(), objective=Objective(max_usd_per_hour=0.01), tries=1)


def test_every_wan_byte_is_paid_for() -> None:
    job = job_of()
    space, cluster = space_of(job), cluster_arrays(job)
    pipeline = Candidate(1, 1, (Group((("east", 2), ("west", 2)), (2, 2, 2, 2), 2, 1, 8),))
    figures = judge(space, cluster, pipeline).figures
    activation = 2048 * 2048 * 2
    assert figures.wan_bytes == 2 * 16 * activation
    assert figures.egress_usd == pytest.approx(2 * 16 * activation / 1e9 * 0.02)
    rent = figures.iteration_s * (4 * 2.0 + 4 * 3.0) / 3600
    assert figures.usd_per_iteration == pytest.approx(rent + figures.egress_usd)

    one = Group((("east", 2),), (4, 4), 2, 1, 4)
    other = Group((("west", 2),), (4, 4), 2, 1, 4)
    apart = judge(space, cluster, Candidate(1, 1, (one, other))).figures
    model = job.model
    gradient = 4 * (8 * layer_params(model) + embedding_params(model) + head_params(model))
    assert apart.wan_bytes == pytest.approx(2 * gradient)  # a ring of two: all of it once each way
    # 2 (G - 1) / G of the gradient over the four node pairs in use, of 5 Gbit/s each
    assert apart.parts_s["sync"] > gradient * 8 / (4 * 5e9)


def test_a_missing_price_is_an_error_and_a_price_of_nothing_is_a_price() -> None:
    dcs = [{"name": "a", "nodes": 2, "gpus_per_node": 1}, {"name": "b", "nodes": 2, "usd_per_gpu_hour": 0.0}]
    job = job_of(cluster={"datacenters": dcs, "wan": {"latency_ms": 1.0}})
    with pytest.raises(SpecError, match=r"datacenters\.a\.usd_per_gpu_hour"):
        require_prices(job)


@pytest.mark.parametrize(
    ("flags", "limits"),
    [
        ({"budget": "500/h"}, {"max_usd_per_hour": 500.0}),
        ({"budget": "$2.5/it"}, {"max_usd_per_iteration": 2.5}),
        ({"min_throughput": "0.03it/s"}, {"min_tokens_per_s": 30.0}),
        ({"min_throughput": "0.03"}, {"min_tokens_per_s": 30.0}),
        ({"min_throughput": "50_000 tok/s"}, {"min_tokens_per_s": 50_000.0}),
        ({"tokens": "1T", "deadline": "10d"}, {"min_tokens_per_s": 1e12 / 864_000}),
    ],
)
def test_flags_become_limits(flags: dict[str, str], limits: dict[str, float]) -> None:
    found = objective_of("cost", tokens_per_iteration=1000, **flags)
    for name, value in limits.items():
        assert getattr(found, name) == pytest.approx(value)


@pytest.mark.parametrize("text", ["", "x", "-3/h", "0/h", "500", "1e99/h", "nan/h", "5/week"])
def test_a_budget_without_sense_is_refused(text: str) -> None:
    with pytest.raises(SpecError, match="--budget"):
        amount(text, "--budget", {"/h": 1, "/it": 1}, "500/h")
