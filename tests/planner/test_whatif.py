"""What-if: sweeps, the bottleneck, random networks."""

from __future__ import annotations

import pytest
from plan_jobs import job_of

from atlas.errors import SpecError
from atlas.evaluate import evaluate
from atlas.planner.change import changed, parse_sweep
from atlas.planner.files import plan_of
from atlas.planner.run import make_plan
from atlas.planner.whatif import WhatIfSimulator, marginals, percentiles, spread, sweep


def test_sweeps_are_read() -> None:
    assert parse_sweep("pp=2,4,8").values == (2, 4, 8)
    assert parse_sweep("a.b=1..4:4").values == (1, 2, 3, 4)
    assert parse_sweep("tp=1..2").values == (1, 2)
    assert parse_sweep("a=0.5..1:3").values == (0.5, 0.75, 1.0)
    assert parse_sweep("a=1..1000:4log").values == (1, 10, 100, 1000)
    assert parse_sweep("lose=east").values == ("east",)
    assert not parse_sweep("lose=east").numeric


@pytest.mark.parametrize(
    "text", ["", "pp", "pp=", "=3", "pp=a..b", "pp=1..2:1", "pp=0..5:3log", "pp=1..2:x", "pp=1..inf:3"]
)
def test_a_sweep_without_sense_is_refused(text: str) -> None:
    with pytest.raises(SpecError, match="--sweep"):
        parse_sweep(text)


def test_a_faster_wan_is_never_slower() -> None:
    points = sweep(WhatIfSimulator(job_of()), parse_sweep("cluster.wan.pair_gbps=1,2,5,20"))
    times = [point.iteration_s for point in points]
    assert times == sorted(times, reverse=True)


def test_a_point_of_a_sweep_is_what_simulate_gives() -> None:
    job = job_of(pipelines_per_cell=2)
    points = sweep(WhatIfSimulator(job), parse_sweep("cluster.wan.latency_ms=5,40"))
    for point in points:
        changed_job = changed(job, "cluster.wan.latency_ms", point.value)
        assert point.iteration_s == pytest.approx(evaluate(changed_job, "atlas").row()["iteration_s"], rel=1e-12)


def test_a_point_with_several_stages_per_worker_is_what_simulate_gives() -> None:
    dcs = [
        {"name": "a", "nodes": 2, "gpus_per_node": 4, "gpu": "L40S", "net_gbps": 400.0},
        {"name": "b", "nodes": 8, "gpus_per_node": 4, "gpu": "L40S"},
    ]
    cluster = {"wan": {"latency_ms": 0.5, "pair_gbps": 100.0}, "datacenters": dcs}
    model = {"layers": 32, "hidden": 2560, "heads": 32, "vocab": 32_000, "seq_len": 2048}
    job = job_of(cluster=cluster, model=model, num_microbatches=6, recompute=False, tp=2)
    result = evaluate(job, "atlas")
    assert result.single.program.num_stages == 8
    assert WhatIfSimulator(job).judged(job).figures.iteration_s == pytest.approx(result.row()["iteration_s"], rel=1e-12)


def test_a_plan_asked_for_its_own_value_has_its_predicted_figure() -> None:
    plan = plan_of(make_plan(job_of(), tries=30))
    assert WhatIfSimulator(plan.job, plan).judged(plan.job).figures.iteration_s == pytest.approx(
        plan.predicted.iteration_s
    )


def test_what_cannot_run_leaves_a_gap_with_the_reason() -> None:
    points = sweep(WhatIfSimulator(job_of()), parse_sweep("cluster.datacenters.east.nodes=4,1"))
    assert points[0].iteration_s is not None
    assert points[1].iteration_s is None
    assert "GPUs" in points[1].note


def test_a_misspelt_key_is_an_error() -> None:
    with pytest.raises(SpecError, match="unknown key"):
        sweep(WhatIfSimulator(job_of()), parse_sweep("cluster.wan.pair_gbs=1"))


def test_a_datacenter_is_lost_or_added() -> None:
    job = job_of()
    assert [dc.name for dc in changed(job, "lose", "west").cluster.datacenters] == ["east"]
    assert [dc.name for dc in changed(job, "add", "east").cluster.datacenters] == ["east", "east-2", "west"]
    twice = changed(changed(job, "add", "east"), "add", "east")
    assert [dc.name for dc in twice.cluster.datacenters] == ["east", "east-3", "east-2", "west"]
    again = sweep(WhatIfSimulator(job, replan=True), parse_sweep("lose=none,east"))
    assert again[0].iteration_s is not None
    assert again[1].iteration_s is not None
    assert again[1].note.startswith("west")
    with pytest.raises(SpecError, match="no such datacenter"):
        changed(job, "lose", "mars")


def test_a_plan_stays_where_it_is() -> None:
    plan = plan_of(make_plan(job_of(), tries=1))
    asked = WhatIfSimulator(plan.job, plan)
    now = asked.judged(plan.job)
    assert now.candidate.where() == asked.judged(changed(plan.job, "cluster.wan.latency_ms", 200)).candidate.where()


def test_a_job_with_several_stages_a_worker_is_asked_with_one() -> None:
    plain, interleaved = (WhatIfSimulator(job_of(interleave=k, pipelines_per_cell=2)) for k in (1, 2))
    assert interleaved.judged(interleaved.job).figures == plain.judged(plain.job).figures


def test_the_bottleneck_is_what_helps_most() -> None:
    slow = job_of(
        cluster={**job_of().cluster.model_dump(exclude_none=True), "wan": {"latency_ms": 1.0, "pair_gbps": 0.2}}
    )
    _, found = marginals(WhatIfSimulator(slow))
    assert found[0].key == "cluster.wan.pair_gbps"
    assert found[0].saves_s > 0
    _, found = marginals(
        WhatIfSimulator(
            job_of(
                cluster={
                    **job_of().cluster.model_dump(exclude_none=True),
                    "wan": {"latency_ms": 0.1, "pair_gbps": 400.0},
                }
            )
        )
    )
    assert found[0].key == "efficiency"


def test_random_networks_have_percentiles_and_a_seed() -> None:
    asked = WhatIfSimulator(job_of())
    times = spread(asked, 12, wan=0.3, compute=0.0, seed=1).times_s
    assert times == spread(asked, 12, wan=0.3, compute=0.0, seed=1).times_s
    assert len(set(times)) > 1
    found = percentiles(times)
    assert found["p5_s"] <= found["p50_s"] <= found["p95_s"] <= found["worst_s"]
    still = spread(asked, 2, wan=0.0, compute=0.0, seed=1).times_s
    assert still == pytest.approx([asked.judged(asked.job).figures.iteration_s] * 2, rel=1e-6)
