"""Prefill of short prompts, several in one piece and one at a time: the time of both, and the largest difference.

On this machine's CPU, one thread as in workers: 8 prompts of 64 tokens, a model of 4 layers. With `--device cuda:0`:
one layer of the shape of Llama-3-8B in bfloat16, prompts of 128, 512 and 4,096 tokens.

    python bench/batching.py [--quick] [--device cuda:0]

The bars: 1.5x on a CPU; on a GPU 3x, 1.5x and 0.99x; results within 1e-5 in float32.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from common.report import Report
from prefill_samples import Collector, device_at

from atlas.runtime.models.config import DecoderConfig
from bubbletea.prefill.arena import Arena
from bubbletea.prefill.engine import PrefillEngine
from bubbletea.prefill.job import PrefillPiece, PrefillTask
from bubbletea.prefill.shard import ModelShard, Served
from bubbletea.prefill.staging import Staged

SMALL = DecoderConfig(
    family="llama", num_layers=4, width=128, num_heads=4, num_kv_heads=2, head_width=32, ffn_width=256,
    vocabulary=256, max_length=8192,
)  # fmt: skip
LAYER_OF_8B = DecoderConfig(
    family="llama", num_layers=1, width=4096, num_heads=32, num_kv_heads=8, head_width=128, ffn_width=14_336,
    vocabulary=1024, max_length=8192,
)  # fmt: skip


class Results(Collector):
    """Keys and values, and logits, by prompt."""

    def kv(self, task: PrefillTask, piece: PrefillPiece, kv: Staged) -> None:
        self.found[task.job, piece.layer] = kv()

    def logits(self, task: PrefillTask, logits: Staged) -> None:
        self.found[task.job, -1] = logits()

    found: dict[tuple[int, int], torch.Tensor]


def prefill_s(engine: PrefillEngine, num_prompts: int, length: int, batch_tokens: int) -> float:
    """The time of all of them; `engine.outlet.found` has their results."""
    engine.batch_tokens = batch_tokens
    device = device_at(str(engine.shard.arena.device))
    for job in range(num_prompts):
        tokens = [(7 * job + 3 * at) % 256 for at in range(length)]
        engine.offer(PrefillTask(job, 0, length, 0, (length,), 0, 0, (("dc/0", "127.0.0.1", 0),)), tokens)
    began_s = time.perf_counter()
    while (flight := engine.step(lambda work, piece: device.begin(work, 0, 0))) is not None:
        span = flight.running.wait()
        engine.settle(flight, span.end_ns - span.start_ns)
    return time.perf_counter() - began_s


def measure(
    report: Report, served: Served, length: int, num_prompts: int, device: str, bar: float, rounds: int
) -> None:
    outlet = Results(served, length)
    outlet.found = {}
    arena_bytes = (2 << 30) if device == "cpu" else (12 << 30)
    (cut,) = served.cuts((served.config.num_layers,))
    engine = PrefillEngine(ModelShard(served, cut, Arena(arena_bytes, 2 << 30, device)), outlet)
    budget = max(length, num_prompts * length if length < 1024 else length)
    alone, batched, results = list[float](), list[float](), list[dict[tuple[int, int], torch.Tensor]]()
    for number in range(rounds + 2):
        for tokens, times in ((0, alone), (budget, batched)):  # in turns
            outlet.found = {}
            took_s = prefill_s(engine, num_prompts, length, tokens)
            if number > 1:
                times.append(took_s)
            results = [*results, outlet.found][-2:]
    name = f"{num_prompts} prompts of {length}"
    report.figure(f"{name}: one at a time", statistics.median(alone) * 1e3, "ms")
    report.figure(
        f"{name}: batched, faster by", statistics.median(alone) / statistics.median(batched), "x", at_least=bar
    )
    if served.torch_dtype == torch.float32:
        first, second = results
        worst = max(float((first[key] - second[key]).abs().max()) for key in first)
        report.figure(f"{name}: largest difference", worst, "", at_most=1e-5)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--device", default="cpu", metavar="NAME", help="cpu or cuda:N (default: cpu)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rounds = 10 if args.quick else 40
    report = Report("Prefill of several prompts in one piece", "one prompt at a time, in the same run")
    if args.device == "cpu":
        measure(report, Served(SMALL), 64, 8, "cpu", 1.5, rounds)
    else:
        served = Served(LAYER_OF_8B, dtype="bfloat16")
        for length, bar in ((128, 3.0), (512, 1.5), (4096, 0.99)):
            measure(report, served, length, 32 if length < 4096 else 4, args.device, bar, rounds)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
