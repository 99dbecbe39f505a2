"""Prometheus metrics of a run: the figures of the last step in the text format (0.0.4), on a port, loopback by default.

The standard library's server is enough for one page that is scraped every few seconds. Names follow Prometheus's
conventions (base units, `_total` for counters). Series by worker and by link come from the step's Timeline, so every
worker is in them, wherever it runs. Knows step events and Timelines; requests never reach training.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np

from atlas.errors import AtlasError
from atlas.ir.analysis import Cause, bubbles, link_utilization
from atlas.ir.timeline import Timeline
from atlas.launch.report.events import StepEvent, tokens_per_s

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PREFIX = "atlas_training_"
HELP = {
    "info": ("gauge", "The run, as labels."),
    "step": ("gauge", "Optimizer steps done since the run began."),
    "steps_total": ("counter", "Optimizer steps done by this process."),
    "tokens_total": ("counter", "Tokens trained on by this process."),
    "loss": ("gauge", "Loss of the last step."),
    "tokens_per_second": ("gauge", "Tokens of the last step, divided by its time."),
    "iteration_seconds": ("gauge", "Time of the last step."),
    "iteration_predicted_seconds": ("gauge", "Simulated iteration_seconds."),
    "wan_bytes_per_second": ("gauge", "Bytes sent between datacenters in the last step, divided by its time."),
    "wan_streams_replaced_total": ("counter", "Connections of the transport that broke and were replaced."),
    "wan_chunks_resent_total": ("counter", "Chunks sent again because their connection broke."),
    "wan_retransmits_total": ("counter", "TCP segments that the kernels of workers sent again."),
    "last_step_timestamp_seconds": ("gauge", "When the last step ended, in Unix time."),
    "last_checkpoint_step": ("gauge", "Step of the last complete checkpoint; 0 before the first."),
    "last_checkpoint_timestamp_seconds": (
        "gauge",
        "When the last complete checkpoint was reported, in Unix time; before the first, when this process began.",
    ),
    "restarts_total": ("counter", "Restarts of all workers, by reason."),
    "mfu_ratio": ("gauge", "Model FLOPs utilization of the last step, of runs on GPUs of one type, real or paced."),
    "goodput_steps_per_second": ("gauge", "Steps kept since this process began (not undone by a restart), per second."),
    "worker_memory_peak_bytes": ("gauge", "Peak memory of a worker so far, of its device and of its process."),
    "worker_busy_seconds": ("gauge", "Time in the last step in which a worker's accelerator computes."),
    "worker_wait_seconds": ("gauge", "Time in the last step in which a worker's accelerator waits, by cause."),
    "link_busy_ratio": ("gauge", "Share of the last step in which a WAN link sends."),
}

REASONS = {
    "host": ("lost", "out of reach", "launcher"),
    "network": ("connection", "transport", "did not answer", "not answer"),
    "worker": ("killed by", "exit code", "ended early", "memory"),
}
"""By label of a restart: words in its error. The first that matches counts."""
OTHER = "other"

Series = dict[str, list[tuple[dict[str, str], float]]]
"""By name: labels and value of each series."""


class TrainingMetrics:
    """The figures; thread-safe."""

    def __init__(self, labels: Mapping[str, str] | None = None) -> None:
        self.labels = dict(labels or {})
        self._values: dict[str, float] = dict.fromkeys(
            (
                *("steps_total", "tokens_total", "wan_streams_replaced_total", "wan_chunks_resent_total"),
                *("wan_retransmits_total", "last_checkpoint_step"),
            ),
            0,
        )
        self._began = time.time()
        self._first_step: int | None = None
        self._values["last_checkpoint_timestamp_seconds"] = self._began
        self._restarts = dict.fromkeys((*REASONS, OTHER), 0)
        self._series: Series = {}
        self._lock = threading.Lock()

    def step(self, event: StepEvent, timeline: Timeline | None = None) -> None:
        predicted_s, wan = event.get("predicted_s"), event.get("wan_gbit_s")
        series = {} if timeline is None else _by_worker(timeline)
        with self._lock:
            self._series = series
            self._values["steps_total"] += 1
            self._values["tokens_total"] += event["tokens"]
            self._values["wan_streams_replaced_total"] += event.get("wan_streams_replaced", 0)
            self._values["wan_chunks_resent_total"] += event.get("wan_chunks_resent", 0)
            self._values |= {
                "step": event["step"],
                "loss": event["loss"],
                "tokens_per_second": tokens_per_s(event),
                "iteration_seconds": event["iteration_s"],
                "last_step_timestamp_seconds": time.time(),
            }
            self._note_checkpoint(event)
            if "mfu" in event:
                self._values["mfu_ratio"] = event["mfu"]
            if predicted_s is not None:
                self._values["iteration_predicted_seconds"] = predicted_s
            if wan is not None:
                self._values["wan_bytes_per_second"] = wan * 1e9 / 8

    def _note_checkpoint(self, event: StepEvent) -> None:
        """Checkpoints, and steps that were kept: a restart does some again."""
        self._values["wan_retransmits_total"] += event.get("wan_retransmits", 0)
        if event.get("checkpoint_step", 0) > self._values["last_checkpoint_step"]:
            self._values["last_checkpoint_step"] = event["checkpoint_step"]
            self._values["last_checkpoint_timestamp_seconds"] = time.time()
        if self._first_step is None:
            self._first_step = event["step"] - 1
        kept = event["step"] - self._first_step
        self._values["goodput_steps_per_second"] = kept / max(1e-9, time.time() - self._began)

    def restarted(self, reason: str) -> None:
        """Count a restart. The label is one of a few words: the text itself is in the event log."""
        found = next((name for name, words in REASONS.items() if any(word in reason for word in words)), OTHER)
        with self._lock:
            self._restarts[found] += 1

    def text(self) -> str:
        """In the text format."""
        with self._lock:
            series: Series = {name: [({}, value)] for name, value in self._values.items()}
            restarts = [({"reason": reason}, float(count)) for reason, count in self._restarts.items()]
            series |= {"info": [(self.labels, 1.0)], "restarts_total": restarts, **self._series}
        lines = []
        for name, (kind, explanation) in HELP.items():
            if name in series:
                lines.append(f"# HELP {PREFIX}{name} {explanation}\n# TYPE {PREFIX}{name} {kind}\n")
                lines += [f"{PREFIX}{name}{_labels(labels)} {_number(value)}\n" for labels, value in series[name]]
        return "".join(lines)


def _by_worker(timeline: Timeline) -> Series:
    """Seconds of each worker of the Timeline's cell, and how busy its links are."""
    program, found = timeline.program, bubbles(timeline)
    waits = np.zeros((program.num_workers, len(Cause)), np.int64)
    np.add.at(waits, (found.worker, found.cause), found.end_ns - found.start_ns)
    names = [
        {"worker": program.worker_name(worker), "datacenter": program.worker_dc(worker)}
        for worker in range(program.num_workers)
    ]
    peaks = timeline.meta.get("peak_bytes")
    memory = [
        ({**name, "of": of}, float(value))
        for name in names
        for of, value in zip(("device", "host"), _pair(peaks, name["worker"]), strict=False)
    ]
    return {
        "worker_memory_peak_bytes": memory,
        "worker_busy_seconds": [(names[w], ns / 1e9) for w, ns in enumerate(found.busy_ns.tolist())],
        "worker_wait_seconds": [
            ({**names[w], "cause": cause.name.lower()}, int(waits[w, cause]) / 1e9)
            for w in range(program.num_workers)
            for cause in Cause
        ],
        "link_busy_ratio": [({"link": link}, share) for link, share in link_utilization(timeline).items()],
    }


def _pair(peaks: object, worker: str) -> list[int]:
    """Of device and host; empty if a worker does not report them."""
    found = peaks.get(worker) if isinstance(peaks, dict) else None
    return [int(value) for value in found] if isinstance(found, list | tuple) else []


def _labels(labels: Mapping[str, str]) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items()) + "}"


class MetricsServer:
    """`/metrics` on a port; 0: any free one (`port` says which)."""

    def __init__(self, metrics: TrainingMetrics, port: int, host: str = "127.0.0.1") -> None:
        handler = type("Handler", (_Handler,), {"metrics": metrics})
        try:
            self._server = ThreadingHTTPServer((host, port), handler)
        except (OSError, OverflowError) as error:
            why = getattr(error, "strerror", None) or error
            raise AtlasError(f"--metrics-port {port}: {why} on {host}. Choose another port, or 0 for any") from error
        self._server.daemon_threads = True
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.1,), daemon=True, name="metrics")
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Handler(BaseHTTPRequestHandler):
    metrics: TrainingMetrics
    timeout = 10
    """Seconds until an idle client is disconnected."""

    def do_GET(self) -> None:
        if self.path.partition("?")[0] != "/metrics":
            self.send_error(404, "Only /metrics is here")
            return
        body = self.metrics.text().encode()
        self.send_response(200)
        self.send_header("Content-Type", CONTENT_TYPE)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Do not log scrapes."""


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return repr(value)


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
