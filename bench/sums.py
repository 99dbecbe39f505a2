"""Sums of gradients over pipelines by torch.distributed, and ZeRO-1.

1. {GPipe, 1F1B, zero-bubble, Atlas} x {2, 4} pipelines x tp {1, 2}, worker processes over loopback: weights after 20
   steps equal to the bit to `sums: transport`. With --nccl, on one GPU: NCCL with 2 and 4 ranks, each process as a host
   of its own. Correct, and slow.
2. A SYNC of 256 MiB over 4 processes on loopback, `ordered` against `transport`, in paired rounds.
3. Memory at rest (weights, gradients, optimizer state) of a bf16 parameter with d = 4.

    python bench/sums.py [--steps 20] [--part bits|speed|memory] [--tp 1 2] [--dp 2 4]
    python bench/sums.py --quick        # 1F1B and zero-bubble, 2 pipelines, 5 steps; 64 MiB
    python bench/sums.py --nccl         # needs a GPU
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from common.cases import cell
from common.report import Report, not_measured

from atlas.cost.table import kind_costs, uniform_costs
from atlas.ir.assemble import with_optimizer
from atlas.ir.program import Layout, Program
from atlas.ir.text import to_text
from atlas.launch.emulate import Emulation, EmulationSettings, emulate
from atlas.runtime.assignment import SHIPPED, Assignment, DataChoice, ModelChoice, TrainingSetup, stand_in
from atlas.runtime.collectives import GroupStore, torch_exchanges
from atlas.runtime.exchange import Exchange
from atlas.runtime.hardware import make_device
from atlas.runtime.links import WorkerLinks
from atlas.runtime.models.config import DecoderConfig
from atlas.runtime.pipeline_group import PipelineGroup
from atlas.runtime.recipe import LearningRate, OptimizerSettings
from atlas.runtime.stage_set import StageSet
from atlas.runtime.sync import GradientSync
from atlas.runtime.topology import WorkerRole
from atlas.schedules import SCHEDULES
from atlas.schedules.classic import one_f_one_b

SCHEDULE_NAMES = ("gpipe", "1f1b", "zero-bubble", "atlas")
QWEN = DecoderConfig(
    "qwen3", num_layers=4, width=64, num_heads=4, num_kv_heads=2, head_width=16, ffn_width=128, vocabulary=256,
    max_length=32, qk_norm=True, tied=True,
)  # fmt: skip
ROUNDS = 7
"""Pairs of SYNCs; the first is discarded."""
RANKS = 4
WAIT_S = 120.0


# ---- bits ------------------------------------------------------------------------------------------------------------
def training(sums: str, zero: int) -> TrainingSetup:
    optimizer = OptimizerSettings(LearningRate(1e-3, "cosine", 5, 50))
    model = ModelChoice(QWEN)
    return TrainingSetup(model, DataChoice(32, 2, SHIPPED), optimizer, max_norm=1.0, sums=sums, zero=zero)  # type: ignore[arg-type]


def trained(program: Program, tp: int, steps: int, sums: str, zero: int, nccl: bool) -> Emulation:
    free = uniform_costs(program.num_pipelines, program.num_stages, kind_costs(forward_ns=0))
    settings = EmulationSettings(
        steps, device="cuda:0" if nccl else "cpu", tp=tp, streams=1, paths={}, nccl_on_shared_gpu=nccl, patience_s=120.0
    )
    return emulate(program, free, training(sums, zero), settings)


def differing(one: Emulation, other: Emulation) -> int:
    """Losses and tensors."""
    losses = sum(a != b for a, b in zip(one.losses, other.losses, strict=True))
    return losses + sum(not np.array_equal(one.weights[name], other.weights[name]) for name in other.weights)


def bits(report: Report, schedules: tuple[str, ...], args: argparse.Namespace) -> None:
    for dp in args.dp:
        setting = cell(2, 3, dp, 3, num_dcs=2, budget=20)
        for name in schedules:
            program = with_optimizer(SCHEDULES[name].build(setting, None), norm=True)
            program = replace(program, sharing=False)
            for tp in args.tp:
                began = time.monotonic()
                expected = trained(program, tp, args.steps, "transport", 0, args.nccl)
                for zero in (0, 1):
                    found = differing(trained(program, tp, args.steps, "ordered", zero, args.nccl), expected)
                    backend = "NCCL" if args.nccl else "Gloo"
                    line = f"{name}, {dp} pipelines, tp {tp}, zero {zero}, {backend}: losses and tensors that differ"
                    report.figure(line, found, "", at_most=0)
                print(f"  took {time.monotonic() - began:.1f} s", flush=True)


# ---- speed -----------------------------------------------------------------------------------------------------------
class OneStage:
    """As much of a StageSet as a PipelineGroup needs."""

    def __init__(self, assignment: Assignment, role: WorkerRole) -> None:
        self.assignment, self.role = assignment, role
        self.exchanges: Mapping[int, Exchange] = {}

    def open_exchanges(self, store: GroupStore) -> Mapping[int, Exchange]:
        return torch_exchanges(self.assignment, self.role, store)

    def sum_by(self, exchanges: Mapping[int, Exchange], group_sum: object) -> None:
        self.exchanges = exchanges


def sync_process(rank: int, num_values: int, ports: Any, gate: Any, times: Any) -> None:
    """One of the ranks: SYNCs by both, in turn."""
    torch.set_num_threads(1)
    program = with_optimizer(one_f_one_b(Layout(RANKS, 1, 1, ("a",))))
    role = WorkerRole(program, rank)
    syncs = {}
    for kind in ("transport", "ordered"):
        base = Assignment(rank, to_text(program), replace(stand_in(), sums=kind), 1, patience_s=WAIT_S)  # type: ignore[arg-type]
        links = WorkerLinks(role, base)
        ports[kind, rank] = links.port
        gate.wait()
        found = [(link.end, link.peer, link.lane, "127.0.0.1", ports[kind, int(link.peer.split("/p")[1].split(".")[0])])
                 for link in role.links(tied=False)]  # fmt: skip
        links.connect(found)
        stage, group = OneStage(base, role), PipelineGroup(base, links)
        group.join(stage)  # type: ignore[arg-type]
        syncs[kind] = GradientSync(stage.exchanges, make_device("cpu"), f"p{rank}.s0")
    gradients = torch.randn(num_values, generator=torch.Generator().manual_seed(rank))
    for number in range(ROUNDS):
        for kind, sync in syncs.items():
            flat = gradients.clone()
            gate.wait()
            began, cpu_s = time.monotonic(), time.process_time()
            sync.begin(number, 0, flat)
            sync.finish(number, 0, lambda pending: [each.wait(WAIT_S) for each in pending], whole=True)  # type: ignore[arg-type, return-value]
            times[kind, number, rank] = time.monotonic() - began, time.process_time() - cpu_s
    gate.wait()
    os._exit(0)  # Gloo's threads need not be ended one by one


def speed(report: Report, megabytes: int) -> None:
    context = multiprocessing.get_context("spawn")
    with context.Manager() as manager:
        ports, times, gate = manager.dict(), manager.dict(), context.Barrier(RANKS)
        values = megabytes * 2**20 // 4
        processes = [
            context.Process(target=sync_process, args=(rank, values, ports, gate, times)) for rank in range(RANKS)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(WAIT_S * 2)
            if process.is_alive():
                process.kill()
        found = dict(times)

    def slowest(kind: str, number: int) -> float:
        return max(found[kind, number, rank][0] for rank in range(RANKS))

    ratios = [slowest("transport", n) / slowest("ordered", n) for n in range(1, ROUNDS)]
    medians = {kind: statistics.median(slowest(kind, n) for n in range(1, ROUNDS)) for kind in ("transport", "ordered")}
    cpu_s = {kind: statistics.median(found[kind, n, 0][1] for n in range(1, ROUNDS)) for kind in medians}
    print(f"  medians: {medians}, CPU of rank 0: {cpu_s}, ratios: {[round(r, 2) for r in ratios]}", flush=True)
    report.figure(
        f"SYNC of {megabytes} MiB over {RANKS} ranks, speed over transport",
        statistics.median(ratios),
        "x",
        at_least=1.0,
    )


# ---- memory ----------------------------------------------------------------------------------------------------------
def tensor_bytes() -> int:
    """Of all tensors that exist in this process, each memory once."""
    gc.collect()
    storages = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
        for t in gc.get_objects()
        if isinstance(t, torch.Tensor) and t.device.type != "meta"
    }
    return sum(storages.values())


def memory(report: Report, device: str) -> None:
    config = replace(QWEN, width=512, num_heads=8, num_kv_heads=4, head_width=64, ffn_width=1408, vocabulary=4096)
    config = replace(config, tied=False)
    setup = TrainingSetup(ModelChoice(config, "bf16"), DataChoice(32, 1), OptimizerSettings(LearningRate(1e-3)), zero=1)
    program = with_optimizer(one_f_one_b(Layout(RANKS, 1, 1, ("a",))))
    before = torch.cuda.memory_allocated() if device != "cpu" else tensor_bytes()
    stage_set = StageSet(Assignment(1, to_text(program), setup, 1), WorkerRole(program, 1), make_device(device))
    after = torch.cuda.memory_allocated() if device != "cpu" else tensor_bytes()
    num_parameters = sum(p.numel() for p in stage_set.parameters.values())
    each, bar = (after - before) / num_parameters, 6 + 12 / RANKS
    where = "GPU" if device != "cpu" else "CPU"
    report.figure(f"state at rest on a {where}, bf16, zero 1, d = {RANKS}", each, "B/param", at_most=1.03 * bar)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--part", choices=("bits", "speed", "memory"), action="append")
    parser.add_argument("--dp", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--tp", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--schedule", choices=SCHEDULE_NAMES, action="append")
    parser.add_argument("--nccl", action="store_true", help="on one GPU")
    parser.add_argument("--quick", action="store_true", help="about a minute")
    args = parser.parse_args()
    if args.nccl and not torch.cuda.is_available():
        return not_measured("sums by NCCL", "no GPU here")
    torch.set_num_threads(1)
    schedules, megabytes = tuple(args.schedule or SCHEDULE_NAMES), 256
    if args.quick:
        schedules, megabytes, args.dp, args.tp, args.steps = ("1f1b", "zero-bubble"), 64, [2], [1], 5
    report = Report(f"Sums over pipelines, {args.steps} steps (measured)", "sums: transport")
    parts = args.part or ("bits", "speed", "memory")
    if "memory" in parts:
        memory(report, "cuda:0" if args.nccl else "cpu")
    if "bits" in parts:
        bits(report, schedules, args)
    if "speed" in parts and not args.nccl:
        speed(report, megabytes)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
