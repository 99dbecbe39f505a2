"""Speed of our worker compared with torch.distributed.pipelining over Gloo, on two CPUs without a WAN.

The same decoder, batches, order (1F1B) and optimizer, one torch thread per stage. Both run side by side in rounds; each
goes first every other round, after a round that does not count. The result is the median of the rounds' ratios, because
a shared host varies by a tenth from one minute to the next. A round in which others used the host is void and repeated,
up to three times as many; if too few rounds count, nothing is measured. The losses must agree.

    python bench/torch_pipelining.py [--rounds 5] [--sizes small middle]
    python bench/torch_pipelining.py --quick        # two rounds of the small size, at most five tried
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import torch
from common.host import Others
from common.report import Report

from atlas.cost.table import kind_costs, uniform_costs
from atlas.ir.assemble import with_optimizer
from atlas.ir.program import Layout
from atlas.ir.timeline import Timeline
from atlas.launch.emulate import EmulationSettings, emulate
from atlas.launch.report.events import StepEvent
from atlas.runtime.assignment import SHIPPED, DataChoice, ModelChoice, TrainingSetup
from atlas.runtime.models.config import gpt
from atlas.runtime.models.decoder import loss_of
from atlas.runtime.models.task import DecoderTask
from atlas.runtime.recipe import LearningRate, OptimizerSettings
from atlas.runtime.topology import BatchShare
from atlas.runtime.training import make_task
from atlas.schedules.classic import one_f_one_b

NUM_STAGES, NUM_MICROBATCHES, NUM_COLD = 2, 8, 4
RATE, QUICK_S = 0.05, 60.0
MOST_OTHERS = 0.15
"""Cores that other processes may use in a round that counts."""
SIZES = {"small": (128, 32, 84), "middle": (256, 64, 24)}
"""Width, length and number of steps. The time of a step is the median of all but the first few."""


def training(size: str) -> TrainingSetup:
    width, length, _ = SIZES[size]
    config = gpt(num_layers=4, width=width, num_heads=4, vocabulary=256, max_length=length)
    return TrainingSetup(
        ModelChoice(config, layers_per_stage=(2, 2)),
        DataChoice(length, 4, SHIPPED),
        OptimizerSettings(LearningRate(RATE), "sgd"),
    )


# ---- ours --------------------------------------------------------------------------------------------------------
def ours(size: str) -> tuple[float, list[float]]:
    """Seconds of a step, and the losses."""
    program = with_optimizer(one_f_one_b(Layout(1, NUM_STAGES, NUM_MICROBATCHES, ("here",) * NUM_STAGES)))
    free = uniform_costs(1, NUM_STAGES, kind_costs(forward_ns=0))
    seconds: list[float] = []

    def note(event: StepEvent, timeline: Timeline) -> None:
        seconds.append(event["iteration_s"])

    setup = EmulationSettings(SIZES[size][2], device="cpu", paths={}, keep_weights=False)
    run = emulate(program, free, training(size), setup, on_step=note)
    return statistics.median(seconds[NUM_COLD:]), run.losses


# ---- torch's -----------------------------------------------------------------------------------------------------
def torchs(size: str) -> tuple[float, list[float]]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    group = {"WORLD_SIZE": str(NUM_STAGES), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    one_thread = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, __file__, "rank", size]
    ranks = [
        subprocess.Popen(command, env={**os.environ, **group, **one_thread, "RANK": str(r)}, stdout=subprocess.PIPE)
        for r in range(NUM_STAGES)
    ]
    try:
        said = [process.communicate(timeout=120)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    found = json.loads(said[-1])
    return found["seconds"], found["losses"]


def batch_of(task: DecoderTask, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    slots = range(step * NUM_MICROBATCHES, (step + 1) * NUM_MICROBATCHES)
    tokens, targets = zip(*(task.microbatch(slot, 0) for slot in slots), strict=True)
    return torch.cat(tokens), torch.cat(targets)


def rank_main(size: str) -> None:
    """One rank of torch's pipeline; the last one prints the result."""
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    share = BatchShare(0, 0, NUM_MICROBATCHES)
    task = make_task(training(size), num_stages=NUM_STAGES, share=share, num_microbatches=NUM_MICROBATCHES)
    module = task.build_stage(rank, NUM_STAGES)
    optimizer = torch.optim.SGD(module.parameters(), lr=RATE)
    schedule = Schedule1F1B(
        PipelineStage(module, rank, NUM_STAGES, torch.device("cpu")), NUM_MICROBATCHES, loss_fn=loss_of
    )
    batches = [batch_of(task, step) for step in range(SIZES[size][2])]  # ours reads its data during the steps
    ends_s, losses = [], []
    for tokens, targets in batches:
        each: list[torch.Tensor] = []
        if rank == 0:
            schedule.step(tokens)
        else:
            schedule.step(target=targets, losses=each, return_outputs=False)
        optimizer.step()
        optimizer.zero_grad()
        ends_s.append(time.perf_counter())
        losses += [torch.stack(each).mean().item()] if each else []
    if rank == NUM_STAGES - 1:
        seconds = [end - begin for begin, end in pairwise(ends_s)][NUM_COLD - 1 :]
        print(json.dumps({"seconds": statistics.median(seconds), "losses": losses}))
    dist.barrier()
    dist.destroy_process_group()


Side = Callable[[str], tuple[float, list[float]]]
"""Seconds of a step of a size, and its losses."""


# ---- side by side ------------------------------------------------------------------------------------------------
class Round(NamedTuple):
    their_s: float
    our_s: float
    apart: float
    """Relative difference of the losses."""
    others: float
    """Cores that other processes used, in the worse half."""

    @property
    def ratio(self) -> float:
        """Our speed over theirs."""
        return self.their_s / self.our_s


def one_round(size: str, *, ours_first: bool) -> Round:
    found: dict[Side, tuple[float, list[float]]] = {}
    others = 0.0
    for side in (ours, torchs) if ours_first else (torchs, ours):
        began = Others()
        found[side] = side(size)
        others = max(others, began.cores)
    (our_s, our_losses), (their_s, their_losses) = found[ours], found[torchs]
    apart = max(abs(a / b - 1) for a, b in zip(our_losses, their_losses, strict=True))
    times = f"torch {their_s * 1e3:.1f} ms, ours {our_s * 1e3:.1f} ms a step"
    print(f"  {size}: {times}, {their_s / our_s:.3f}x; others kept {others:.2f} cores busy", flush=True)
    return Round(their_s, our_s, apart, others)


def sound(rounds: list[Round]) -> list[Round]:
    return [r for r in rounds if r.others <= MOST_OTHERS]


def measure(size: str, num_rounds: int, max_rounds: int, report: Report, limit_s: float = float("inf")) -> None:
    """No round starts after `limit_s`, so a busy host ends the bench early."""
    began = time.monotonic()
    cold, rounds = one_round(size, ours_first=True), list[Round]()
    while len(sound(rounds)) < num_rounds and len(rounds) < max_rounds and time.monotonic() - began < limit_s:
        rounds.append(one_round(size, ours_first=len(rounds) % 2 == 1))
    apart = max(r.apart for r in (cold, *rounds))
    report.figure(f"{size}: losses against torch's, relative", apart, "", at_most=1e-5)
    counted, name = sound(rounds), f"{size}: our speed over torch's"
    if len(counted) < num_rounds:
        report.void(name, f"others used the host in {len(rounds) - len(counted)} of {len(rounds)} rounds")
        return
    report.figure(f"{size}: torch, a step", statistics.median(r.their_s for r in counted) * 1e3, "ms")
    report.figure(f"{size}: ours, a step", statistics.median(r.our_s for r in counted) * 1e3, "ms")
    ratios = [r.ratio for r in counted]
    report.figure(f"{name}, worst round", min(ratios), "x")
    report.figure(f"{name}, best round", max(ratios), "x")
    report.figure(name, statistics.median(ratios), "x", at_least=1.0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sizes", nargs="+", choices=tuple(SIZES), default=list(SIZES))
    parser.add_argument("--quick", action="store_true", help="two rounds of the small size: two minutes")
    if "--quick" in sys.argv:
        parser.set_defaults(rounds=2, sizes=["small"])
    args = parser.parse_args()
    max_rounds = 5 if args.quick else 3 * args.rounds
    report = Report(f"Worker against torch.distributed.pipelining, {args.rounds} rounds (measured)", "torch with Gloo")
    for size in args.sizes:
        measure(size, args.rounds, max_rounds, report, QUICK_S if args.quick else float("inf"))
    return report.finish()


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        rank_main(sys.argv[2])
    else:
        sys.exit(main())
