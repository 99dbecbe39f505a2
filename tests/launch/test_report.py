"""What is seen of a run while it runs: terminal, JSON lines, Prometheus, the growing Timeline."""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from dataclasses import replace
from pathlib import Path

import pytest

import atlas
from atlas.cli import main
from atlas.commands.watching import watch_flags, watched
from atlas.errors import AtlasError
from atlas.ir.store import load_timeline
from atlas.launch.report import GpuFacts, ReportChoice, RunReport, StepEvent
from atlas.launch.report.events import against_prediction, tokens_per_s
from atlas.launch.report.metrics import MetricsServer, TrainingMetrics
from atlas.launch.report.progress import ProgressBar, figures
from atlas.launch.supervisor import restarts
from atlas.launch.train_options import TrainOptions
from atlas.spec import load_job
from atlas.spec.recipe import load_recipe

EVENT: StepEvent = {
    "step": 7,
    "loss": 2.34117,
    "tokens": 4096,
    "iteration_s": 0.41,
    "predicted_s": 0.40,
    "wan_gbit_s": 3.2,
}


def test_the_figures_of_a_step() -> None:
    assert figures(EVENT) == "loss 2.3412  10.0k tok/s  410 ms (+2.5%)  WAN 3.20 Gbit/s"
    plain: StepEvent = {"step": 1, "loss": float("nan"), "tokens": 90, "iteration_s": 2.0}
    assert figures(plain) == "loss nan  45 tok/s  2.00 s"
    assert figures(EVENT, 30) == "loss 2.3412  410 ms (+2.5%)"
    slow = {**EVENT, "iteration_s": 1000.0 * EVENT["iteration_s"]}
    assert figures(slow, 60).endswith("410.00 s (not the job's hardware)")
    assert against_prediction(plain) is None
    assert tokens_per_s({**plain, "iteration_s": 0.0}) == 0.0
    assert "WAN 40.00 Mbit/s" in figures({**plain, "wan_gbit_s": 0.04})


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_bar_shows_where_the_run_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    bar = ProgressBar(10, stream=terminal)
    bar.step({**EVENT, "step": 6})
    bar.step(EVENT)
    bar.close()
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", terminal.getvalue())
    assert " 7/10" in shown
    assert "loss 2.3412  10.0k tok/s  410 ms (+2.5%)  WAN 3.20 Gbit/s" in shown


def test_without_a_terminal_a_line_is_printed_every_few_seconds() -> None:
    log = io.StringIO()
    bar = ProgressBar(9, stream=log)
    for step in range(1, 10):
        bar.step({**EVENT, "step": step})
    bar.close()
    first, last = log.getvalue().splitlines()
    assert first.startswith("step 1/9  loss 2.3412")
    assert last.startswith("step 9/9  loss 2.3412")


def test_json_lines_are_written_every_step_and_appended_after_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    choice = ReportChoice(bar=False, lines=path)
    with RunReport(choice, 10) as report:
        report.step(EVENT)
        (line,) = path.read_text().splitlines()
        assert json.loads(line).items() >= EVENT.items()
        report.step({**EVENT, "step": 8, "loss": float("inf"), "norm": 1.5})  # type: ignore[typeddict-unknown-key]
    path.write_text(path.read_text() + '{"step": 9, "lo')  # a kill in the middle of a line
    with RunReport(choice, 10) as report:
        report.step({**EVENT, "step": 9})
    _, eight, torn, nine = path.read_text().splitlines()
    assert (json.loads(eight)["loss"], json.loads(eight)["norm"]) == (None, 1.5)
    assert torn == '{"step": 9, "lo'
    assert json.loads(nine)["step"] == 9


def scraped(port: int, path: str = "/metrics") -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=60) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        return str(answer.read().decode())


def test_prometheus_gets_the_last_step(tmp_path: Path) -> None:
    with RunReport(ReportChoice(bar=False, metrics_port=0, labels={"job": 'a "b"\n'}), 10) as report:
        port = report.metrics_port
        assert port
        assert "atlas_training_steps_total 0\n" in scraped(port)
        assert "atlas_training_wan_streams_replaced_total 0\n" in scraped(port)
        report.step({**EVENT, "wan_streams_replaced": 2, "wan_chunks_resent": 7})
        report.step({**EVENT, "step": 8, "loss": float("nan")})
        text = scraped(port)
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert values['atlas_training_info{job="a \\"b\\"\\n"}'] == "1.0"
    assert values["atlas_training_step"] == "8"
    assert values["atlas_training_steps_total"] == "2"
    assert values["atlas_training_tokens_total"] == "8192"
    assert values["atlas_training_wan_streams_replaced_total"] == "2"
    assert values["atlas_training_wan_chunks_resent_total"] == "7"
    assert values["atlas_training_loss"] == "NaN"
    assert float(values["atlas_training_wan_bytes_per_second"]) == 4e8
    assert float(values["atlas_training_iteration_predicted_seconds"]) == 0.40
    names = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")}
    assert names == {name.partition("{")[0] for name in values}
    with pytest.raises(urllib.error.URLError):
        scraped(port)


def test_the_endpoint_serves_one_page_on_loopback_only() -> None:
    server = MetricsServer(TrainingMetrics(), 0)
    try:
        assert server._server.server_address[0] == "127.0.0.1"
        with pytest.raises(urllib.error.HTTPError, match="404"):
            scraped(server.port, "/etc/passwd")
    finally:
        server.close()


@pytest.mark.parametrize("port", [None, 70_000])
def test_a_port_in_use_is_an_error_before_training_starts(port: int | None) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        wanted = port or taken.getsockname()[1]
        with pytest.raises(AtlasError, match=f"--metrics-port {wanted}: .*Choose another port"):
            RunReport(ReportChoice(bar=False, metrics_port=wanted), 10)


def test_a_full_disk_is_reported_once_and_does_not_stop_training() -> None:
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    told: list[str] = []
    with RunReport(ReportChoice(bar=False, lines=Path("/dev/full")), 10, warn=told.append) as report:
        report.step(EVENT)
        report.step({**EVENT, "step": 8})
    assert len(told) == 1
    assert "No space left on device. Training continues" in told[0]


RUN = """
import os, sys, time
from dataclasses import replace
from pathlib import Path
sys.path[:0] = [sys.argv[2], str(Path(sys.argv[2]).parent)]
from view_samples import job
from atlas.launch.report import ReportChoice, RunReport
timeline = job()
report = RunReport(ReportChoice(bar=False, lines=Path("run.jsonl"), timeline=Path("run.timeline")), 10**6)
for step in range(1, 10**6):
    event = {"step": step, "loss": 1.0, "tokens": 10, "iteration_s": 0.1}
    report.step(event, timeline)
    if step == int(sys.argv[1]):
        print("now", flush=True)
"""


def test_a_killed_run_leaves_its_timeline_to_view(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    samples = Path(__file__).parents[1] / "view"
    with subprocess.Popen([sys.executable, "-c", RUN, "5", str(samples)], stdout=subprocess.PIPE) as run:
        assert run.stdout is not None
        assert run.stdout.readline() == b"now\n"
        os.kill(run.pid, signal.SIGKILL)
    found = load_timeline("run.timeline")
    assert found.meta["last_step"] >= 5
    assert found.program.num_iterations >= 5
    steps = [json.loads(line)["step"] for line in Path("run.jsonl").read_text().splitlines()[:5]]
    assert steps == [1, 2, 3, 4, 5]
    assert main(["view", "run.timeline"]) == 0
    assert "<html" in Path("run.html").read_text()


def test_the_report_loads_no_torch() -> None:
    script = "import sys, atlas.launch.report; print('torch' in sys.modules, 'rich' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["False", "False"]


def test_the_flags_of_a_run_that_is_watched(tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    watch_flags(parser)
    args = parser.parse_args(["--log", str(tmp_path / "a"), "--metrics-port", "0", "--no-bar"])
    recipe = load_recipe(None, {"logging.lines": str(args.log), "logging.metrics_port": args.metrics_port})
    job = load_job(Path(__file__).parents[2] / "examples" / "tiny.yaml")
    choice = watched(args, recipe.logging, job, TrainOptions("atlas"))
    labels = {"job": job.name, "schedule": "atlas"}
    assert replace(choice, gpus=None) == ReportChoice(
        bar=False, lines=tmp_path / "a", metrics_port=0, labels=labels, trackers_asked=False, folder=Path("runs/tiny")
    )
    on_gpus = watched(args, recipe.logging, job, TrainOptions("atlas", device="cuda", model="job")).gpus
    assert on_gpus is not None
    assert on_gpus.flops_per_token > 6 * job.model.layers * 12 * job.model.hidden**2


def test_mfu_of_paced_devices_is_that_of_the_job() -> None:
    job = load_job(Path(__file__).parents[2] / "examples" / "tiny.yaml")
    row = atlas.simulate(job, "1f1b").best.row()
    parser = argparse.ArgumentParser()
    watch_flags(parser)
    facts = watched(parser.parse_args([]), load_recipe(None).logging, job, TrainOptions("1f1b", slower=3)).gpus
    assert facts is not None
    event = facts.figures({**EVENT, "num_workers": 8, "iteration_s": 3 * row["iteration_s"]})
    assert event["mfu"] == pytest.approx(row["mfu"])
    assert "MFU" not in figures(event)


def test_figures_of_a_gpu() -> None:
    facts = GpuFacts(per_worker=2, flops_per_token=1e9, peak_flops=1e13)
    event = facts.figures({**EVENT, "num_workers": 4})
    assert event["tokens_per_gpu_s"] == 4096 / 0.41 / 8
    assert round(event["mfu"], 4) == 0.1249
    assert "10.0k tok/s  1.2k tok/s/GPU, MFU 12.5%  410 ms" in figures(event)


def test_memory_restarts_checkpoints_and_retransmits_have_series(monkeypatch: pytest.MonkeyPatch) -> None:
    timeline = atlas.simulate("examples/tiny.yaml", "1f1b").best.timeline
    with RunReport(ReportChoice(bar=False), 9) as report:
        began = report.metrics.text()
        assert 'restarts_total{reason="host"} 0.0' in began
        assert "last_checkpoint_step 0" in began
        peaks = replace(timeline, meta={**timeline.meta, "peak_bytes": {"p0.s0": [7, 9]}})
        report.step({**EVENT, "checkpoint_step": 5, "wan_retransmits": 3, "mfu": 0.4}, peaks)
        report.step({**EVENT, "step": 8, "checkpoint_step": 5, "wan_retransmits": 2}, peaks)
        restarts.info("west was lost")
        restarts.info("p0.s1 was killed by SIGKILL")
        text = report.metrics.text()
    restarts.info("nobody listens")
    assert 'worker_memory_peak_bytes{worker="p0.s0",datacenter="east",of="device"} 7.0' in text
    assert 'worker_memory_peak_bytes{worker="p0.s0",datacenter="east",of="host"} 9.0' in text
    assert 'restarts_total{reason="host"} 1.0' in text
    assert 'restarts_total{reason="worker"} 1.0' in text
    assert "wan_retransmits_total 5" in text
    assert "last_checkpoint_step 5" in text
    assert "mfu_ratio 0.4" in text
