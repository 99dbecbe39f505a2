"""A run on one GPU under torch.profiler: the figures of its Kineto trace against our own Timeline, and the job that
`atlas import` makes of it against the run.

    python bench/evidence_gpu.py [cuda:0]

Trains a Llama shape of 1.1 billion parameters for 14 steps with `atlas train --emulate --model job --evidence`, as one
worker. The same ten steps count on both sides. Compute is compared in two ways: how long ops occupy the GPU, by our
CUDA events and by Kineto's spans of the same ops; and what the GPU executes (kernels, fills and copies inside its
memory), which leaves out gaps. Gaps are then split: the GPU turns from one kernel to the next that is queued already,
or it waits for the host's launch. Ends with 77 without an NVIDIA GPU.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import yaml
from common.report import Report, not_measured

import atlas
from atlas.cli import main as command
from atlas.evidence.ccl import inner
from atlas.evidence.data_point import read_data_point
from atlas.evidence.events import TraceFile
from atlas.evidence.intervals import Union, intersection, union
from atlas.evidence.rank_trace import read_rank
from atlas.ir.store import load_timeline
from atlas.ir.timeline import Timeline
from atlas.spec import load_job

MAX_OFF, MAX_IMPORT_OFF = 2.0, 5.0
"""Per cent."""
STEPS, COUNTED = 14, 10
"""Twelve are recorded, of which the first and the last do not count."""
MICROBATCH, NUM_MICROBATCHES = 4, 4
"""Kernels long enough that the host stays ahead of the GPU under the profiler."""
OP = re.compile(r"-?\d+(F|R|B|I|W|SYNC|NORM|STEP)\d+")


def job_data(gpu: str) -> dict[str, object]:
    """One worker on one GPU."""
    here = {"name": "here", "nodes": 1, "gpus_per_node": 1, "gpu": gpu}
    model = {"family": "llama", "layers": 16, "hidden": 2048, "heads": 32, "kv_heads": 8, "ffn": 8192}
    return {
        "name": "one-gpu",
        "model": {**model, "vocab": 32_000, "seq_len": 2048},
        "cluster": {"datacenters": [here], "wan": {"latency_ms": 20, "pair_gbps": 5}},
        "microbatch": MICROBATCH,
        "num_microbatches": NUM_MICROBATCHES,
        "pp": 1,
        "pipelines_per_cell": 1,
        "recompute": False,
    }


def off(value: float | None, wanted: float) -> float:
    """Per cent."""
    return 100 * abs((value or 0.0) / wanted - 1)


def by_events(timeline: Timeline) -> float:
    """Seconds per counted step in which an op occupies the GPU, by our CUDA events."""
    ends = timeline.iteration_ends_ns.astype(np.float64)
    busy = union(timeline.op_start_ns.astype(np.float64), timeline.op_end_ns.astype(np.float64))
    return float(busy.within(ends[-2 - COUNTED : -1 - COUNTED], ends[-2:-1])[0]) / 1e9 / COUNTED


class Recorded(NamedTuple):
    """What a Kineto trace says about the counted steps, in seconds per step."""

    spans_s: float
    """From an op's first kernel to the end of its last."""
    kernels_s: float
    turning_s: float
    """Gaps inside ops in which the next kernel's launch has returned."""
    starved_s: float
    """Gaps inside ops before the next kernel's launch returns."""
    num_gaps: int


def recorded(path: Path) -> Recorded:
    ops, kernels, work, launched = [], [], [], {}
    for event in TraceFile(path):
        kind, start, length = event.get("cat"), event.get("ts"), event.get("dur")
        if start is None or length is None:
            continue
        start, end = float(start), float(start) + float(length)
        call = (event.get("args") or {}).get("correlation")
        if kind == "gpu_user_annotation" and OP.fullmatch(str(event.get("name"))):
            ops.append((start, end))
        elif kind in ("cuda_runtime", "cuda_driver"):
            launched[call] = end
        elif kind in ("kernel", "gpu_memcpy", "gpu_memset"):
            work.append((start, end, call))
            if kind == "kernel":
                kernels.append((start, end))
    marks = [mark for mark in inner(read_rank(path).steps) if mark.length_us]
    low = np.array([mark.start_us for mark in marks])
    high = low + np.array([mark.length_us for mark in marks], np.float64)

    def per_step(spans: Sequence[tuple[float, float]], inside: Union | None = None) -> float:
        found = union(*np.array(spans, np.float64).reshape(-1, 2).T)
        if inside is not None:
            found = intersection(found, inside)
        return float(found.within(low, high).sum()) / 1e6 / len(marks)

    turning, starved, reached = [], [], -np.inf
    for start, end, call in sorted(work, key=lambda one: one[0]):
        if reached < start:
            begins = min(max(launched.get(call, reached), reached), start)
            starved.append((reached, begins))
            turning.append((begins, start))
        reached = max(reached, end)
    named = union(*np.array(ops, np.float64).reshape(-1, 2).T)
    gaps = sum(bool(low[0] <= start < high[-1]) for start, _ in turning)
    return Recorded(
        spans_s=per_step(ops),
        kernels_s=per_step(kernels),
        turning_s=per_step(turning, named),
        starved_s=per_step(starved, named),
        num_gaps=gaps // len(marks),
    )


def main() -> int:
    place = sys.argv[1] if len(sys.argv) > 1 else "cuda:0"
    if not torch.cuda.is_available():
        return not_measured("evidence_gpu", "needs an NVIDIA GPU")
    name = torch.cuda.get_device_name()
    gpu = next((kind for kind in ("GH200-96", "H200", "H100", "A100-80") if kind.split("-")[0] in name), "H100")
    report = Report(f"Evidence of one {name} (measured)", "our own Timeline of the same run")
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        job = folder / "job.yaml"
        job.write_text(yaml.safe_dump(job_data(gpu)))
        words = ["train", str(job), "--emulate", "--device", place, "--model", "job", "--steps", str(STEPS), "--no-bar"]
        words += ["--timeline", str(folder / "run.timeline"), "--evidence", str(folder / "point")]
        if command(words):
            return not_measured("evidence_gpu", "the run failed")
        timeline = load_timeline(folder / "run.timeline")
        point = read_data_point(folder / "point")
        print("findings:", point.findings)
        ends = timeline.iteration_ends_ns
        step_s = float(ends[-2] - ends[-2 - COUNTED]) / 1e9 / COUNTED  # the steps that count in the trace
        busy_s, work_s = by_events(timeline), point.value("compute_time") or 0.0
        found = recorded(folder / "point" / "rank0_trace.json")
        report.figure("step time, timeline", step_s, "s")
        report.figure("step time of Kineto off", off(point.value("avg_step_time"), step_s), "%", at_most=MAX_OFF)
        report.figure("compute, timeline", busy_s, "s")
        report.figure("compute of Kineto, spans of ops, off", off(found.spans_s, busy_s), "%", at_most=MAX_OFF)
        report.figure("compute of Kineto, without gaps, off", off(work_s, busy_s), "%", at_most=MAX_OFF)
        report.figure("compute of Kineto, kernels alone, off", off(found.kernels_s, busy_s), "%")
        report.figure("gaps in a step", found.num_gaps, "gaps")
        report.figure("of a step: the GPU turns to a queued kernel", 100 * found.turning_s / step_s, "%")
        report.figure("of a step: the GPU waits for a launch", 100 * found.starved_s / step_s, "%")
        tokens = load_job(job).model.seq_len * MICROBATCH * NUM_MICROBATCHES
        report.figure("tokens per second of Kineto off", off(point.value("tokens_per_s"), tokens / step_s), "%")
        mfu = point.value("flops_utilization") or 0.0
        wanted = mfu * (point.value("avg_step_time") or 0.0) / step_s
        report.figure("MFU of Kineto", mfu, "%")
        report.figure("MFU of Kineto off the timeline's", off(mfu, wanted), "%", at_most=MAX_OFF)
        imported = folder / "imported.yaml"
        # As another user's trace: without the job that ran.
        (folder / "point" / "launch" / "job.yaml").unlink()
        if command(["import", str(folder / "point"), "--out", str(imported), "--no-recompute"]):
            return not_measured("evidence_gpu", "the import failed")
        simulated_s = atlas.simulate(imported, "1f1b", iterations=3).best.timeline.iteration_ns / 1e9
        report.figure("imported job, simulated iteration off", off(simulated_s, step_s), "%", at_most=MAX_IMPORT_OFF)
        data = yaml.safe_load(imported.read_text())
        here = {**data["cluster"]["datacenters"][0], "nodes": 2}
        data["cluster"]["datacenters"] = [here, {**here, "name": "there"}]
        imported.write_text(yaml.safe_dump(data))
        plan = atlas.plan(imported, tries=0).plan
        report.figure("plan of the imported job over two datacenters, iteration", plan.predicted.iteration_s, "s")
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
