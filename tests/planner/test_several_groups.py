"""A plan with several groups of pipelines: every command shows the iteration time of all groups."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from plan_jobs import job_of

from atlas import api, cli
from atlas.commands.view import of_groups
from atlas.errors import SpecError
from atlas.planner.candidate import Candidate, Group
from atlas.planner.files import plan_of
from atlas.planner.judge import judge
from atlas.planner.objective import Objective
from atlas.planner.run import finished, start
from atlas.spec.plan import Plan, plan_text
from atlas.ui.live_run import LiveRun
from atlas.ui.run_files import FolderFollower, PageFacts, write_facts
from bubbletea.cli import main as bubbletea

SCHEDULE, SLOWEST = "1f1b-eager", "west"
SAYS_GROUP = "The plan has 2 groups of pipelines"


@pytest.fixture(scope="module")
def plan() -> Plan:
    """East is faster than west, and the WAN between the two is slow. Planned under 1f1b-eager."""
    parts = (("east", (3, 5), 5), ("west", (4, 4), 11))
    groups = tuple(Group(((name, 2),), layers, 1, 1, count) for name, layers, count in parts)
    search = start(job_of(), Objective())
    best = judge(search.space, search.cluster, Candidate(1, 1, groups))
    return plan_of(finished(search, best, "ours", 0))


@pytest.fixture
def path(plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("COLUMNS", "80")
    (tmp_path / "plan.yaml").write_text(plan_text(plan))
    return str(tmp_path / "plan.yaml")


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert cli.main(list(words)) == 0
    return " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    "flags", [[], ["--schedule", SCHEDULE], ["--tcp", "many"], ["--schedule", SCHEDULE, "--tcp", "many"]]
)
def test_simulate_finds_the_time_of_all_groups_under_any_flag(
    flags: list[str], plan: Plan, path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["simulate", path, "--json", *flags]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert all(row["all_groups_s"] > row["iteration_s"] for row in rows)
    (row,) = (row for row in rows if row["schedule"] == SCHEDULE)
    assert row["all_groups_s"] == pytest.approx(plan.predicted.iteration_s, rel=1e-9)
    assert (row["group"], row["num_groups"]) == (2, 2)
    assert max(row["all_groups_s"] * row["speedup"] for row in rows) == pytest.approx(
        max(row["all_groups_s"] for row in rows)
    )


def test_one_connection_makes_the_all_reduce_between_groups_slower(plan: Plan) -> None:
    one, many = (api.simulate(plan, SCHEDULE, tcp=tcp).table()[0] for tcp in ("one", "many"))
    assert one["all_groups_s"] > 1.05 * many["all_groups_s"]
    assert one["iteration_s"] == many["iteration_s"]


def test_the_api_has_all_groups_of_every_schedule(plan: Plan) -> None:
    found = api.simulate(plan, ["gpipe", SCHEDULE, "zero-bubble"])
    rows = found.table()
    assert [whole.iteration_s for whole in found.wholes] == [row["all_groups_s"] for row in rows]
    assert [len(whole.results) for whole in found.wholes] == [2, 2, 2]
    fastest = min((row for row in rows if row["fits"]), key=lambda row: row["all_groups_s"])
    assert found.best.schedule == fastest["schedule"]
    assert found.best.case.layout.rank_dc == (SLOWEST, SLOWEST)
    assert SAYS_GROUP in found.page()


def test_the_job_of_a_plan_stands_for_all_its_groups(plan: Plan) -> None:
    (whole,), (row,) = api.simulate(plan, SCHEDULE).table(), api.simulate(plan.job, SCHEDULE).table()
    assert (row["all_groups_s"], row["num_groups"]) == (whole["all_groups_s"], 2)
    slower = plan.job.model_copy(update={"microbatch": 2})
    assert api.simulate(slower, SCHEDULE).table()[0]["all_groups_s"] > 1.1 * row["all_groups_s"]
    (alone,) = api.simulate(plan.job.alone(), SCHEDULE).table()
    assert "all_groups_s" not in alone
    with pytest.raises(SpecError, match="another shape"):
        api.simulate(plan.job.model_copy(update={"num_microbatches": 64}), SCHEDULE)
    with pytest.raises(SpecError, match="Give the plan"):
        api.whatif(plan.job)


def test_the_memory_is_that_of_the_tightest_group(plan: Plan) -> None:
    small = plan.job.cluster.datacenters[0].model_copy(update={"gpu": "L4"})
    cluster = plan.job.cluster.model_copy(update={"datacenters": (small, *plan.job.cluster.datacenters[1:])})
    job = plan.job.model_copy(update={"cluster": cluster, "microbatch": 8})
    found = api.simulate(plan.model_copy(update={"job": job}), "gpipe")
    every = [result.row() for result in found.wholes[0].results]
    tightest = min(every, key=lambda row: row["memory_gib"] - row["peak_gib"])
    (row,) = found.table()
    assert (row["peak_gib"], row["memory_gib"], row["fits"]) == tuple(
        tightest[key] for key in ("peak_gib", "memory_gib", "fits")
    )
    assert len({one["memory_gib"] for one in every}) == 2


def test_the_text_says_which_group_it_shows(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["simulate", path, "--schedule", SCHEDULE, "--schedule", "gpipe"]) == 0
    said = capsys.readouterr().out
    assert max(map(len, said.splitlines())) <= 80
    said = " ".join(said.split())
    assert f"{SAYS_GROUP}. This is the slowest (group 2)" in said
    assert "an iteration of all groups. The slowest group alone: " in said


def test_compare_and_view_show_all_groups(path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = tmp_path / "a.timeline"
    flags = ("--page", str(tmp_path / "a.html"), "--save", str(saved), "--iterations", "2")
    printed(capsys, "simulate", path, "--schedule", SCHEDULE, *flags)
    all_groups_s = api.simulate(path, SCHEDULE).table()[0]["all_groups_s"]
    assert SAYS_GROUP in (tmp_path / "a.html").read_text()
    assert SAYS_GROUP in printed(capsys, "view", str(saved), "--page", str(tmp_path / "b.html"))
    assert SAYS_GROUP in (tmp_path / "b.html").read_text()
    compared = printed(capsys, "compare", str(saved), f"{path}:gpipe", "--page", str(tmp_path / "c.html"))
    assert "iteration, all groups" in compared
    assert SAYS_GROUP in compared
    assert SAYS_GROUP in (tmp_path / "c.html").read_text()
    data = json.loads(printed(capsys, "compare", f"{path}:{SCHEDULE}", f"{path}:gpipe", "--json"))
    assert data["a"]["all_groups_s"] == pytest.approx(all_groups_s)
    assert data["b"]["num_groups"] == 2


def test_a_damaged_timeline_file_is_shown_without_all_groups(plan: Plan) -> None:
    timeline = api.simulate(plan, SCHEDULE).best.timeline
    assert set(of_groups(timeline)) == {"all_groups_s", "group", "num_groups"}
    for value in ("1", -1.0, float("nan"), None):
        timeline.meta["all_groups_s"] = value
        assert of_groups(timeline) == {}


def test_whatif_and_bubbletea_count_all_groups_or_say_so(
    plan: Plan, path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    data = json.loads(printed(capsys, "whatif", path, "--no-marginals", "--json"))
    assert data["now"]["iteration_s"] == pytest.approx(plan.predicted.iteration_s, rel=1e-9)
    words = ("simulate", path, "--requests", "synthetic", "--policy", "ours", "--periods", "1")
    assert bubbletea(list(words)) == 0
    assert "one of the plan's 2 groups" in " ".join(capsys.readouterr().out.split())


def test_a_schedule_that_interleaves_is_refused_by_name_and_skipped_otherwise(
    plan: Plan, path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "one stage on each worker" in api.simulate(plan, tcp="many", tries=1).skipped["interleaved"]
    assert cli.main(["simulate", path, "--schedule", "interleaved"]) == 2
    assert "Choose a schedule that does not interleave" in capsys.readouterr().err


def test_the_page_of_a_run_compares_with_the_prediction_of_all_groups(plan: Plan, tmp_path: Path) -> None:
    write_facts(tmp_path, PageFacts("small", SCHEDULE), plan.job)
    run = LiveRun()
    FolderFollower(tmp_path, run)
    assert "one of the plan's 2 groups" in str(run.state()["events"])
    alone_s = run.state()["predicted"]["iteration_s"]
    run.add([{"step": 1, "iteration_s": 2.1, "predicted_s": 2.0, "tokens": 4000}])
    predicted = run.state()["predicted"]
    assert (predicted["iteration_s"], predicted["tokens_per_s"]) == (2.0, 2000.0)
    assert alone_s < 2.0


def test_the_live_page_says_that_its_prediction_is_of_one_group(plan: Plan) -> None:
    run = LiveRun()
    run.begin("small", {"schedule": SCHEDULE}, plan.job)
    assert "one of the plan's 2 groups" in str(run.state()["events"])
