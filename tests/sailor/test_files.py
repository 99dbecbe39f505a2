"""Sailor's formats: what we write we read back; what is wrong is one message with exit code 2."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from sailor_samples import write_inputs

from atlas.commands.plan_sailor import main
from atlas.errors import InfeasibleError, SpecError
from atlas.planner.objective import Objective
from atlas.sailor.candidates import SailorCandidate
from atlas.sailor.check import check, fits_nodes
from atlas.sailor.inputs import read_inputs
from atlas.sailor.plan_file import Replica, SailorPlan, as_document, read_plan, write_plan
from atlas.sailor.search import SailorSearch, search

COUNTS = {"X-40_east-a": 4, "X-40_west-a": 4}
FILES = (
    "profiles_tmp.json",
    "llm_info.json",
    "multizone_bandwidths_het.json",
    "egress_usd_per_gb.json",
    "basic_cluster_config.json",
    "training_config_toy.json",
    "trace.csv",
)
EAST = Replica("east-a", "X-40", 2, 2)
WEST = Replica("west-a", "X-40", 1, 1)
PLAN = SailorPlan(2, ((0, 1, 2), (3, 4)), ((EAST, EAST), (WEST, WEST)))


def words(folder: Path, *more: str) -> list[str]:
    return ["--from-sailor", str(folder), "--trace", str(folder / "trace.csv"), "--model", "toy", *more]


def test_a_plan_has_sailors_shape_and_comes_back(tmp_path: Path) -> None:
    document = as_document(PLAN)
    assert document["mbs"] == 2
    assert document["pipeline_list"][0]["tmp_per_stage"][0][0] == [[["X-40", 2, "east-a"]], 2]
    assert document["pipeline_list"][0]["dp"] == [2, 2]
    write_plan(PLAN, tmp_path / "plan.json")
    assert read_plan(tmp_path / "plan.json") == PLAN


def test_the_command_plans_writes_and_judges_what_it_wrote(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_inputs(tmp_path, COUNTS)
    assert main(words(tmp_path, "--json", "--gpu", "X-40", "--out-sailor", str(tmp_path / "plan.json"))) == 0
    planned = json.loads(capsys.readouterr().out)
    assert main(words(tmp_path, "--json", "--judge", str(tmp_path / "plan.json"))) == 0
    judged = json.loads(capsys.readouterr().out)
    assert judged["sailor_s"] == planned["sailor_s"]
    assert planned["simulated"]["iteration_s"] > 0
    assert main(words(tmp_path, "--no-simulate", "--cost", "sailor")) == 0
    assert "Sailor's formula" in capsys.readouterr().out


def test_the_search_gives_the_same_plan_every_time(tmp_path: Path) -> None:
    inputs = read_inputs(tmp_path, write_inputs(tmp_path, COUNTS), "toy")
    assert search(inputs).plan == search(inputs).plan


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["missing", "cut", "garbled", "empty"])
def test_a_damaged_file_is_one_message(
    name: str, damage: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_inputs(tmp_path, COUNTS)
    path = tmp_path / name
    content = path.read_text()
    if damage == "missing":
        path.unlink()
    else:
        path.write_text({"cut": content[: len(content) // 3], "garbled": '{"toy": [1, "x"]}', "empty": ""}[damage])
    assert main(words(tmp_path)) == 2
    said = capsys.readouterr().err
    assert said.startswith("atlas: ")
    assert said.count("\n") == 1
    assert str(tmp_path) in said


@pytest.mark.parametrize(
    ("flag", "value", "told"),
    [
        ("--model", "tyo", "Did you mean 'toy'"),
        ("--gpu", "X-41", "Did you mean 'X-40'"),
        ("--trace", "nowhere.csv", "nowhere.csv"),
        ("--gpu-price", "X-40", "TYPE=USD"),
        ("--judge", "nowhere.json", "nowhere.json"),
    ],
)
def test_a_wrong_flag_names_the_nearest(
    flag: str, value: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_inputs(tmp_path, COUNTS)
    assert main(words(tmp_path, flag, value)) == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flag", "value"),
    [("--cost", "events"), ("--objective", "cost"), ("--min-throughput", "1"), ("--max-usd", "3")],
)
def test_what_chooses_a_plan_is_refused_with_a_given_one(
    flag: str, value: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_inputs(tmp_path, COUNTS)
    assert main(words(tmp_path, "--judge", "plan.json", flag, value)) == 2
    said = capsys.readouterr().err
    assert f"{flag} = " in said
    assert "chooses among plans" in said


def test_a_zone_that_was_never_measured_is_named(tmp_path: Path) -> None:
    trace = write_inputs(tmp_path, COUNTS)
    trace.write_text(trace.read_text().replace("west-a", "west-b"))
    with pytest.raises(SpecError, match=r"west-b.*no bandwidths.*west-a"):
        read_inputs(tmp_path, trace, "toy")


def test_what_breaks_a_rule_is_infeasible(tmp_path: Path) -> None:
    inputs = read_inputs(tmp_path, write_inputs(tmp_path, COUNTS), "toy")
    check(inputs, PLAN)
    wrong = {
        "every layer": replace(PLAN, layers=((0, 1), (3, 4))),
        "no stage may be empty": replace(PLAN, layers=((0, 1, 2, 3, 4), ())),
        "same number": replace(PLAN, replicas=((EAST, EAST), (WEST,))),
        "east-a has 4 X-40": replace(PLAN, replicas=((EAST,) * 3, (WEST,) * 3)),
        "must fit in one VM": replace(PLAN, replicas=((Replica("east-a", "X-40", 4, 2),) * 2, (WEST,) * 2)),
        "no such GPUs": replace(PLAN, replicas=((Replica("north", "X-40", 1, 1),) * 2, (WEST,) * 2)),
        "was not profiled": replace(PLAN, mbs=16),
    }
    for told, plan in wrong.items():
        with pytest.raises(InfeasibleError, match=told):
            check(inputs, plan)


def test_too_little_memory_is_an_error_with_the_nearest_change(tmp_path: Path) -> None:
    trace = write_inputs(tmp_path, COUNTS, params=4_000_000_000)
    inputs = read_inputs(tmp_path, trace, "toy")
    with pytest.raises(InfeasibleError, match="GiB"):
        check(inputs, PLAN)
    with pytest.raises(InfeasibleError, match="largest layer alone needs"):
        search(inputs)


def test_a_goal_out_of_reach_is_infeasible_and_a_price_is_never_guessed(tmp_path: Path) -> None:
    trace = write_inputs(tmp_path, COUNTS)
    inputs = read_inputs(tmp_path, trace, "toy")
    with pytest.raises(InfeasibleError, match="no plan on these GPUs meets the goal"):
        search(inputs, Objective("cost", min_tokens_per_s=1e6))
    cluster = json.loads((tmp_path / "basic_cluster_config.json").read_text())
    del cluster["X-40"]["usd_per_gpu_hour"]
    (tmp_path / "basic_cluster_config.json").write_text(json.dumps(cluster))
    with pytest.raises(InfeasibleError, match=r"no price.*--gpu-price X-40"):
        search(read_inputs(tmp_path, trace, "toy"), Objective("cost"))
    assert search(read_inputs(tmp_path, trace, "toy", (), {"X-40": 2.0}), Objective("cost")).score > 0


def test_an_interrupted_search_gives_the_best_plan_so_far(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = read_inputs(tmp_path, write_inputs(tmp_path, COUNTS), "toy")
    whole, calls = SailorSearch._keep, []

    def impatient(self: SailorSearch, candidate: SailorCandidate) -> None:
        calls.append(candidate)
        if len(calls) > 3:
            raise KeyboardInterrupt
        whole(self, candidate)

    monkeypatch.setattr(SailorSearch, "_keep", impatient)
    found = search(inputs)
    assert found.interrupted
    check(inputs, found.plan)


def test_groups_stay_in_their_nodes() -> None:
    assert fits_nodes(8, 4, {4: 2})
    assert fits_nodes(6, 4, {4: 1, 2: 1})
    assert not fits_nodes(6, 4, {2: 2, 4: 1})
    assert not fits_nodes(7, 4, {2: 4})
    assert fits_nodes(6, 6, {3: 1, 2: 1})
    assert not fits_nodes(6, 6, {3: 2, 2: 1})


def test_the_fast_start_imports_neither_pydantic_nor_the_search_over_jobs() -> None:
    script = (
        "import sys, atlas.commands.plan_sailor; print(*({'pydantic', 'atlas.planner.search'} & sys.modules.keys()))"
    )
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert found.stdout.split() == []
