"""A Timeline as one Kineto-like trace per worker, which CCL-Bench's tools, HolisticTraceAnalysis and Perfetto read.

Names say what an event is and still match CCL-Bench's patterns: `atlas_F 3F17` computes, `atlas_sendrecv wan east>west`
moves bytes, `atlas_allreduce sync` sums gradients. A worker of tp GPUs is one rank file. Bubbles are written with their
cause in the category `atlas_bubble`, which other tools leave out.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from atlas.ir.analysis import Cause, bubbles
from atlas.ir.program import FORWARD, USEFUL, Kind, Program
from atlas.ir.replace import replacing
from atlas.ir.timeline import Timeline

COMPUTE, SYNC, SENDS, RECEIVES, WAITS = 7, 20, 21, 22, 30
"""Streams (thread ids) of the kinds of events. A rank's sends of both directions share one."""
STEPS = 1
"""Thread of the step marks, in the process of the CPU."""
CPU, DEVICE = 1_000_000, 0
"""Process ids."""
PRECISION = {"bf16": "BFloat16", "fp16": "Half", "fp32": "Float"}


@dataclass(frozen=True)
class TraceSizes:
    """What the traces say of collectives and sends, which a Timeline does not know."""

    tp: int
    num_cells: int
    gradient_elements: tuple[int, ...]
    """By rank of a pipeline: elements that one GPU sums in SYNC."""
    gradient_type: str
    """NCCL's name of a type: Float."""
    activation_elements: int
    """Elements of one transfer."""
    activation_type: str
    device: str
    """Name of the device type, of the first datacenter."""


def trace_name(worker: int, tp: int) -> str:
    """The file of a worker: named by the rank of its first GPU."""
    return f"rank{worker * tp}_trace.json"


def write_traces(folder: Path, timeline: Timeline, sizes: TraceSizes) -> list[Path]:
    """Write one file per worker of the Timeline's cell."""
    paths = []
    ends = step_ends_ns(timeline)
    for worker in range(timeline.program.num_workers):
        path = folder / trace_name(worker, sizes.tp)
        with replacing(path) as file:
            file.write(_head(timeline, sizes, worker).encode())
            first = True
            for event in _events(timeline, sizes, worker, ends[worker]):
                file.write((("" if first else ",\n") + json.dumps(event, separators=(",", ":"))).encode())
                first = False
            file.write(b"\n]}\n")
        paths.append(path)
    return paths


def step_ends_ns(timeline: Timeline) -> np.ndarray:
    """[worker, iteration]: the end of a worker's last op of an iteration, from the run's start."""
    program = timeline.program
    training = program.kind != Kind.P
    ends = np.zeros((program.num_workers, program.num_iterations), np.int64)
    at = (program.op_worker[training], program.op_iteration[training])
    np.maximum.at(ends, at, timeline.op_end_ns[training] - int(timeline.op_start_ns.min()))
    return np.asarray(np.maximum.accumulate(ends, axis=1), np.int64)


def _head(timeline: Timeline, sizes: TraceSizes, worker: int) -> str:
    program = timeline.program
    world = program.num_workers * sizes.num_cells * sizes.tp
    about = {
        "source": timeline.source,
        "schedule": program.name,
        "worker": program.worker_name(worker),
        "datacenter": program.worker_dc(worker),
        "gpus": sizes.tp,
    }
    if "slower" in timeline.meta:
        about["slower"] = timeline.meta["slower"]
    info = {"backend": "atlas", "rank": worker * sizes.tp, "world_size": world}
    device = [{"id": 0, "name": f"{sizes.device} ({timeline.source})"}]
    parts = {"schemaVersion": 1, "deviceProperties": device, "distributedInfo": info, "atlas": about}
    head = ",".join(f"{json.dumps(key)}:{json.dumps(value)}" for key, value in parts.items())
    return "{" + head + ',"displayTimeUnit":"ms","traceEvents":[\n'


def _events(timeline: Timeline, sizes: TraceSizes, worker: int, ends_ns: np.ndarray) -> Iterator[dict[str, Any]]:
    program = timeline.program
    name = f"{program.worker_name(worker)} {program.worker_dc(worker)} ({timeline.source})"
    for process, words in ((CPU, "steps"), (DEVICE, "device")):
        yield {"ph": "M", "name": "process_name", "pid": process, "tid": 0, "args": {"name": f"{words} {name}"}}
    start = 0
    for number, end in enumerate(ends_ns.tolist()):
        yield _span(f"ProfilerStep#{number}", "user_annotation", CPU, STEPS, start, end - start)
        start = end
    yield from _ops(timeline, sizes, worker)
    yield from _transfers(timeline, sizes, worker)
    zero = int(timeline.op_start_ns.min())
    for bubble in bubbles(timeline).of(worker):
        cause = Cause(bubble.cause).name.lower()
        length = bubble.end_ns - bubble.start_ns
        yield _span(f"bubble {cause}", "atlas_bubble", DEVICE, WAITS, bubble.start_ns - zero, length)


def _span(name: str, category: str, process: int, thread: int, start_ns: int, length_ns: int) -> dict[str, Any]:
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "pid": process,
        "tid": thread,
        "ts": start_ns / 1000,
        "dur": max(0, length_ns) / 1000,
    }


def _ops(timeline: Timeline, sizes: TraceSizes, worker: int) -> Iterator[dict[str, Any]]:
    program, zero = timeline.program, int(timeline.op_start_ns.min())
    for index in range(int(program.worker_ptr[worker]), int(program.worker_ptr[worker + 1])):
        op = program.op(index)
        start = int(timeline.op_start_ns[index]) - zero
        length = int(timeline.op_end_ns[index] - timeline.op_start_ns[index])
        if op.kind in USEFUL:
            event = _span(f"atlas_{op.kind.name} {op}", "kernel", DEVICE, COMPUTE, start, length)
            event["args"] = {"device": 0, "stream": COMPUTE, "stage": op.stage, "microbatch": op.microbatch}
        else:
            args = _sum_args(program, sizes, worker, op.kind)
            if args["Group size"] == 1:
                continue  # nothing is summed
            event = _span(f"atlas_allreduce {op.kind.name.lower()} {op}", "kernel", DEVICE, SYNC, start, length)
            event["args"] = args
        yield event


def _sum_args(program: Program, sizes: TraceSizes, worker: int, kind: Kind) -> dict[str, Any]:
    """Of SYNC: the same stage of all pipelines of all cells. Of NORM: one number, over all workers."""
    rank = worker % program.num_ranks
    per_cell = range(rank, program.num_workers, program.num_ranks) if kind == Kind.SYNC else range(program.num_workers)
    workers = [cell * program.num_workers + one for cell in range(sizes.num_cells) for one in per_cell]
    elements = sizes.gradient_elements[rank] if kind == Kind.SYNC else 1
    return _message("allreduce", elements, sizes.gradient_type, [one * sizes.tp for one in workers], SYNC)


def _message(name: str, elements: int, kind: str, ranks: list[int], stream: int) -> dict[str, Any]:
    return {
        "device": 0,
        "stream": stream,
        "Collective name": name,
        "In msg nelems": elements,
        "Out msg nelems": elements,
        "dtype": kind,
        "Group size": len(ranks),
        "Process Group Ranks": str(ranks),
    }


def _transfers(timeline: Timeline, sizes: TraceSizes, worker: int) -> Iterator[dict[str, Any]]:
    """What this worker sends, while the link sends it; and what it receives, while the bytes arrive."""
    program, zero = timeline.program, int(timeline.op_start_ns.min())
    if program.num_stages < 2:
        return
    pipeline, rank = divmod(worker, program.num_ranks)
    shape = program.transfer_shape
    for direction in (0, 1):
        for boundary in range(program.num_stages - 1):
            stages = (boundary, boundary + 1) if direction == FORWARD else (boundary + 1, boundary)
            ranks = [program.stage_rank[stage] for stage in stages]
            if ranks[0] == ranks[1] or rank not in ranks:
                continue
            pair = [(pipeline * program.num_ranks + one) * sizes.tp for one in ranks]
            dcs = [program.rank_dc[one] for one in ranks]
            route = f"wan {dcs[0]}>{dcs[1]}" if dcs[0] != dcs[1] else f"lan {dcs[0]}"
            sends = rank == ranks[0]
            thread = SENDS if sends else RECEIVES
            args = _message("send" if sends else "recv", sizes.activation_elements, sizes.activation_type, pair, thread)
            first = int(np.ravel_multi_index((direction, pipeline, boundary, 0), shape))
            for index in range(first, first + program.num_slots):
                begin, end = int(timeline.transfer_start_ns[index]), int(timeline.transfer_sent_ns[index])
                if end <= begin or program.transfer_src[index] < 0:
                    continue
                shift = 0 if sends else int(timeline.transfer_arrive_ns[index]) - end
                name = f"atlas_sendrecv {route} {program.transfer_name(index)}"
                event = _span(name, "kernel", DEVICE, thread, begin + shift - zero, end - begin)
                event["args"] = args
                yield event
