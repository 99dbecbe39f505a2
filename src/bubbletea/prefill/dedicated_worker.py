"""A worker process that does not train. It is busy for a part of every period, as if it trained, and prefills in the
rest. For trying the service, for dedicated workers (busy 0), and for tests.

`main` reads one JSON object from stdin (`DedicatedWorker`) and ends when stdin is closed.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from dataclasses import dataclass

import torch

from atlas.lifetime import Lifeline
from atlas.runtime.hardware import make_device
from atlas.runtime.waits import Position, SharedDevice
from bubbletea.prefill.joining import WorkerIdentity
from bubbletea.prefill.prefill_worker import PrefillWorker

SWITCH_INTERVAL_S = 0.5e-3
"""Python's switch interval, whose default lets a sender wait 5 ms for the thread that computes. `atlas.runtime.process`
has the same one, but importing it would load 541 more modules."""


@dataclass(frozen=True)
class DedicatedWorker:
    """The settings of one such worker."""

    address: str
    token_file: str
    worker: int
    datacenter: str = "localhost"
    period_s: float = 1.0
    busy: float = 0.0
    """The share of the period, at its start, in which the worker is busy."""
    device: str = "cpu"


def main() -> int:
    settings = DedicatedWorker(**json.loads(sys.stdin.readline()))
    Lifeline(sys.stdin.fileno())
    torch.set_num_threads(1)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    filler = PrefillWorker({"address": settings.address, "token_file": settings.token_file})
    device = SharedDevice(make_device(settings.device), lambda span: None)
    filler.open(WorkerIdentity(f"w{settings.worker}", settings.datacenter, settings.worker), device)
    gc.freeze()  # excluded from garbage collection, which could otherwise delay a piece
    run(filler, settings)
    return 0


def run(filler: PrefillWorker, settings: DedicatedWorker, steps: int = 2**62) -> None:
    """Periods start at multiples of their length, so that all workers of one machine are in step."""
    period_ns = int(settings.period_s * 1e9)
    step = time.monotonic_ns() // period_ns
    for number in range(step, step + steps):
        began_ns = number * period_ns + int(settings.busy * period_ns)
        end_ns = (number + 1) * period_ns
        time.sleep(max(0, began_ns - time.monotonic_ns()) / 1e9)
        began_ns = max(began_ns, time.monotonic_ns())
        if began_ns < end_ns:
            filler.fill(Position(number, 0), lambda end_ns=end_ns: time.monotonic_ns() >= end_ns)  # type: ignore[misc]
        time.sleep(max(0, end_ns - time.monotonic_ns()) / 1e9)
        filler.waited(Position(number, 0), min(began_ns, end_ns), end_ns)
