"""Runs over several datacenters for tests: each with its own folder, on loopback, all launchers in this process."""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import yaml
from free_ports import free_port

from atlas.commands.train_dc import agent_name
from atlas.launch import multi_dc
from atlas.launch.agent import Agent, AgentSettings
from atlas.launch.coordinator import RunCallbacks
from atlas.launch.multi_dc import COORDINATOR, coordinated, make_coordinator, train_here
from atlas.launch.prepared_job import prepare_job
from atlas.launch.supervisor import RestartPolicy
from atlas.launch.train_options import TrainOptions
from atlas.runtime.checkpoint.load import choose, load_layers
from atlas.runtime.checkpoint.store import BlobStore, LocalStore
from atlas.runtime.reference import train_alone
from atlas.spec import Job, load_job
from atlas.wan.security.credentials import Security

OPTIONS = TrainOptions("1f1b", device="cpu", model="job", data="shipped", learning_rate=3e-3)
LIMIT_S = 300.0
"""A few seconds are enough on an idle machine. On one that is busy, all workers of a run import torch one after the
other, several times where it restarts."""
QUICK = RestartPolicy(max_in_a_row=3, first_wait_s=0.1)


def job_text(*datacenters: str, num_microbatches: int = 4, pp: int | None = None, tight: bool = False) -> str:
    """A model of a few thousand parameters. `tight`: it needs the memory of two nodes, and each datacenter has one."""
    return yaml.dump(
        {
            **({"memory_gib": 0.0012} if tight else {}),
            "name": "small",
            "model": {"layers": 4, "hidden": 32, "heads": 2, "vocab": 300, "seq_len": 32},
            "cluster": {
                "wan": {"latency_ms": 5, "pair_gbps": 1},
                "datacenters": [{"name": dc, "nodes": 1 if tight else 2, "gpus_per_node": 1} for dc in datacenters],
            },
            "precision": "fp32",
            "microbatch": 2,
            "num_microbatches": num_microbatches,
            "pp": pp or len(datacenters),
            "pipelines_per_cell": 1,
        }
    )


def write_job(folder: Path, *datacenters: str, **options: Any) -> Job:
    file = folder / "job.yaml"
    folder.mkdir(parents=True, exist_ok=True)
    file.write_text(job_text(*datacenters, **options))
    return load_job(file)


@dataclass
class Run:
    """The results of all launchers."""

    codes: dict[str, int] = field(default_factory=dict)
    errors: dict[str, BaseException] = field(default_factory=dict)
    said: list[str] = field(default_factory=list)
    losses: dict[int, float] = field(default_factory=dict)
    """By step, as last reported."""
    starts: int = 0


def require_losses_of(run: Run, num_steps: int) -> None:
    """Of every step. That of a step that the run resumed from may be missing: its checkpoint was complete, but a lost
    host had not yet reported it."""
    resumed = {int(line.split()[-1]) for line in run.said if line.startswith("resumed from the checkpoint of step")}
    assert set(range(1, num_steps + 1)) - resumed <= set(run.losses) <= set(range(1, num_steps + 1)), run.said


class TrackedAgent(Agent):
    """Of a launcher in this process, so that a test can end it as a lost host ends."""

    running: ClassVar[dict[str, TrackedAgent]] = {}

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.running[self.settings.name.node] = self

    def vanish(self) -> None:
        """Workers and connections end, and nothing more is sent."""
        self._client._closing.set()
        self._client.channel.detach()
        attempt = self._attempt
        if attempt is not None and attempt.workers is not None:
            for pid in attempt.workers.pids.values():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self._client.channel.inbox.put({"gone": "the host is lost"})


class CrashError(BaseException):
    """Ends a coordinator as a kill does: it sends nothing more, and writes nothing more."""


def train_options(steps: int, **changes: Any) -> TrainOptions:
    return replace(OPTIONS, steps=steps, restarts=QUICK, **changes)


def run_datacenters(
    job: Job,
    folders: Mapping[str, Path],
    options: TrainOptions,
    *,
    on_start: Callable[[Run, Mapping[str, int]], None] = lambda run, pids: None,
    on_step: Callable[[Run, int], None] = lambda run, step: None,
    route: Callable[[str, str, tuple[str, int]], tuple[str, int]] = lambda src, dst, address: address,
    auto_replan: bool = False,
    launchers: Sequence[str] | None = None,
    settings: Mapping[str, Mapping[str, Any]] | None = None,
    port: int | None = None,
    state: Path | None = None,
    apart: bool = False,
    crash_after: Sequence[int] = (),
) -> Run:
    """Run every launcher to its end: `west` or `west 1/2`. `launchers`: only these; the others run elsewhere. `state`:
    coordinate them apart, with this folder, and crash and start again after each of the steps `crash_after`. `apart`:
    that is done elsewhere."""
    run, port = Run(), port or free_port()
    multi_dc.Agent = TrackedAgent  # type: ignore[misc]
    names = list(folders) if launchers is None else list(launchers)

    def started(pids: Mapping[str, int]) -> None:
        run.starts += 1
        on_start(run, pids)

    def note_step(event: Any, timeline: Any) -> None:
        run.losses[event["step"]] = event["loss"]
        on_step(run, event["step"])

    def launch(name: str) -> None:
        own = {"checkpoints": folders[name], "device": "cpu", **(settings or {}).get(name, {})}
        dc, _, node = name.partition(" ")
        place = agent_name(dc, None if node.startswith("spare") else node or None, {}, spare=node.startswith("spare"))[
            0
        ]
        mine = AgentSettings(
            place, ("127.0.0.1", port), apart=apart or state is not None, auto_replan=auto_replan, **own
        )
        try:
            callbacks = RunCallbacks(run.said.append, note_step, started, route)
            run.codes[name] = train_here(job, options, mine, callbacks)
        except BaseException as error:
            run.errors[name] = error

    def coordinate_apart(folder: Path) -> None:
        crashes = list(crash_after)

        def crash(event: Any, timeline: Any) -> None:
            note_step(event, timeline)
            if crashes and event["step"] >= crashes[0]:
                crashes.pop(0)
                coordinator.rendezvous.close()
                coordinator._file._folder = None
                raise CrashError

        apart = AgentSettings(COORDINATOR, ("127.0.0.1", port), auto_replan=auto_replan)
        while True:
            callbacks = RunCallbacks(run.said.append, crash, started, route)
            try:
                coordinator = make_coordinator(prepare_job(job, options), options, apart, callbacks, Security(), folder)
                run.codes["coordinator"] = coordinated(coordinator, callbacks)
                return
            except CrashError:
                continue
            except BaseException as error:
                run.errors["coordinator"] = error
                return

    threads = [threading.Thread(target=launch, args=(name,), name=f"launcher of {name}", daemon=True) for name in names]
    if state is not None:
        threads.append(threading.Thread(target=coordinate_apart, args=(state,), name="coordinator", daemon=True))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
        assert not thread.is_alive(), f"{thread.name} does not end; output: {run.said}\n{stacks()}"
    return run


def stacks() -> str:
    """What every thread of this process does."""
    names, frames = {thread.ident: thread.name for thread in threading.enumerate()}, sys._current_frames()
    return "\n".join(
        f"{names.get(ident)}:\n{''.join(traceback.format_stack(frame))}" for ident, frame in frames.items()
    )


def losses_alone(job: Job, num_steps: int) -> dict[int, float]:
    """Losses by step of one process that trains the same batches."""
    prepared = prepare_job(job, OPTIONS)
    program = prepared.program
    losses, _ = train_alone(
        prepared.training, prepared.job.cells * program.num_pipelines, program.num_microbatches, num_steps
    )
    return dict(enumerate(losses, 1))


def hashes(folders: Mapping[str, Path], step: int, store: str = "own") -> dict[str, str]:
    """SHA-256 of every weight and its optimizer state in the checkpoint of a step, replicas left out."""
    return hashes_of([LocalStore(folder / store) for folder in folders.values()], step)


def hashes_of(stores: Sequence[BlobStore], step: int) -> dict[str, str]:
    checkpoint = choose(stores, step=step)
    assert checkpoint is not None
    tensors: dict[str, Any] = {}
    for state in load_layers(checkpoint, checkpoint.layers).values():
        tensors |= state.parameters
        tensors |= {f"{name} {slot}": t for name, slots in state.optimizer.items() for slot, t in slots.items()}
    return {name: hashlib.sha256(tensor.numpy().tobytes()).hexdigest() for name, tensor in tensors.items()}
