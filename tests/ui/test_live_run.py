"""What the page knows of a run: from its files, while it runs and afterwards."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from ui_samples import TINY, paths_of, report_steps, saved_run

from atlas.cli import main
from atlas.commands.watching import noted
from atlas.errors import AtlasError
from atlas.ir.analysis import summary
from atlas.ir.store import Journal, load_timeline, save_timeline
from atlas.launch.report import ReportChoice, RunReport
from atlas.spec import load_job, override
from atlas.ui.live_run import LiveRun
from atlas.ui.run_files import TIMELINE, FolderFollower, PageFacts, write_facts
from atlas.ui.run_model import RunModel

GPT = TINY.with_name("gpt-a.yaml")


def test_a_saved_run_is_shown_with_its_steps_links_and_events(tmp_path: Path) -> None:
    job = saved_run(tmp_path)
    run = LiveRun()
    FolderFollower(tmp_path, run).poll()
    state = run.state()
    assert state["run"]["status"] == "ended"
    assert state["last"]["step"] == 5
    assert state["last"]["tokens_per_s"] == 4096 / 0.49
    assert state["series"]["loss"] == [4.0 - 0.1 * step for step in range(1, 6)]
    model = RunModel(job, "1f1b")
    assert state["predicted"]["iteration_s"] == model.row["iteration_s"]
    assert state["last"]["mfu"] == pytest.approx(model.row["mfu"] * model.row["iteration_s"] / 0.49)
    (link,) = state["links"]
    assert {link["a"], link["b"]} == {"east", "west"}
    assert link["load"] == pytest.approx(link["gbit_s"] / link["gbps"])
    assert link["transfer_ms"] > link["latency_ms"]
    texts = [event["text"] for event in state["events"]]
    assert texts[0] == "the run begins"
    assert "connection to west lost, resumed after 0.4 s" in texts
    assert any("+11% against the prediction" in text for text in texts)
    drawn = json.loads(run.timeline_json())
    assert [one["source"] for one in drawn["header"]["schedules"]] == ["simulated", "emulated"]
    assert [one["firstStep"] for one in drawn["header"]["schedules"]] == [3, 3]
    measured = load_timeline(tmp_path / TIMELINE)
    assert state["run"]["utilization"] == pytest.approx(summary(measured)["utilization"], rel=0.05)


def test_a_run_is_followed_while_it_runs(tmp_path: Path) -> None:
    job = load_job(TINY)
    write_facts(tmp_path, PageFacts(job.name, steps=9, device="paced"), job)
    run = LiveRun()
    follower = FolderFollower(tmp_path, run)
    assert run.state()["run"]["status"] == "waiting"
    with RunReport(ReportChoice(bar=False, page=paths_of(tmp_path)), 9) as report:
        report_steps(report, job, 1, 2)
        before = run.version
        assert follower.poll()
        assert run.wait(before, 0) > before
        assert (run.state()["last"]["step"], run.state()["run"]["status"]) == (2, "running")
        assert not follower.poll()
        report_steps(report, job, 3, 1)
        follower.poll()
        assert run.state()["last"]["step"] == 3
    follower.poll()
    assert run.state()["run"]["status"] == "ended"


def test_a_run_is_followed_from_before_its_first_step(tmp_path: Path) -> None:
    job = load_job(TINY)
    write_facts(tmp_path, PageFacts("tiny"), job)
    (tmp_path / TIMELINE).touch()
    run = LiveRun()
    follower = FolderFollower(tmp_path, run)
    assert not follower.poll()
    with RunReport(ReportChoice(bar=False, page=paths_of(tmp_path)), 2) as report:
        report_steps(report, job, 1, 1)
    assert follower.poll()
    assert run.state()["last"]["step"] == 1


def test_what_the_coordinator_says_is_in_the_event_log_and_a_loss_is_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_facts(tmp_path, PageFacts("tiny"), load_job(TINY))
    lost = "host east/1 is lost: out of reach for 5 s. A spare takes its place: 1.2 s an iteration"
    said = [lost, "attempt 2 begins, from step 4", "west alone; continuing with that"]
    with RunReport(ReportChoice(bar=False, page=paths_of(tmp_path)), 2) as report:
        for line in said:
            noted(report)(line)
    run = LiveRun()
    FolderFollower(tmp_path, run).poll()
    kinds = {event["text"]: event["kind"] for event in run.state()["events"]}
    assert capsys.readouterr().err.splitlines() == [f"atlas: {line}" for line in said]
    assert [kinds[line] for line in said] == ["warning", "note", "note"]


def test_steps_that_are_done_again_replace_those_before(tmp_path: Path) -> None:
    job = saved_run(tmp_path, 5)
    run = LiveRun()
    follower = FolderFollower(tmp_path, run)
    follower.poll()
    with RunReport(ReportChoice(bar=False, page=paths_of(tmp_path)), 9) as report:
        report_steps(report, job, 4, 1)
        follower.poll()
    assert run.state()["series"]["step"] == [1, 2, 3, 4]


def test_a_half_written_or_broken_line_is_skipped(tmp_path: Path) -> None:
    saved_run(tmp_path, 2)
    with (tmp_path / "steps.jsonl").open("a") as file:
        file.write('not JSON\n{"step": 3, "loss": null, "tokens": 1, "iteration_s"')
    run = LiveRun()
    follower = FolderFollower(tmp_path, run)
    follower.poll()
    assert run.state()["last"]["step"] == 2
    with (tmp_path / "steps.jsonl").open("a") as file:
        file.write(": 0.5}\n")
    follower.poll()
    assert run.state()["last"]["step"] == 3


def test_a_timeline_file_that_was_emptied_is_read_from_its_start(tmp_path: Path) -> None:
    job = saved_run(tmp_path, 2)
    run = LiveRun()
    follower = FolderFollower(tmp_path, run)
    follower.poll()
    journal = Journal(tmp_path / TIMELINE, max_bytes=1)
    from ui_samples import passes

    journal.append(7, passes(job, 1)[0])
    follower.poll()
    assert json.loads(run.timeline_json())["header"]["schedules"][1]["firstStep"] == 7
    assert load_timeline(tmp_path / TIMELINE).program.num_iterations == 1
    journal.close()


def test_a_run_without_job_or_events_is_shown_from_its_record(tmp_path: Path) -> None:
    attempts = [
        {"attempt": 1, "began": 1.0, "ended": 9.0, "hosts": {"east": []}, "last_step": 4, "reason": "west was lost"},
        {"attempt": 2, "began": 10.0, "hosts": {"east": []}, "checkpoints": [4]},
    ]
    (tmp_path / "run.json").write_text(json.dumps({"run": "r", "steps": 9, "attempts": attempts}))
    run = LiveRun()
    FolderFollower(tmp_path, run).poll()
    state = run.state()
    assert state["run"]["steps"] == 9
    assert "attempt 1 ends after step 4: west was lost" in [event["text"] for event in state["events"]]
    assert (state["map"], state["whatif"], state["run"]["status"]) == ("", False, "running")


def test_a_timeline_file_alone_is_shown(tmp_path: Path) -> None:
    save_timeline(tmp_path / "a.timeline", RunModel(load_job(TINY), "1f1b").predicted())
    run = LiveRun()
    FolderFollower(tmp_path / "a.timeline", run).poll()
    assert json.loads(run.timeline_json())["header"]["schedules"][0]["source"] == "simulated"
    assert run.state()["run"]["iteration_s"] > 0  # the page shows it as the file's, not as a prediction


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AtlasError, match="not the folder of a run"):
        FolderFollower(tmp_path, LiveRun())


def test_a_job_file_is_shown_at_once_and_then_with_the_figures_of_simulate(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", str(GPT), "--schedule", "atlas", "--set", "num_microbatches=8", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    run = LiveRun()
    run.begin("gpt-a", {"schedule": "atlas"}, override(load_job(GPT), ["num_microbatches=8"]))
    first = run.state()
    found = run.search()
    second = run.state()
    assert (first["predicted"]["order"], second["predicted"]["order"]) == ("first", "searched")
    assert first["predicted"]["iteration_s"] > second["predicted"]["iteration_s"] == row["iteration_s"]
    assert second["predicted"]["mfu"] == row["mfu"]
    assert second["timeline_version"] > first["timeline_version"]
    assert found is run.model
    run.close()
    assert run.search() is None
