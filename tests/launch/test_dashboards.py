"""The alert rules and dashboards of examples/monitoring: they name series that exist, and Prometheus answers them."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
import sys
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from free_ports import free_port

import atlas
from atlas.ir.analysis import link_utilization
from atlas.launch.report.metrics import HELP, PREFIX, TrainingMetrics

ROOT = Path(__file__).parents[2]
MONITORING = ROOT / "examples" / "monitoring"
DASHBOARDS = ("grafana-training.json", "grafana-bubbletea.json")
SERIES = re.compile(r"\b(?:atlas_training_|bubbletea:|vllm:)\w+")


def queries() -> dict[str, str]:
    """By where it is written: every query of the dashboards and the alerts."""
    found = {}
    for name in DASHBOARDS:
        for panel in json.loads((MONITORING / name).read_text())["panels"]:
            for target in panel["targets"]:
                found[f"{name}: {panel['title']} {target['refId']}"] = target["expr"]
    for group in yaml.safe_load((MONITORING / "alerts.yml").read_text())["groups"]:
        for rule in group["rules"]:
            # With `bool` a comparison has a value whether or not it holds.
            found[rule["alert"]] = re.sub(r" (>|<|==|!=) ", r" \1 bool ", rule["expr"])
            for number, inner in enumerate(re.findall(r'query "([^"]+)"', rule["annotations"]["description"])):
                found[f"{rule['alert']} text {number}"] = inner
    return found


def service_metrics() -> Any:
    """BubbleTea's, after some of everything."""
    serve = pytest.importorskip("bubbletea.serve.metrics", reason="needs the extra `serve`")
    metrics = serve.ServiceMetrics("m")
    metrics.first_token_s.observe(0.2)
    metrics.answered(0.2, 1.0, 20, "stop")
    metrics.refused("deadline")
    metrics.cached(5, 10)
    return metrics


def test_every_query_names_series_that_exist() -> None:
    text = service_metrics().text().decode()
    known = {PREFIX + name for name in HELP} | set(re.findall(r"^([\w:]+?)(?:\{| )", text, re.M))
    known |= {name.removesuffix("_total") + "_total" for name in re.findall(r"# TYPE (\S+) counter", text)}
    for where, query in queries().items():
        named = set(SERIES.findall(query))
        assert named, where
        assert named <= known, f"{where}: {sorted(named - known)}"


def test_every_worker_and_link_has_series() -> None:
    timeline = atlas.simulate(ROOT / "examples" / "tiny.yaml", "1f1b").best.timeline
    metrics = TrainingMetrics()
    metrics.step({"step": 1, "loss": 1.0, "tokens": 10, "iteration_s": 2.0}, timeline)
    text = metrics.text()
    busy = re.findall(r'worker_busy_seconds\{worker="(\S+?)",datacenter="(\S+?)"\} (\S+)', text)
    assert [float(value) for _, _, value in busy] == [ns / 1e9 for ns in timeline.busy_ns.tolist()]
    waits = re.findall(r"worker_wait_seconds\{.*\} (\S+)", text)
    assert sum(map(float, waits)) + sum(float(value) for *_, value in busy) == pytest.approx(
        timeline.makespan_ns / 1e9 * timeline.program.num_workers
    )
    assert text.count("link_busy_ratio{") == len(link_utilization(timeline)) > 0


def test_dashboards_have_distinct_panels_inside_the_grid() -> None:
    for name in DASHBOARDS:
        panels = json.loads((MONITORING / name).read_text())["panels"]
        assert len({panel["id"] for panel in panels}) == len(panels)
        assert all(panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24 for panel in panels)


# ---- with Debian's prometheus -----------------------------------------------------------------------------------
JOB = "examples/tiny.yaml"
WITHIN_S = 240.0


@contextlib.contextmanager
def running(command: list[str], log: Path) -> Iterator[None]:
    with log.open("w") as file, subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=file) as process:
        try:
            yield
        finally:
            process.kill()


@contextlib.contextmanager
def clients(port: int) -> Iterator[None]:
    """Two questions again and again, and one whose deadline cannot be met."""
    ended = threading.Event()

    def ask(prompt: str, deadline_s: float) -> None:
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 4, "deadline_s": deadline_s}
        url, headers = f"http://127.0.0.1:{port}/v1/completions", {"Content-Type": "application/json"}
        while not ended.wait(0.2):
            with contextlib.suppress(OSError):  # it is starting, or refuses
                asked = urllib.request.Request(url, json.dumps(body).encode(), headers)
                urllib.request.urlopen(asked, timeout=60).read()

    asked = [("Two datacenters train one model. " * 12, 30.0), ("Something else. " * 20, 30.0), ("Now!", 0.001)]
    threads = [threading.Thread(target=ask, args=one, daemon=True) for one in asked]
    for thread in threads:
        thread.start()
    yield
    ended.set()


def answer(port: int, query: str) -> list[Any]:
    url = f"http://127.0.0.1:{port}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
    with urllib.request.urlopen(url, timeout=60) as reply:
        found = json.load(reply)["data"]["result"]
    # A rate of something that never happened is a value; 0 / 0 is not.
    return [one for one in found if one["value"][1] != "NaN"]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("prometheus") is None, reason="needs prometheus: apt-get install prometheus")
def test_prometheus_answers_every_query_about_a_real_run(tmp_path: Path) -> None:
    """Emulated training with a service in its bubbles, and clients that ask."""
    pytest.importorskip("bubbletea.serve.metrics", reason="needs the extra `serve`")
    subprocess.run(["promtool", "check", "rules", str(MONITORING / "alerts.yml")], check=True, capture_output=True)
    training, service, port = free_port(), free_port(), free_port()
    services, slower = str(tmp_path / "service"), ["--slower", "3"]
    targets = [f"127.0.0.1:{training}", f"127.0.0.1:{service}"]
    config = {
        "global": {"scrape_interval": "1s"},
        "scrape_configs": [{"job_name": "atlas", "static_configs": [{"targets": targets}]}],
    }
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(config))
    commands = {
        "service": [sys.executable, "-m", "bubbletea.cli", "serve", JOB, "--name", "tiny", "--port", str(service)],
        "training": [sys.executable, "-m", "atlas", "train", JOB, "--emulate", "--steps", "10000", "--no-bar"],
        "prometheus": ["prometheus", f"--config.file={tmp_path / 'prometheus.yml'}"],
    }
    commands["service"] += [*slower, "--folder", services]
    commands["training"] += [*slower, "--filler", "bubbletea", "--filler-folder", services]
    commands["training"] += ["--metrics-port", str(training)]
    commands["prometheus"] += [f"--storage.tsdb.path={tmp_path / 'data'}", f"--web.listen-address=127.0.0.1:{port}"]
    with contextlib.ExitStack() as stack:
        for name, command in commands.items():
            stack.enter_context(running(command, tmp_path / f"{name}.log"))
        stack.enter_context(clients(service))
        open_ones, deadline = queries(), time.monotonic() + WITHIN_S
        while open_ones and time.monotonic() < deadline:
            with contextlib.suppress(OSError):  # it is starting
                open_ones = {where: query for where, query in open_ones.items() if not answer(port, query)}
            time.sleep(1)
    logs = {name: (tmp_path / f"{name}.log").read_text()[-500:] for name in commands}
    assert open_ones == {}, logs
