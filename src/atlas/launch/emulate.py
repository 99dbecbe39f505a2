"""Runs a Program on this machine as if it were several datacenters: a process per worker with a paced device, an
emulated path per channel, real sockets, real gradients. Program + Costs -> Timeline, like the simulator.

The Costs that the simulator is given are the ones that pace the devices and shape the paths, so the two
Timelines differ only by what really happened. Knows plans of nobody; cell sharing is not emulated yet.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np

from atlas.cost.table import PRIVATE, Costs
from atlas.errors import ProgramError
from atlas.ir.ops import Kind
from atlas.ir.program import FORWARD, Ints, Program
from atlas.ir.text import to_text
from atlas.ir.timeline import Timeline
from atlas.launch.fleet import Fleet
from atlas.runtime.process import Assignment
from atlas.runtime.reference import Weights
from atlas.runtime.worker import GRADIENTS, Training
from atlas.wan.proxy import DelayProxy
from atlas.wan.wire import HEADER_BYTES

START_TIMEOUT_S = 60.0
"""Importing torch in a dozen processes on two cores takes its time."""
HEADSTART_NS = 100_000_000

Addresses = dict[int, list[tuple[int, int, str, int]]]
"""By worker: (direction, number, host, port) of each channel it opens."""


@dataclass(frozen=True)
class Emulation:
    """What came out of a run."""

    timeline: Timeline
    losses: list[float]
    """Mean over all microbatches, by iteration."""
    weights: Weights
    """The model after the last step, from pipeline 0."""
    late_s: float
    """The worst delay that the emulated paths added of their own."""
    overrun_s: float
    """Time in which a device was held up because the host was slower than the pace, worst worker."""


def emulate(
    program: Program,
    costs: Costs,
    training: Training,
    *,
    patience_s: float = 20.0,
    on_start: Callable[[Mapping[str, int]], None] | None = None,
) -> Emulation:
    """Runs it to the end, or raises a WorkerError within about `patience_s` of anything going wrong.

    `on_start` hears the process ids by worker name when the Program begins.
    """
    require_emulable(program, costs)
    names = [program.worker_name(w) for w in range(program.num_workers)]
    with ExitStack() as stack:
        fleet = stack.enter_context(Fleet("atlas.runtime.process", names))
        text = to_text(program)
        for w, name in enumerate(names):
            weights_file = str(fleet.folder / f"{name}.npz") if w < program.num_ranks else ""
            compute_ns = costs.compute_ns[w // program.num_ranks].tolist()
            assignment = Assignment(
                worker=w,
                program=text,
                compute_ns=compute_ns,
                gpt=dataclasses.asdict(training.gpt),
                optimizer=training.optimizer,
                learning_rate=training.learning_rate,
                paced=True,
                patience_s=patience_s,
                weights_file=weights_file,
            )
            fleet.tell(name, {"assignment": dataclasses.asdict(assignment)})
        ports = fleet.hear("listening", START_TIMEOUT_S)
        addresses, proxies = _paths(program, costs, training, [ports[name] for name in names], stack)
        for w, name in enumerate(names):
            fleet.tell(name, {"channels": addresses[w]})
        fleet.hear("ready", START_TIMEOUT_S)
        if on_start is not None:
            on_start(fleet.pids)
        start_ns = time.monotonic_ns() + HEADSTART_NS
        for name in names:
            fleet.tell(name, {"start_ns": start_ns})
        results = fleet.hear("result", _longest_s(program, costs) + patience_s)
        late_s = max((proxy.lateness.worst_ns for proxy in proxies), default=0) / 1e9
        weights: Weights = {}
        for name in names[: program.num_ranks]:
            with np.load(fleet.folder / f"{name}.npz") as arrays:
                weights |= dict(arrays)
        in_order = [results[name] for name in names]
        overrun_s = max(result["overrun_ns"] for result in in_order) / 1e9
        meta = {"late_s": late_s, "overrun_s": overrun_s}
        timeline = _timeline(program, costs, in_order, start_ns, meta)
        return Emulation(timeline, _mean_losses(program, in_order), weights, late_s, overrun_s)


def require_emulable(program: Program, costs: Costs) -> None:
    """Says what this crude emulator cannot do, before anything is started."""
    if program.sharing or any(link.policy != PRIVATE or link.servers != 1 or link.trace for link in costs.links):
        raise ProgramError(
            f"program {program.name!r} shares its links or lets them vary, which is not emulated yet: "
            "give every channel a steady link of its own"
        )
    for kind in (Kind.NORM, Kind.P):
        if (program.kind == kind).any():
            raise ProgramError(f"program {program.name!r} has a {kind.name}, which is not emulated yet: leave it out")


def _paths(
    program: Program, costs: Costs, training: Training, ports: list[int], stack: ExitStack
) -> tuple[Addresses, list[DelayProxy]]:
    """Where each worker finds its peers: through a proxy where a channel costs time, directly elsewhere."""
    addresses: Addresses = {w: [] for w in range(program.num_workers)}
    proxies: list[DelayProxy] = []
    frame_bytes = activation_frame_bytes(training)
    for direction, pipeline, boundary in np.ndindex(2, program.num_pipelines, program.num_stages - 1):
        left, right = program.worker(pipeline, boundary), program.worker(pipeline, boundary + 1)
        source, target = (left, right) if direction == FORWARD else (right, left)
        if source == target:
            continue
        host, port = "127.0.0.1", ports[target]
        work_ns = int(costs.work_ns[direction, pipeline, boundary])
        latency_ns = int(
            costs.latency_ns[direction, pipeline, boundary] + costs.before_ns[direction, pipeline, boundary]
        )
        if work_ns or latency_ns:
            rate_bps = frame_bytes * 8e9 / work_ns if work_ns else None
            proxy = stack.enter_context(DelayProxy((host, port), latency_s=latency_ns / 1e9, rate_bps=rate_bps))
            proxies.append(proxy)
            host, port = proxy.address
        addresses[source].append((direction, boundary, host, port))
    for w in range(program.num_workers):
        pipeline, rank = divmod(w, program.num_ranks)
        others = (c for c in range(program.num_pipelines) if c != pipeline)
        addresses[w] += [(GRADIENTS, c, "127.0.0.1", ports[c * program.num_ranks + rank]) for c in others]
    return addresses, proxies


def activation_frame_bytes(training: Training) -> int:
    """What one activation, or its gradient, takes on the wire."""
    return HEADER_BYTES + 4 * int(np.prod(training.gpt.activation_shape))


def _longest_s(program: Program, costs: Costs) -> float:
    """More than any order of events can take: everything one after the other."""
    pipeline = program.op_worker // program.num_ranks
    ops_ns = int(costs.compute_ns[pipeline, program.stage, program.kind].sum())
    wires_ns = int((costs.work_ns + costs.before_ns + costs.latency_ns).sum()) * program.num_slots
    return (ops_ns + wires_ns) / 1e9


def _timeline(
    program: Program, costs: Costs, results: list[dict[str, Any]], zero_ns: int, meta: dict[str, Any]
) -> Timeline:
    """All clocks are this machine's monotonic clock; only the zero has to be moved."""

    def by_transfer(key: str) -> Ints:
        moments = np.full(program.num_transfers, zero_ns, np.int64)
        for result in results:
            for transfer, at_ns in result[key]:
                moments[transfer] = at_ns
        return moments - zero_ns

    arrive_ns = by_transfer("arrive_ns")
    latency_ns = np.repeat(costs.latency_ns.ravel(), program.num_slots)
    start_ns = by_transfer("start_ns")
    return Timeline(
        program=program,
        source="emulated",
        op_start_ns=np.concatenate([r["op_start_ns"] for r in results]).astype(np.int64) - zero_ns,
        op_end_ns=np.concatenate([r["op_end_ns"] for r in results]).astype(np.int64) - zero_ns,
        transfer_ready_ns=by_transfer("ready_ns"),
        transfer_start_ns=start_ns,
        # The sender only knows when the kernel took the bytes; the path's latency is what we set it to.
        transfer_sent_ns=np.maximum(start_ns, arrive_ns - latency_ns),
        transfer_arrive_ns=arrive_ns,
        transfer_link=np.repeat(costs.channel_link.ravel(), program.num_slots).astype(np.int32),
        links=tuple(link.name for link in costs.links),
        meta=meta,
    )


def _mean_losses(program: Program, results: list[dict[str, Any]]) -> list[float]:
    sums = [0.0] * program.num_iterations
    for result in results:
        for slot, loss in result["losses"]:
            sums[slot // program.num_microbatches] += loss
    return [total / (program.num_microbatches * program.num_pipelines) for total in sums]
