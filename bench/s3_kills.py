"""Saves to an object store with the writer killed in each: is every save complete or absent, and does a resumed run
end with the same bits?

    python bench/s3_kills.py            40 saves
    python bench/s3_kills.py --quick    10

A process resumes from the newest complete save, trains one step and saves it to an S3 server on loopback (moto). It is
killed with SIGKILL at a random moment of the save. Another process compares whatever is complete with an undisturbed
run, bit by bit. Each save is 53 MB in 13 objects; the largest are uploaded in several parts. Needs the packages obstore
and moto (CONTRIBUTING.md).
"""

from __future__ import annotations

import argparse
import hashlib
import multiprocessing
import os
import random
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from common.report import Report, not_measured
from common.s3_server import BUCKET, missing, s3_server

from atlas.runtime.checkpoint.checkpointer import Checkpointer
from atlas.runtime.checkpoint.load import choose, load_layers
from atlas.runtime.checkpoint.manifest import Meta, next_attempt
from atlas.runtime.checkpoint.place import store_at
from atlas.runtime.checkpoint.retention import Retention
from atlas.runtime.checkpoint.state import restore, states_of

PLACE = f"s3://{BUCKET}/run/own"
LAYERS = ("embed", "0", "1", "2", "3", "head")
WIDTH, ROWS = 64, 70_000
NUM_SAVES = 40
FORK = multiprocessing.get_context("fork")
"""This process imports torch once. It computes nothing and opens no store, so it has no threads when it forks."""


class TrainedModel:
    """An embedding table and a few small layers, with AdamW."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        modules: dict[str, Any] = {"embed": torch.nn.Embedding(ROWS, WIDTH)}
        modules |= {name: torch.nn.Linear(WIDTH, WIDTH) for name in LAYERS[1:]}
        self.module = torch.nn.ModuleDict(modules)
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=0.01)

    def step(self, number: int) -> None:
        tokens = torch.randint(ROWS, (32,), generator=torch.Generator().manual_seed(number))
        x = self.module["embed"](tokens)
        for name in LAYERS[1:]:
            x = torch.tanh(self.module[name](x))
        self.optimizer.zero_grad()
        x.square().mean().backward()
        self.optimizer.step()

    def digests(self) -> dict[str, str]:
        """A hash of each layer's weights and optimizer state."""
        found = {}
        for layer, state in states_of(self.module.named_parameters(), self.optimizer).items():
            tensors = [*sorted(state.parameters.items())]
            tensors += [(f"{n} {s}", t) for n, kept in sorted(state.optimizer.items()) for s, t in sorted(kept.items())]
            content = b"".join(name.encode() + tensor.numpy().tobytes() for name, tensor in tensors)
            found[layer] = hashlib.sha256(content).hexdigest()
        return found


def resumed(model: TrainedModel) -> int:
    """The step that the newest complete save has brought the model to."""
    found = choose([store_at(PLACE)], report=lambda line: None)
    if found is None:
        return 0
    restore(load_layers(found, LAYERS), model.module.named_parameters(), model.optimizer)
    return found.step


def write(out: Connection, num_steps: int) -> None:
    """Train steps after the newest save, and save each; sends the step before and after its save."""
    model = TrainedModel()
    first = resumed(model)
    store = store_at(PLACE)
    attempt = next_attempt([store])
    for step in range(first + 1, first + 1 + num_steps):
        model.step(step)
        checkpointer = Checkpointer(store, "p0.s0", LAYERS, attempt=attempt, retention=Retention(keep=2))
        out.send(step)
        states = states_of(model.module.named_parameters(), model.optimizer)
        checkpointer.save(step, states, Meta(samples_seen=step, seed=0, schedule_step=step))
        checkpointer.close()
        assert not checkpointer.failed
        out.send(step)


def check(out: Connection) -> None:
    """Send the step of the newest complete save, and the hashes of what was loaded from it."""
    model = TrainedModel()
    step = resumed(model)
    out.send((step, model.digests()))


def undisturbed(out: Connection, num_steps: int) -> None:
    """Send the hashes after each step of a run that is never stopped."""
    model, found = TrainedModel(), [dict[str, str]()]
    for step in range(1, num_steps + 1):
        model.step(step)
        found.append(model.digests())
    out.send(found)


def started(task: Callable[..., None], *arguments: Any) -> tuple[BaseProcess, Connection]:
    inside, outside = FORK.Pipe(duplex=False)
    process = FORK.Process(target=task, args=(outside, *arguments), daemon=True)
    process.start()
    outside.close()
    return process, inside


def answers(task: Callable[..., None], *arguments: Any) -> list[Any]:
    """Everything that a process sends, each with the time."""
    process, inside = started(task, *arguments)
    found = []
    try:
        while True:
            found.append((inside.recv(), time.monotonic()))
    except EOFError:
        process.join()
    assert process.exitcode == 0, "a process of this bench failed"
    return found


def killed_save(after_s: float) -> int:
    """The step whose save was disturbed."""
    process, inside = started(write, 1)
    step = int(inside.recv())
    time.sleep(after_s)
    process.kill()
    process.join()
    return step


def disturb(report: Report, num_saves: int) -> None:
    chance = random.Random(1)
    began = time.monotonic()
    times = answers(write, 2)  # so that there is something to lose
    save_s = times[-1][1] - times[-2][1]
    report.figure("one undisturbed save", save_s, "s")
    right, num_right = answers(undisturbed, num_saves + 4)[0][0], 0
    outcomes: list[str] = []
    for number in range(num_saves):
        step = killed_save(chance.uniform(0.0, 1.5 * save_s))
        found, digests = answers(check)[0][0]
        assert found in (step, step - 1), f"save {number}: resumed at {found}, not at {step} or the step before it"
        num_right += digests == right[found]
        outcomes.append("complete" if found == step else "absent")
    report.figure("killed saves", num_saves, "")
    report.figure("complete or absent, and equal to the bit", num_right, "", at_least=num_saves)
    report.figure("complete", outcomes.count("complete"), "", at_least=1)
    report.figure("absent", outcomes.count("absent"), "", at_least=1)
    answers(write, len(right) - 1 - answers(check)[0][0][0])
    same = answers(check)[0][0] == (len(right) - 1, right[-1])
    report.figure("resumed to the end: equal to the undisturbed run", float(same), "", at_least=1)
    report.figure("whole bench", time.monotonic() - began, "s")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="10 saves")
    args = parser.parse_args()
    if absent := missing():
        return not_measured("s3 kills", f"not installed: {', '.join(absent)}")
    report = Report("Saves to S3, each with its writer killed", "an undisturbed run in one process")
    torch.set_num_threads(1)
    with s3_server() as environment:
        os.environ.update(environment)
        disturb(report, 10 if args.quick else NUM_SAVES)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
