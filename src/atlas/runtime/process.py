"""`python -m atlas.runtime.process`: one worker as a process. Takes orders as JSON lines on stdin, answers on stdout.

    <- {"assignment": ...}     -> {"listening": port}
    <- {"channels": ...}       -> {"ready": true}
    <- {"start_ns": ...}       -> {"result": ...}   or at any time  -> {"error": "..."}

When stdin ends, whoever started it is gone, and it goes too: no worker outlives its launcher. Knows no sockets
and no ops; the `Worker` does.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import traceback
from dataclasses import dataclass
from typing import Any, TextIO

import numpy as np
import torch

from atlas.errors import AtlasError
from atlas.ir.text import from_text
from atlas.runtime.device import Cpu, Device, Paced
from atlas.runtime.model import TinyGpt
from atlas.runtime.worker import Training, Worker


@dataclass(frozen=True)
class Assignment:
    """All a worker is told, JSON-able."""

    worker: int
    program: str
    """As text."""
    compute_ns: list[list[int]]
    """[s, k] of its pipeline."""
    gpt: dict[str, int]
    optimizer: str
    learning_rate: float
    paced: bool
    patience_s: float
    weights_file: str
    """Where to leave the final weights (npz); empty: nowhere."""


def main() -> int:
    orders, answers = sys.stdin, _private_stdout()
    torch.set_num_threads(1)
    sys.setswitchinterval(0.0005)  # the default lets a sender wait 5 ms for the thread that computes
    try:
        result = _serve(orders, answers)
    except AtlasError as error:
        _answer(answers, {"error": str(error)})
        return 1
    except Exception:
        _answer(answers, {"error": f"a bug, not a mistake of yours:\n{traceback.format_exc()}"})
        return 1
    _answer(answers, {"result": result})
    threading.Event().wait()  # peers may still be sending to us; the end of stdin ends us
    return 0


def _serve(orders: TextIO, answers: TextIO) -> dict[str, Any]:
    assignment = Assignment(**_order(orders)["assignment"])
    device: Device = Paced() if assignment.paced else Cpu()
    worker = Worker(
        from_text(assignment.program),
        assignment.worker,
        np.array(assignment.compute_ns, np.int64),
        Training(TinyGpt(**assignment.gpt), assignment.optimizer, assignment.learning_rate),
        device,
        assignment.patience_s,
    )
    _answer(answers, {"listening": worker.listener.address[1]})
    channels = _order(orders)["channels"]
    worker.connect({(direction, number): (host, port) for direction, number, host, port in channels})
    _answer(answers, {"ready": True})
    start_ns = _order(orders)["start_ns"]
    threading.Thread(target=_end_with, args=(orders,), daemon=True).start()
    record = worker.run(start_ns)
    if assignment.weights_file:
        weights = {n: p.detach().numpy() for s in worker.stages.values() for n, p in s.module.named_parameters()}
        np.savez(assignment.weights_file, **weights)  # type: ignore[arg-type]
    return {
        "op_start_ns": record.op_start_ns,
        "op_end_ns": record.op_end_ns,
        "ready_ns": list(record.ready_ns.items()),
        "start_ns": list(record.start_ns.items()),
        "arrive_ns": list(record.arrive_ns.items()),
        "losses": [item for stage in worker.stages.values() for item in stage.losses.items()],
        "overrun_ns": device.overrun_ns if isinstance(device, Paced) else 0,
    }


def _private_stdout() -> TextIO:
    """Our own stdout, while a stray print of some library goes to stderr and cannot spoil the protocol."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return answers


def _order(orders: TextIO) -> dict[str, Any]:
    line = orders.readline()
    if not line:
        os._exit(1)
    order: dict[str, Any] = json.loads(line)
    return order


def _end_with(orders: TextIO) -> None:
    while orders.readline():
        pass
    os._exit(1)


def _answer(answers: TextIO, message: dict[str, Any]) -> None:
    answers.write(json.dumps(message) + "\n")
    answers.flush()


if __name__ == "__main__":
    sys.exit(main())
