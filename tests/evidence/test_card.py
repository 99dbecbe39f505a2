"""`atlas card`: a simulated run as a data point that CCL-Bench's definitions accept."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import slow_metrics
import yaml

import atlas
from atlas.cli import main
from atlas.commands.watching import recorded
from atlas.errors import AtlasError
from atlas.evidence.data_point import DataPoint, read_data_point
from atlas.evidence.rank_trace import COLLECTIVES
from atlas.evidence.recorder import EvidenceRecorder
from atlas.evidence.run_folder import find_run
from atlas.evidence.run_summary import run_summary
from atlas.evidence.write_card import CARD, RunFacts, write_data_point
from atlas.ir.analysis import bubbles
from atlas.ir.timeline import Timeline
from atlas.launch.report import ReportChoice, RunReport, StepEvent
from atlas.launch.train_options import TrainOptions

TINY = Path(__file__).parents[2] / "examples" / "tiny.yaml"
TEMPLATE = {
    "": "version description hf_url trace_url contributor contact workload Model-executor metric_source",
    "workload.model": "phase moe granularity model_family precision epochs iteration model_arch",
    "workload.model.model_arch": "num_params num_params_embedding num_layers num_heads head_dim",
    "workload.data": "batch_size seq_len input_len output_len dataset",
    "workload.hardware": "network_topo xpu_spec driver_version",
    "workload.hardware.network_topo": "topology bandwidth_gbps",
    "workload.hardware.xpu_spec": "type model total_count count_per_node",
    "Model-executor": "framework model_plan_parallelization communication_library protocol_selection",
    "Model-executor.framework": "name compiler_tool_selection",
    "Model-executor.model_plan_parallelization": "dp_replicate dp_shard tp pp cp ep pp_mb",
    "Model-executor.communication_library": "name version env",
    "metric_source": "traces metrics_specific_trace",
}
"""Every key of CCL-Bench's `workload_card_template.yaml`, by the key that it is below."""


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Timeline, DataPoint]:
    found = atlas.simulate(TINY, "atlas", iterations=7, tries=1).best
    folder = tmp_path_factory.mktemp("evidence") / "point"
    facts = RunFacts("atlas", command=["atlas", "card", "tiny.yaml"])
    point = write_data_point(folder, found.timeline, found.case.job, found.case.arrangement, facts)
    return folder, found.timeline, point


def test_the_card_has_every_key_of_the_template(exported: tuple[Path, Timeline, DataPoint]) -> None:
    data = yaml.safe_load((exported[0] / CARD).read_text())
    for section, names in TEMPLATE.items():
        part = data
        for key in filter(None, section.split(".")):
            part = part[key]
        assert set(names.split()) <= set(part), section
    assert [place["name"] for place in data["workload"]["hardware"]["datacenters"]] == ["east", "west"]
    assert data["atlas"]["source"] == "simulated"


def test_only_the_card_and_traces_lie_beside_the_launch_files(exported: tuple[Path, Timeline, DataPoint]) -> None:
    folder, timeline, _ = exported
    names = {path.name for path in folder.iterdir()}
    assert names == {CARD, "launch", *(f"rank{k}_trace.json" for k in range(timeline.program.num_workers))}
    assert {path.name for path in (folder / "launch").iterdir()} == {"command.sh", "environment.txt", "job.yaml"}
    assert "atlas card tiny.yaml" in (folder / "launch" / "command.sh").read_text()


def test_at_least_14_of_ccl_benchs_25_metrics_have_a_value(exported: tuple[Path, Timeline, DataPoint]) -> None:
    point = exported[2]
    assert point.findings == []
    assert sum(metric.value is not None for metric in point.ccl) >= 14
    assert all(metric.value is not None for metric in point.own)


def test_the_traces_have_the_times_of_the_timeline(exported: tuple[Path, Timeline, DataPoint]) -> None:
    _, timeline, point = exported
    assert point.value("avg_step_time") == pytest.approx(timeline.iteration_ns / 1e9, rel=1e-3)
    busy_s = timeline.busy_ns.sum() / 1e9 / timeline.program.num_workers / timeline.program.num_iterations
    assert point.value("compute_time") == pytest.approx(busy_s, rel=1e-3)
    waits = bubbles(timeline).total_ns
    for cause in ("wan", "peer"):
        mean_s = waits[cause] / 1e9 / timeline.program.num_workers / timeline.program.num_iterations
        assert point.value(f"bubble_{cause}_time") == pytest.approx(mean_s, rel=0.15)


def test_every_metric_equals_its_definition_read_aloud(exported: tuple[Path, Timeline, DataPoint]) -> None:
    folder, _, point = exported
    events = [json.loads(path.read_text())["traceEvents"] for path in sorted(folder.glob("rank*"))]
    for name in ("communication_fraction", "total_communication_time", "compute_comm_overlap"):
        slow = [getattr(slow_metrics, name)(one) for one in events]
        assert point.value(name) == pytest.approx(sum(slow) / len(slow), rel=1e-6), name
    sums = [event for event in events[0] if event["name"].startswith("atlas_allreduce")]
    volume = sum(4 * event["args"]["In msg nelems"] for event in sums) / 1e9
    assert point.value("collective_vol_allreduce_gb") == pytest.approx(volume)
    assert volume > 0
    assert {metric.name for metric in point.ccl} >= {f"collective_vol_{kind}_gb" for kind in COLLECTIVES}


def test_names_say_what_ran_where(exported: tuple[Path, Timeline, DataPoint]) -> None:
    trace = json.loads((exported[0] / "rank1_trace.json").read_text())
    names = {event["name"] for event in trace["traceEvents"]}
    assert {"ProfilerStep#0", "atlas_F 1F0", "atlas_sendrecv wan east>west 1SEND_F0", "atlas_sendrecv lan east"} <= {
        *names,
        *(name.rpartition(" ")[0] for name in names),
    }
    assert trace["atlas"]["source"] == "simulated"


def test_a_folder_with_files_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "old.json").write_text("{}")
    assert main(["card", str(TINY), "--out", str(tmp_path)]) == 2
    assert "is not empty" in capsys.readouterr().err


def test_a_timeline_file_needs_its_job_and_not_another(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved, out = tmp_path / "run.timeline", str(tmp_path / "out")
    assert main(["simulate", str(TINY), "--schedule", "1f1b", "--iterations", "3", "--save", str(saved)]) == 0
    assert main(["card", str(saved), "--out", out]) == 2
    assert "--job FILE" in capsys.readouterr().err
    assert main(["card", str(saved), "--job", str(TINY), "--set", "num_microbatches=5", "--out", out]) == 2
    assert "is not the job of" in capsys.readouterr().err
    assert main(["card", str(saved), "--job", str(TINY), "--out", out]) == 0
    assert read_data_point(tmp_path / "out").source == "simulated"


def test_the_card_of_a_slowed_run_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved, out = tmp_path / "run.timeline", tmp_path / "out"
    timeline = atlas.simulate(TINY, "1f1b").best.timeline
    with RunReport(ReportChoice(bar=False, timeline=saved), 3) as report:
        on_step = recorded(report, None, TrainOptions("1f1b", slower=3))
        for step in (1, 2, 3):
            event: StepEvent = {"step": step, "loss": 1.0, "tokens": 1, "iteration_s": 1.0}
            on_step(event, shifted(timeline, step * timeline.makespan_ns))
    assert {("slowed", "every duration times 3")} < set(run_summary(saved).about)
    assert main(["card", str(saved), "--job", str(TINY), "--out", str(out)]) == 0
    card = yaml.safe_load((out / "workload_card.yaml").read_text())
    assert card["description"].endswith("every duration times 3.")
    assert card["atlas"]["trained"].startswith("a stand-in")
    assert '"slower": 3' in (out / "rank0_trace.json").read_text()[:1000]
    capsys.readouterr()
    assert main(["metrics", str(out)]) == 0
    assert "all durations were multiplied by 3" in " ".join(capsys.readouterr().out.split())


def test_a_run_folder_without_a_timeline_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AtlasError, match="not the folder of a run"):
        find_run(tmp_path)


def test_a_recorder_keeps_the_steps_since_the_last_restart(tmp_path: Path) -> None:
    found = atlas.simulate(TINY, "1f1b").best
    recorder = EvidenceRecorder(tmp_path / "point", found.case.job, RunFacts("1f1b"))
    with pytest.raises(AtlasError, match="no step was done"):
        recorder.write()
    length = found.timeline.makespan_ns
    for step, place in ((1, 0), (2, 1), (3, 2), (2, 3), (3, 4), (4, 5)):  # after step 3 it resumes after step 1
        recorder.step(step, shifted(found.timeline, place * length))
    point = recorder.write()
    assert {rank.num_steps for rank in point.ranks} == {3}
    assert point.value("avg_step_time") == pytest.approx(length / 1e9, rel=1e-6)


def shifted(timeline: Timeline, by_ns: int) -> Timeline:
    names = ("op_start_ns", "op_end_ns", "transfer_ready_ns", "transfer_start_ns", "transfer_sent_ns")
    names += ("transfer_arrive_ns",)
    return replace(timeline, **{name: getattr(timeline, name) + by_ns for name in names})


def test_one_pipeline_sums_nothing(tmp_path: Path) -> None:
    words = ["--set", "pipelines_per_cell=1", "--steps", "3", "--out", str(tmp_path / "point")]
    assert main(["card", str(TINY), "--schedule", "1f1b", *words]) == 0
    point = read_data_point(tmp_path / "point")
    assert point.value("collective_vol_allreduce_gb") == 0
    assert point.value("bandwidth_utilization_allreduce_group_6") is None
