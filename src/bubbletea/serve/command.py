"""Serve a model in the bubbles of a training job: starts the training (emulated, on this machine) with BubbleTea in
every worker, and an OpenAI-compatible service for them.

Without PLAN there is no training: `--alone N` workers only prefill. Without --model a tiny random model is served.
Ctrl-C drains the service: admitted requests are finished, new ones refused; a second Ctrl-C stops it at once.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from atlas.errors import AtlasError
from bubbletea.admit.aims import LATE_TOKENS, Aims
from bubbletea.flags import aim_flags

if TYPE_CHECKING:
    from atlas.runtime.models.config import DecoderConfig
    from bubbletea.prefill.shard import Served
    from bubbletea.serve.http import HttpServer
    from bubbletea.serve.worker_windows import WorkerWindows

PIECE_NS = 10_000_000
"""Shortest piece on a paced device: the host cannot time shorter ones."""
MIB = 1 << 20


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", nargs="?", metavar="PLAN.yaml", help="the plan or job to train (emulated)")
    parser.add_argument("--alone", type=int, metavar="N", help="no training: start N workers that only prefill")
    parser.add_argument(
        "--busy",
        type=float,
        default=0.0,
        metavar="X",
        help="with --alone: share of time that workers are busy, as if they trained",
    )
    parser.add_argument(
        "--device",
        metavar="NAME",
        help="device of the workers: paced, cpu or cuda:N (default: paced; with --alone: cpu)",
    )
    parser.add_argument(
        "--model", type=Path, metavar="DIR", help="a Hugging Face folder (default: a tiny random model)"
    )
    parser.add_argument("--name", metavar="NAME", help="model name in the API (default: the folder's name)")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), default="float32", help="type of the weights"
    )
    parser.add_argument("--stages", type=int, metavar="N", help="number of workers that share one copy of the model")
    parser.add_argument("--chunk", type=int, default=512, metavar="N", help="longest chunk of a prompt (default 512)")
    parser.add_argument(
        "--arena-mib", type=int, default=256, metavar="N", help="memory per worker for prefill (default 256)"
    )
    parser.add_argument(
        "--store-mib", type=int, default=1024, metavar="N", help="host memory for keys and values (default 1024)"
    )
    parser.add_argument(
        "--prefix-mib", type=int, default=256, metavar="N", help="size of the prefix cache (default 256)"
    )
    parser.add_argument(
        "--slowdown", type=float, default=0.005, metavar="X", help="most that prefill may slow training (default 0.005)"
    )
    parser.add_argument(
        "--deadline", type=float, default=30.0, metavar="S", help="deadline of requests that set none (default 30)"
    )
    aim_flags(parser, "deadline")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1)")
    parser.add_argument("--port", type=int, default=8000, help="port to listen on (default 8000)")
    parser.add_argument(
        "--handoff-port", type=int, default=0, metavar="PORT", help="port for decode engines (default: any)"
    )
    parser.add_argument("--handoff-anywhere", action="store_true", help="accept decode engines from other hosts")
    parser.add_argument(
        "--token-file", type=Path, metavar="FILE", help="token of the decode engines (default: a new one)"
    )
    parser.add_argument("--keys", type=Path, metavar="FILE", help="API keys by tenant (default: no key needed)")
    parser.add_argument(
        "--drain",
        type=float,
        default=30.0,
        metavar="S",
        help="seconds to finish admitted requests at the end (default 30)",
    )
    parser.add_argument("--schedule", default="", metavar="NAME", help="schedule of a job (default: 1f1b)")
    parser.add_argument("--slower", type=int, default=1, metavar="X", help="run training X times slower")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change the job (repeatable)")


def run(args: argparse.Namespace) -> int:
    if (args.plan is None) == (args.alone is None):
        raise AtlasError("serve: give either a PLAN to train or --alone N for workers without training")
    _require_device(args)
    from bubbletea.serve.assemble import ServiceSettings, assemble
    from bubbletea.serve.auth import Keys
    from bubbletea.serve.run import Where
    from bubbletea.serve.run import run as run_service

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
    ground, workers = _alone(args, settings.arena_bytes) if args.plan is None else _training(args, settings.arena_bytes)
    keys = Keys.read(args.keys) if args.keys else Keys.nobody()
    token = args.token_file.read_text(encoding="utf-8").strip() if args.token_file else ""
    parts = assemble(settings, ground, keys, token)
    where = Where(args.host, args.port, args.handoff_port, args.handoff_anywhere, args.drain)

    def on_start(server: HttpServer) -> None:
        lanes = ", ".join(f"{lane.dc} ({len(lane.workers)} workers)" for lane in parts.lanes)
        print(
            f"{settings.name} at http://{args.host}:{server.port}/v1, hand-off at {parts.door.address[0]}:"
            f"{parts.door.address[1]}; lanes in {lanes}. /health reports when the workers are ready",
            flush=True,
        )

    asyncio.run(run_service(parts, where, partial(workers, on_step=parts.service.metrics.iterated), on_start))
    return 0


def _require_device(args: argparse.Namespace) -> None:
    """Checked here, because a worker without its device would be restarted forever."""
    from atlas.runtime.hardware import require_device

    args.device = args.device or ("paced" if args.plan else "cpu")
    if args.device == "paced" and args.alone is not None:
        raise AtlasError("--device paced: only training workers can be paced. Use cpu or cuda:N")
    require_device(args.device)


def _served(args: argparse.Namespace) -> Served:
    from bubbletea.prefill.shard import Served

    return Served.of_folder(args.model, args.dtype) if args.model else Served(tiny(), dtype=args.dtype)


def tiny() -> DecoderConfig:
    """The model that is served without --model."""
    from atlas.runtime.models.config import DecoderConfig

    return DecoderConfig(
        family="llama", num_layers=4, width=128, num_heads=4, num_kv_heads=2, head_width=32, ffn_width=256,
        vocabulary=256, max_length=8192,
    )  # fmt: skip


class Workers(Protocol):
    """Starts the workers; `on_step` is called with the seconds of each training iteration."""

    def __call__(
        self, address: str, token_file: str, *, on_step: Callable[[float], None]
    ) -> AbstractContextManager[object]: ...


Started = tuple["WorkerWindows", Workers]


def _alone(args: argparse.Namespace, arena_bytes: int) -> Started:
    from bubbletea.prefill.dedicated_worker import DedicatedWorker
    from bubbletea.serve.assemble import calibrated
    from bubbletea.serve.dedicated_workers import DedicatedWorkers
    from bubbletea.serve.worker_windows import alone

    if args.alone < 1 or not 0 <= args.busy < 1:
        raise AtlasError(
            f"--alone {args.alone} --busy {args.busy}: give at least one worker, and a busy share from 0 to below 1"
        )
    ground = alone(args.alone, arena_bytes, busy=args.busy)
    if args.device != "cpu":
        ground = dataclasses.replace(ground, layer=calibrated(_served(args), args.chunk, args.device))
    period_s = ground.pattern.period_ns / 1e9

    def workers(address: str, token_file: str, *, on_step: Callable[[float], None]) -> DedicatedWorkers:
        return DedicatedWorkers(
            [
                DedicatedWorker(address, token_file, w, "here", period_s, args.busy, args.device)
                for w in range(args.alone)
            ]
        )

    return ground, workers


def _training(args: argparse.Namespace, arena_bytes: int) -> Started:
    from bubbletea.costs import price_prefill
    from bubbletea.serve.assemble import model_of
    from bubbletea.serve.training import TrainingProcess, TrainingSource, rehearsed
    from bubbletea.serve.worker_windows import of_training, sensitivity

    source = TrainingSource(args.plan, tuple(args.set), args.schedule, slower=args.slower, device=args.device)
    what = rehearsed(source)
    gpu = what.job.cluster.gpu(what.program.worker_dc(0))
    priced = price_prefill(gpu, model_of(_served(args)))
    if args.device == "paced":
        pace = dataclasses.replace(priced.layer, floor_ns=max(priced.layer.floor_ns, PIECE_NS))
        ground = of_training(what.predicted, arena_bytes, pace, max(priced.head_ns, PIECE_NS))
    else:
        ground = of_training(what.predicted, arena_bytes, head_ns=priced.head_ns)
        ground = dataclasses.replace(ground, layer=None if args.device == "cpu" else priced.layer)
    ground = dataclasses.replace(ground, sensitivity=sensitivity(what.program, what.costs))

    def workers(address: str, token_file: str, *, on_step: Callable[[float], None]) -> TrainingProcess:
        return TrainingProcess(source, {"address": address, "token_file": token_file}, on_step)

    return ground, workers
