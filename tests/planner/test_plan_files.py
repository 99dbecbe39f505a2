"""The Plan file: written, read back, refused when broken; and the page beside it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from plan_jobs import job_of, random_job

from atlas import cli
from atlas.errors import SpecError
from atlas.planner.candidate import Candidate, Group
from atlas.planner.files import candidate_of, plan_of
from atlas.planner.judge import judge
from atlas.planner.objective import Objective
from atlas.planner.report import front, rows, scene
from atlas.planner.run import SearchResult, finished, make_plan, start
from atlas.spec.plan import Plan, load_job_or_plan, plan_text
from atlas.view.map import plan_page
from atlas.view.places import PANEL, map_places


@pytest.fixture(scope="module")
def planned() -> SearchResult:
    return make_plan(job_of(), tries=10)


@pytest.fixture(scope="module")
def text(planned: SearchResult) -> str:
    return plan_text(plan_of(planned))


def test_a_plan_survives_the_file(planned: SearchResult, text: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(text)
    job, plan = load_job_or_plan(path)
    assert plan is not None
    assert candidate_of(plan) == planned.winner.candidate
    assert plan.predicted.iteration_s == pytest.approx(planned.iteration_s)
    assert plan_text(plan) == text
    assert (job.pp, job.tp, job.placement) == (plan.job.pp, plan.job.tp, plan.job.placement)


def simulated_s(plan: Plan, path: Path, capsys: pytest.CaptureFixture[str]) -> float:
    """What `atlas simulate` finds in the file."""
    path.write_text(plan_text(plan))
    assert cli.main(["simulate", str(path), "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["schedule"] == plan.schedule.name
    return float(row.get("all_groups_s", row["iteration_s"]))


@pytest.mark.parametrize("tries", [0, 6, None])
@pytest.mark.parametrize("strategy", ["ours", "algorithm1", "exhaustive"])
def test_simulate_finds_the_figure_in_the_file(
    strategy: str, tries: int | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for job in (job_of(), random_job(0), random_job(7)):
        plan = plan_of(make_plan(job, strategy=strategy, tries=tries, keep=["microbatch"]))
        assert simulated_s(plan, tmp_path / "plan.yaml", capsys) == pytest.approx(plan.predicted.iteration_s, rel=1e-9)


@pytest.mark.parametrize("tries", [0, 4])
@pytest.mark.parametrize("sharing", [True, False])
def test_simulate_finds_the_figure_of_several_groups_and_of_turns(
    sharing: bool, tries: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = job_of(num_microbatches=6)
    over = Group((("east", 1), ("west", 1)), (4, 4), 1, 2, 6)
    alone = [
        Group(((name, 2),), layers, 1, 1, count) for name, layers, count in (("east", (3, 5), 7), ("west", (4, 4), 5))
    ]
    for groups in ((over,), tuple(alone)):
        search = start(job, Objective())
        best = judge(search.space, search.cluster, Candidate(1, 1, groups, sharing))
        planned = finished(search, best, "ours", tries)
        plan = plan_of(planned)
        assert plan.schedule.name == ("atlas" if tries else "1f1b-eager")
        assert simulated_s(plan, tmp_path / "plan.yaml", capsys) == pytest.approx(plan.predicted.iteration_s, rel=1e-9)
        if not tries:
            assert planned.iteration_s == pytest.approx(best.figures.iteration_s, rel=1e-6)


def test_a_job_file_is_still_a_job_file() -> None:
    job, plan = load_job_or_plan(Path(__file__).parents[2] / "examples" / "tiny.yaml", ["pp=2"])
    assert (job.pp, plan) == (2, None)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("plan: 1", "plan: 2", "plan = 2"),
        ("schedule:", "shedule:", "unknown key"),
        ("runnable: ", "runnable: perhaps ", "runnable"),
        ("  cells: ", "  cells: x", "cells"),
        ("- {dc: east, stages: ", "- {dc: mars, stages: ", "no such datacenter"),
        ("  hidden", "  hiden", "hid"),
    ],
)
def test_a_broken_plan_is_one_message_with_its_line(
    text: str, tmp_path: Path, old: str, new: str, message: str
) -> None:
    path = tmp_path / "plan.yaml"
    assert old in text or old == "  hidden"
    path.write_text(
        text.replace(old, new, 1).replace("hidden:", "hiden:") if old == "  hidden" else text.replace(old, new, 1)
    )
    with pytest.raises(SpecError, match=message) as caught:
        load_job_or_plan(path)
    assert "plan.yaml:" in str(caught.value)


def test_a_plan_for_another_runtime_says_that_it_is_not_runnable() -> None:
    job = job_of(num_microbatches=6)
    assert plan_of(make_plan(job, tries=0)).runnable == "yes"
    assert "megatron" in plan_of(make_plan(job.model_copy(update={"runtime": "megatron"}), tries=0)).runnable


def test_the_report_names_a_reason_for_every_rival(planned: SearchResult) -> None:
    found = rows(planned)
    assert found[0]["lost"] == ""
    assert all(row["lost"] for row in found[1:])


def test_the_front_has_no_plan_that_another_beats_in_both(planned: SearchResult) -> None:
    points = [(j.figures.iteration_s, j.figures.usd_per_iteration) for j in front(planned)]
    for s, usd in points:
        assert not any(o != (s, usd) and o[0] <= s and o[1] <= usd for o in points)


def test_the_page_stands_alone_and_shows_every_datacenter(planned: SearchResult) -> None:
    page = plan_page(scene(planned), notes=["<note>"])
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "").replace("http-equiv", "")
    assert "<script" not in page
    assert "&lt;note&gt;" in page
    for name in ("east", "west"):
        assert f">{name}</text>" in page


def test_datacenters_are_drawn_apart_and_near_ones_nearer() -> None:
    latency = [[0.0, 5.0, 50.0], [5.0, 0.0, 50.0], [50.0, 50.0, 0.0]]
    dcs = [{"name": n, "location": None} for n in "abc"]
    at, coast = map_places({"datacenters": dcs, "latency_ms": latency, "joined": [[True] * 3] * 3})

    def apart(i: int, j: int) -> float:
        return ((at[i][0] - at[j][0]) ** 2 + (at[i][1] - at[j][1]) ** 2) ** 0.5

    assert 80 < apart(0, 1) < apart(0, 2)
    assert coast == ""


def test_datacenters_with_a_location_are_where_they_are() -> None:
    places = {"tokyo": (35.7, 139.7), "oregon": (45.6, -121.2), "virginia": (38.9, -77.5)}
    dcs = [{"name": name, "location": location} for name, location in places.items()]
    nowhere = [[0.0] * 3] * 3
    scene = {"datacenters": dcs, "latency_ms": nowhere, "joined": nowhere}
    for (tokyo, oregon, virginia), coast in (map_places(scene), map_places(scene, PANEL)):
        assert tokyo[0] < oregon[0] < virginia[0]  # over the Pacific: the widest gap is Europe's side
        assert oregon[1] < virginia[1] < tokyo[1]  # north is up
        assert 1000 < len(coast) < 8000
