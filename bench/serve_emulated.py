"""Training under emulation with and without BubbleTea: six workers in three datacenters, paced devices, real sockets, a
saturating offline load of prompts whose keys and values are delivered. Prints utilization, iteration time and whether
the losses are the same to the bit, each against its bar.

    python bench/serve_emulated.py
"""

from __future__ import annotations

import asyncio
import random
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np

from atlas.cost.table import kind_costs, uniform_costs
from atlas.ir.assemble import repeated, with_optimizer
from atlas.ir.program import Layout
from atlas.launch.emulate import Emulation, Setup, emulate
from atlas.launch.passes import Progress
from atlas.runtime.assignment import FillerChoice, stand_in
from atlas.runtime.models.config import DecoderConfig
from atlas.schedules.classic import one_f_one_b
from atlas.sim import simulate
from bubbletea.costs import LayerTime
from bubbletea.prefill.shard import Served
from bubbletea.serve.assemble import Parts, Settings, assemble
from bubbletea.serve.auth import Keys
from bubbletea.serve.dispatch import HandedBack, Prompt, Refused
from bubbletea.serve.ground import of_training

MS = 1_000_000
STEPS, SETTLED = 16, 5
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

    def __init__(self) -> None:
        self.waited_ns = np.zeros(STEPS, np.int64)
        self.filled_ns = np.zeros(STEPS, np.int64)
        self.num_prompts = self.num_tokens = 0

    def listen(self, parts: Parts) -> None:
        usual: Callable[..., None] = parts.dispatcher.reported

        def reported(member: object, ran: list[list[int]], waits: list[list[int]]) -> None:
            for step, _, began_ns, ended_ns, filled_ns in waits:
                self.waited_ns[step] += ended_ns - began_ns
                self.filled_ns[step] += filled_ns
            usual(member, ran, waits)

        parts.dispatcher.reported = reported  # type: ignore[method-assign,assignment]


def train(setup: Setup, seconds: list[float]) -> Emulation:
    def on_step(progress: Progress) -> None:
        seconds.append(progress.seconds)

    return emulate(PROGRAM, COSTS, stand_in(), setup, on_step=on_step)


async def filled_run(tally: Tally, seconds: list[float]) -> Emulation:
    ground = of_training(simulate(repeated(PROGRAM, 4), COSTS), 64 << 20, PIECE, 10 * MS)
    settings = Settings("tiny", Served(MODEL), split=1, chunk=128, arena_bytes=64 << 20, budget=0.01)
    parts = assemble(settings, ground, Keys.nobody())
    tally.listen(parts)
    with tempfile.TemporaryDirectory() as folder:
        address = await parts.start(Path(folder))
        filler = FillerChoice("bubbletea", {"address": address, "token_file": f"{folder}/token"})
        names = [PROGRAM.worker_name(w) for w in range(PROGRAM.num_workers)]
        setup = Setup(STEPS, fillers=dict.fromkeys(names, filler))
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


async def client(parts: Parts, tally: Tally, number: int, over: threading.Event) -> None:
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
    plain_s, filled_s, tally = list[float](), list[float](), Tally()
    plain = train(Setup(STEPS), plain_s)
    filled = asyncio.run(filled_run(tally, filled_s))
    before, after = (float(np.median(s[SETTLED:])) for s in (plain_s, filled_s))
    whole_ns = sum(filled_s[SETTLED:]) * 1e9 * PROGRAM.num_workers
    idle_ns = int(tally.waited_ns[SETTLED:].sum())
    use = 1 - (idle_ns - int(tally.filled_ns[SETTLED:].sum())) / whole_ns
    rows = [
        ("utilization without prefill", f"{1 - idle_ns / whole_ns:8.1%}", ""),
        ("utilization with prefill", f"{use:8.1%}", f"bar >= {BAR_UTILIZATION:.0%}"),
        ("of the bubbles, filled", f"{tally.filled_ns[SETTLED:].sum() / max(1, idle_ns):8.1%}", ""),
        ("iteration without, median", f"{before * 1e3:8.1f} ms", ""),
        ("iteration with, median", f"{after * 1e3:8.1f} ms", f"{after / before - 1:+.2%}, bar <= {BAR_SLOWDOWN:+.0%}"),
        ("losses", "the same" if plain.losses == filled.losses else "DIFFER", "bar: to the bit"),
        ("prompts prefilled, delivered", f"{tally.num_prompts:8d}", f"{tally.num_tokens} tokens"),
        ("host late by, devices overrun", f"{filled.late_s * 1e3:8.2f} ms", f"{filled.overrun_s * 1e3:.2f} ms"),
    ]
    print("\n".join(f"  {name:32} {value}   {note}" for name, value, note in rows))
    good = use >= BAR_UTILIZATION and after / before - 1 <= BAR_SLOWDOWN and plain.losses == filled.losses
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
