"""Emulated training with and without BubbleTea: utilization, iteration time, losses.

Six workers in three datacenters, paced devices, real sockets, and a saturating offline load of prompts whose keys and
values are delivered. Also counts what the service logs when its workers leave.

    python bench/serve_emulated.py             16 iterations of each run, about a minute
    python bench/serve_emulated.py --quick     10 iterations
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import random
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
from common.report import Report

from atlas.cost.table import kind_costs, uniform_costs
from atlas.ir.assemble import repeated, with_optimizer
from atlas.ir.program import Layout
from atlas.ir.timeline import Timeline
from atlas.launch.emulate import Emulation, EmulationSettings, emulate
from atlas.launch.report.events import StepEvent
from atlas.runtime.assignment import FillerChoice, stand_in
from atlas.runtime.models.config import DecoderConfig
from atlas.schedules.classic import one_f_one_b
from atlas.sim import simulate
from bubbletea.costs import LayerTime
from bubbletea.prefill.shard import Served
from bubbletea.serve.assemble import AssembledService, ServiceSettings, assemble
from bubbletea.serve.auth import ApiKeys
from bubbletea.serve.prefills import HandedBack, Prompt, Refused
from bubbletea.serve.worker_windows import of_training

MS = 1_000_000
STEPS, QUICK_STEPS, SETTLED = 16, 10, 5
"""Steps of each run, and after how many of them it counts: windows have to be learnt first."""
WAITING = 36
"""Prompts that are always waiting: more than the bubbles take."""
PROGRAM = with_optimizer(one_f_one_b(Layout(2, 3, 4, ("east", "middle", "west"))))
COSTS = uniform_costs(
    2, 3, kind_costs(forward_ns=60 * MS, backward_ns=120 * MS, sync_ns=10 * MS, step_ns=20 * MS),
    wan_boundaries=(0, 1), wan_ns=150 * MS, wan_latency_ns=20 * MS,
)  # fmt: skip
MODEL = DecoderConfig(
    family="llama", num_layers=4, width=64, num_heads=4, num_kv_heads=2, head_width=16, ffn_width=128, vocabulary=256,
    max_length=4096,
)  # fmt: skip
PIECE = LayerTime(10.0 * MS, 0.0, 0.0, 0.0)
BAR_UTILIZATION, BAR_SLOWDOWN = 0.94, 0.01


class Tally:
    """What the workers waited and filled, by step."""

    def __init__(self, num_steps: int) -> None:
        self.waited_ns = np.zeros(num_steps, np.int64)
        self.filled_ns = np.zeros(num_steps, np.int64)
        self.num_prompts = self.num_tokens = 0

    def listen(self, parts: AssembledService) -> None:
        usual: Callable[..., None] = parts.dispatcher.reported

        def reported(member: object, ran: list[list[int]], waits: list[list[int]]) -> None:
            for step, _, began_ns, ended_ns, filled_ns in waits:
                self.waited_ns[step] += ended_ns - began_ns
                self.filled_ns[step] += filled_ns
            usual(member, ran, waits)

        parts.dispatcher.reported = reported  # type: ignore[method-assign,assignment]


class Counted(logging.Handler):
    """Counts asyncio's warnings, for example about writes to a lost connection."""

    num_lines = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.num_lines += 1


def train(setup: EmulationSettings, seconds: list[float]) -> Emulation:
    def on_step(event: StepEvent, timeline: Timeline) -> None:
        seconds.append(event["iteration_s"])

    return emulate(PROGRAM, COSTS, stand_in(), setup, on_step=on_step)


async def filled_run(tally: Tally, num_steps: int, seconds: list[float]) -> Emulation:
    windows = of_training(simulate(repeated(PROGRAM, 4), COSTS), 64 << 20, PIECE, 10 * MS)
    settings = ServiceSettings("tiny", Served(MODEL), split=1, chunk=128, arena_bytes=64 << 20, budget=0.01)
    parts = assemble(settings, windows, ApiKeys.open_to_all())
    tally.listen(parts)
    with tempfile.TemporaryDirectory() as folder:
        address = await parts.start(Path(folder))
        filler = FillerChoice("bubbletea", {"address": address, "token_file": f"{folder}/token"})
        names = [PROGRAM.worker_name(w) for w in range(PROGRAM.num_workers)]
        setup = EmulationSettings(num_steps, fillers=dict.fromkeys(names, filler))
        over = threading.Event()
        clients = [asyncio.create_task(client(parts, tally, number, over)) for number in range(WAITING)]
        try:
            return await asyncio.to_thread(train, setup, seconds)
        finally:
            over.set()
            for task in clients:
                task.cancel()
            await asyncio.gather(*clients, return_exceptions=True)
            await parts.close()


async def client(parts: AssembledService, tally: Tally, number: int, over: threading.Event) -> None:
    rng = random.Random(number)
    while not over.is_set():
        tokens = [rng.randrange(256) for _ in range(rng.randrange(128, 1024))]
        try:
            found = await parts.dispatcher.prefill(Prompt(tokens, f"tenant {number % 3}", 1, kind="offline"))
        except (Refused, HandedBack):
            await asyncio.sleep(0.2)
            continue
        parts.dispatcher.store.release(found.parcel.ticket)
        tally.num_prompts += 1
        tally.num_tokens += len(tokens)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_STEPS} iterations instead of {STEPS}")
    num_steps = QUICK_STEPS if parser.parse_args().quick else STEPS
    plain_s, filled_s, tally, logged = list[float](), list[float](), Tally(num_steps), Counted()
    logging.getLogger("asyncio").addHandler(logged)
    plain = train(EmulationSettings(num_steps), plain_s)
    filled = asyncio.run(filled_run(tally, num_steps, filled_s))
    before, after = (float(np.median(s[SETTLED:])) for s in (plain_s, filled_s))
    whole_ns = sum(filled_s[SETTLED:]) * 1e9 * PROGRAM.num_workers
    idle_ns, filled_ns = int(tally.waited_ns[SETTLED:].sum()), int(tally.filled_ns[SETTLED:].sum())
    differing = sum(a != b for a, b in zip(plain.losses, filled.losses, strict=True))
    told = Report("Training with prefill in its bubbles, under emulation", "the same training without prefill")
    told.figure("utilization without prefill", 100 * (1 - idle_ns / whole_ns), "%")
    use = 100 * (1 - (idle_ns - filled_ns) / whole_ns)
    told.figure("utilization with prefill", use, "%", at_least=100 * BAR_UTILIZATION)
    told.figure("bubbles filled", 100 * filled_ns / max(1, idle_ns), "%")
    told.figure("iteration without prefill, median", before * 1e3, "ms")
    told.figure("iteration with prefill, median", after * 1e3, "ms")
    told.figure("longer by", 100 * (after / before - 1), "%", at_most=100 * BAR_SLOWDOWN)
    told.figure("losses that differ", differing, "steps", at_most=0)
    told.figure("prompts delivered", tally.num_prompts, "prompts", at_least=1)
    told.figure("prompt tokens delivered", tally.num_tokens, "tokens")
    told.figure("complaints of asyncio in the log", logged.num_lines, "lines", at_most=0)
    told.figure("host late by", filled.late_s * 1e3, "ms")
    told.figure("devices overrun by", filled.overrun_s * 1e3, "ms")
    return told.finish()


if __name__ == "__main__":
    sys.exit(main())
