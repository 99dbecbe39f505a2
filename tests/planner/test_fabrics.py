"""Watts and fabrics of plans: what is charged, which fabric is chosen, and turns over a ring of circuits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from plan_jobs import job_of

from atlas.cost.price import price
from atlas.errors import SpecError
from atlas.planner.estimated_candidates import single_groups
from atlas.planner.fabrics import best_fabrics, energy_of, parse_kinds
from atlas.planner.judge import as_dict, judge
from atlas.planner.objective import Objective
from atlas.planner.regions import several_groups
from atlas.planner.report import front, rows
from atlas.planner.run import make_plan, start
from atlas.spec import Job, parse_job
from atlas.view.chart import front_svg


def powered(**dc: Any) -> Job:
    """Two sites of H200 by power."""
    sites = [
        {"name": name, "gpus_per_node": 2, "gpu": "H200", "power_kw": 12.0, "usd_per_gpu_hour": 3.0, "pue": 1.5, **dc}
        for name in ("east", "west")
    ]
    small = job_of().model_dump(exclude_none=True, mode="json")
    return parse_job({**small, "cluster": {**small["cluster"], "datacenters": sites}, "batch": "32 sequences"})


def test_the_front_has_no_mirror_image_that_is_faster_by_rounding() -> None:
    planned = make_plan(powered(fabric={"kind": "photonic"}), tries=0)
    figures = planned.winner.figures
    mirror = replace(planned.winner, figures=replace(figures, iteration_s=figures.iteration_s * (1 - 1e-12)))
    planned = replace(planned, rivals=(mirror, *planned.rivals))
    shown = rows(planned)
    assert "<svg" in front_svg(shown, [as_dict(judged) for judged in front(planned)], title="front")


def test_a_plan_is_charged_for_its_servers_and_fabric_with_the_pue() -> None:
    job = powered(fabric={"kind": "photonic"})
    planned = make_plan(job, tries=0)
    best = planned.winner
    found = energy_of(job.cluster, best)
    assert found is not None
    assert found.watts == pytest.approx(1.5 * best.candidate.num_gpus * (1275 + 10 + 2 * 75 / 192))
    assert found.fabric_usd == pytest.approx(best.candidate.num_gpus * 1919)
    assert found.tokens_per_joule == pytest.approx(best.figures.tokens_per_s / found.watts)
    assert rows(planned)[0]["watts"] == found.watts
    assert front(planned)[0].figures.iteration_s <= best.figures.iteration_s
    assert energy_of(job_of().cluster, best) is None


def test_photonic_rails_are_chosen_where_they_leave_more_power_to_gpus() -> None:
    job, choices = best_fabrics(powered(), "rail,photonic")
    assert {kind for _, kind in choices[0].kinds} == {"photonic"}
    assert [dc.nodes for dc in job.cluster.datacenters] == [4, 4]
    rail = next(one for one in choices if {kind for _, kind in one.kinds} == {"rail"})
    assert rail.row()["num_gpus"] < choices[0].row()["num_gpus"]
    assert rail.row()["tokens_per_joule"] < choices[0].row()["tokens_per_joule"]


def test_a_fabric_that_does_not_exist_is_refused() -> None:
    with pytest.raises(SpecError, match="no such fabric"):
        parse_kinds("rail,potonic")


def turns_job(**fabric: Any) -> Job:
    sites = [
        {"name": name, "nodes": 8, "gpu": "H200", **({"fabric": {"kind": "photonic", **fabric}} if fabric else {})}
        for name in ("east", "west")
    ]
    small = job_of().model_dump(exclude_none=True, mode="json")
    changes = {"tp": 8, "pp": 4, "pipelines_per_cell": 4, "cluster": {**small["cluster"], "datacenters": sites}}
    return parse_job({**small, **changes})


def test_slices_around_a_ring_take_longer_and_may_have_to_wait_for_it() -> None:
    electrical, ring, static, plane = (
        price(job, sharing=True)
        for job in (
            turns_job(),
            turns_job(reconfigure_ms=50.0),
            turns_job(reconfigure_ms=50.0, ports_per_gpu=3),
            turns_job(reconfigure_ms=50.0, electrical_gbps=25.0),
        )
    )
    at = (0, 0, 1)  # the boundary between the sites
    assert electrical.before_ns[at] < static.before_ns[at] < 1_000_000
    assert ring.before_ns[at] - static.before_ns[at] == 50_000_000
    assert ring.work_ns[at] - static.work_ns[at] == pytest.approx(2 * 50_000_000 / 4, abs=2)
    assert plane.before_ns[at] > electrical.before_ns[at]  # 25 Gbit/s instead of 3,200
    assert plane.circuits is not None
    assert electrical.circuits is None


RAILS = [
    pytest.param({"zero": zero}, {"provision": provision, "reconfigure_ms": ms}, id=f"{words}, {ms} ms, zero: {zero}")
    for words, provision in (("asked early", True), ("asked late", False))
    for ms in (2.0, 200.0)
    for zero in (0, 1)
]


def rails_job(changes: dict[str, Any], fabric: dict[str, Any]) -> Job:
    """Two sites of six GPUs that change circuits."""
    small = job_of().model_dump(exclude_none=True, mode="json")
    site = {"nodes": 6, "gpus_per_node": 1, "gpu": "H100", "fabric": {"kind": "photonic", **fabric}}
    sites = [{"name": name, **site} for name in ("east", "west")]
    return parse_job({**small, **changes, "pp": 3, "cluster": {**small["cluster"], "datacenters": sites}})


@pytest.mark.parametrize(("changes", "fabric"), RAILS)
def test_an_estimate_counts_changes_of_circuits(changes: dict[str, Any], fabric: dict[str, Any]) -> None:
    search = start(rails_job(changes, fabric), Objective())
    entries, _, _ = single_groups(search.space, search.cluster, search.objective)
    for entry in entries[:12]:
        judged = judge(search.space, search.cluster, entry.candidate)
        assert entry.iteration_s == pytest.approx(judged.figures.iteration_s, rel=0.15), entry.candidate


@pytest.mark.parametrize(("changes", "fabric"), RAILS)
def test_no_searched_order_on_photonic_rails_beats_its_floor(changes: dict[str, Any], fabric: dict[str, Any]) -> None:
    search = start(rails_job(changes, fabric), Objective())
    search.tries = 12
    alone, _, worth = single_groups(search.space, search.cluster, search.objective)
    apart, _ = several_groups(search.space, search.cluster, search.objective, worth, by_floor=True)
    gaps = []
    for entries in (alone, apart):
        for entry in sorted(entries, key=lambda one: one.floor)[:12:4]:
            judged = search.simulate(entry.candidate)
            assert judged is not None
            gaps.append(search.score(judged) / entry.floor)
    assert min(gaps) > 1 - 1e-6
    assert min(gaps) < 1.2
