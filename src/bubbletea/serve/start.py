"""Starts `bubbletea serve` from its flags: the served model, the workers (with or without training) and the service.

The heavy half of the command: imports torch. Knows the flags; the parts are put together by `assemble`.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Protocol

from atlas.errors import AtlasError
from atlas.runtime.hardware import require_device
from atlas.runtime.models.config import DecoderConfig
from bubbletea.admit.aims import LATE_TOKENS, Aims
from bubbletea.costs import price_prefill
from bubbletea.prefill.dedicated_worker import DedicatedWorker
from bubbletea.prefill.shard import Served
from bubbletea.serve.assemble import ServiceSettings, assemble, calibrated, model_of
from bubbletea.serve.auth import Keys
from bubbletea.serve.dedicated_workers import DedicatedWorkers
from bubbletea.serve.http import HttpServer
from bubbletea.serve.run import Where, run
from bubbletea.serve.training import TrainingProcess, TrainingSource, rehearsed
from bubbletea.serve.worker_windows import WorkerWindows, alone, of_training, sensitivity

PIECE_NS = 10_000_000
"""Shortest piece on a paced device: the host cannot time shorter ones."""
MIB = 1 << 20


def start(args: argparse.Namespace) -> int:
    """Runs the service until it is drained."""
    if (args.plan is None) == (args.alone is None):
        raise AtlasError("serve: give either a PLAN to train or --alone N for workers without training")
    _require_device(args)
    served = _served(args)
    settings = ServiceSettings(
        name=args.name or (args.model.resolve().name if args.model else "tiny-random"),
        served=served,
        split=args.stages,
        chunk=args.chunk,
        arena_bytes=args.arena_mib * MIB,
        store_bytes=args.store_mib * MIB,
        prefix_bytes=args.prefix_mib * MIB,
        deadline_s=args.deadline,
        budget=args.slowdown,
        aims=Aims(args.goal, args.late, LATE_TOKENS),
    )
    windows, workers = (
        _alone(args, settings.arena_bytes) if args.plan is None else _training(args, settings.arena_bytes)
    )
    keys = Keys.read(args.keys) if args.keys else Keys.open_to_all()
    token = args.token_file.read_text(encoding="utf-8").strip() if args.token_file else ""
    parts = assemble(settings, windows, keys, token)
    where = Where(args.host, args.port, args.handoff_port, args.handoff_anywhere, args.drain)

    def on_start(server: HttpServer) -> None:
        lanes = ", ".join(f"{lane.dc} ({len(lane.workers)} workers)" for lane in parts.lanes)
        print(
            f"{settings.name} at http://{args.host}:{server.port}/v1, hand-off at {parts.kv_server.address[0]}:"
            f"{parts.kv_server.address[1]}; lanes in {lanes}. /health reports when the workers are ready",
            flush=True,
        )

    asyncio.run(run(parts, where, partial(workers, on_step=parts.service.metrics.iterated), on_start))
    return 0


def _require_device(args: argparse.Namespace) -> None:
    """Checked here, because a worker without its device would be restarted forever."""
    args.device = args.device or ("paced" if args.plan else "cpu")
    if args.device == "paced" and args.alone is not None:
        raise AtlasError("--device paced: only training workers can be paced. Use cpu or cuda:N")
    require_device(args.device)


def _served(args: argparse.Namespace) -> Served:

    return Served.of_folder(args.model, args.dtype) if args.model else Served(tiny(), dtype=args.dtype)


def tiny() -> DecoderConfig:
    """The model that is served without --model."""
    return DecoderConfig(
        family="llama", num_layers=4, width=128, num_heads=4, num_kv_heads=2, head_width=32, ffn_width=256,
        vocabulary=256, max_length=8192,
    )  # fmt: skip


class Workers(Protocol):
    """Starts the workers; `on_step` is called with the seconds of each training iteration."""

    def __call__(
        self, address: str, token_file: str, *, on_step: Callable[[float], None]
    ) -> AbstractContextManager[object]: ...


Started = tuple[WorkerWindows, Workers]


def _alone(args: argparse.Namespace, arena_bytes: int) -> Started:

    if args.alone < 1 or not 0 <= args.busy < 1:
        raise AtlasError(
            f"--alone {args.alone} --busy {args.busy}: give at least one worker, and a busy share from 0 to below 1"
        )
    windows = alone(args.alone, arena_bytes, busy=args.busy)
    if args.device != "cpu":
        windows = dataclasses.replace(windows, layer=calibrated(_served(args), args.chunk, args.device))
    period_s = windows.pattern.period_ns / 1e9

    def workers(address: str, token_file: str, *, on_step: Callable[[float], None]) -> DedicatedWorkers:
        return DedicatedWorkers(
            [
                DedicatedWorker(address, token_file, w, "here", period_s, args.busy, args.device)
                for w in range(args.alone)
            ]
        )

    return windows, workers


def _training(args: argparse.Namespace, arena_bytes: int) -> Started:

    source = TrainingSource(args.plan, tuple(args.set), args.schedule, slower=args.slower, device=args.device)
    what = rehearsed(source)
    gpu = what.job.cluster.gpu(what.program.worker_dc(0))
    priced = price_prefill(gpu, model_of(_served(args)))
    if args.device == "paced":
        pace = dataclasses.replace(priced.layer, floor_ns=max(priced.layer.floor_ns, PIECE_NS))
        windows = of_training(what.predicted, arena_bytes, pace, max(priced.head_ns, PIECE_NS))
    else:
        windows = of_training(what.predicted, arena_bytes, head_ns=priced.head_ns)
        windows = dataclasses.replace(windows, layer=None if args.device == "cpu" else priced.layer)
    windows = dataclasses.replace(windows, sensitivity=sensitivity(what.program, what.costs))

    def workers(address: str, token_file: str, *, on_step: Callable[[float], None]) -> TrainingProcess:
        return TrainingProcess(source, {"address": address, "token_file": token_file}, on_step)

    return windows, workers
