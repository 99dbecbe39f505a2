"""Starts `bubbletea serve` from its flags: the served model, the windows of the run (or workers without training) and
the service.

The heavy half of the command: imports torch. Knows the flags; the parts are put together by `assemble`.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
from collections import Counter
from contextlib import AbstractContextManager, ExitStack

from atlas.addresses import is_loopback
from atlas.console import secret_in
from atlas.errors import AtlasError
from atlas.ir.assemble import repeated
from atlas.ir.text import program_id, to_text
from atlas.launch.prepared_job import build_program
from atlas.launch.train_options import TrainOptions, recipe_options
from atlas.runtime.hardware import require_device
from atlas.sim import simulate
from atlas.spec import Job
from atlas.spec.plan import load_job_or_plan
from atlas.spec.recipe import load_recipe
from atlas.wan.security.certs import require_current
from atlas.wan.security.credentials import Credentials, Security
from bubbletea.admit.aims import LATE_TOKENS, Aims
from bubbletea.constants import MIB
from bubbletea.costs import price_prefill
from bubbletea.prefill.dedicated_worker import DedicatedWorker
from bubbletea.prefill.joining import SERVICE
from bubbletea.prefill.service_files import ServicePlace, announced, service_folder
from bubbletea.prefill.shard import TINY, Served
from bubbletea.serve.assemble import ServiceSettings, WorkersAt, assemble, calibrated, model_of
from bubbletea.serve.auth import ApiKeys
from bubbletea.serve.dedicated_workers import DedicatedWorkers
from bubbletea.serve.http import HttpServer
from bubbletea.serve.page import live_page
from bubbletea.serve.run import ListenSettings, Workers, run
from bubbletea.serve.worker_windows import WorkerWindows, alone, of_training, sensitivity

PIECE_NS = 10_000_000
"""Shortest piece on a paced device: the host cannot time shorter ones."""
PREDICTED = 4
"""Simulated iterations; the last one is the steady state."""


def start(args: argparse.Namespace) -> int:
    """Runs the service until it is drained."""
    if (args.plan is None) == (args.alone is None):
        raise AtlasError("serve: give either the PLAN of a run or --alone N for workers without training")
    if args.alone is not None and (args.ui or args.ui_at is not None):
        raise AtlasError("--ui shows a training run: give its PLAN, or leave out --ui")
    if args.handoff_anywhere and args.certs is None:
        raise AtlasError(
            "--handoff-anywhere: decode engines of other hosts need certificates. Give --certs and --dc too"
        )
    _require_device(args)
    _require_keys(args)
    served = Served.of_folder(args.model or TINY, args.dtype)
    settings = ServiceSettings(
        name=args.name or (args.model or TINY).resolve().name,
        served=served,
        split=args.stages,
        chunk=args.chunk,
        arena_bytes=args.arena_mib * MIB,
        store_bytes=args.store_mib * MIB,
        prefix_bytes=args.prefix_mib * MIB,
        decodes=not args.handoff_only,
        deadline_s=args.deadline,
        budget=args.slowdown,
        aims=Aims(args.goal, args.late, LATE_TOKENS),
        nixl_unencrypted=args.nixl_unencrypted,
    )
    keys = ApiKeys.read(args.keys) if args.keys else ApiKeys.open_to_all()
    token = _token(args)
    trains = args.plan is not None
    windows = _training(args, served) if trains else _alone(args, served)
    workers_at = WorkersAt(args.workers_host, args.workers_port, _security(args)) if trains else None
    parts = assemble(settings, windows, keys, token)
    where = ListenSettings(args.host, args.port, args.handoff_port, args.handoff_anywhere, args.drain, workers_at)

    def announce(address: str, token_file: str) -> AbstractContextManager[object]:
        place = ServicePlace(address, parts.token, args.certs is not None)
        return announced(service_folder(args.folder), args.dc, place)

    def on_start(server: HttpServer) -> None:
        if trains:
            parts.step_back()
        lanes = _counted([(lane.dc, len(lane.workers)) for lane in parts.lanes])
        print(
            f"{settings.name} at http://{args.host}:{server.port}/v1, hand-off at {parts.kv_server.address[0]}:"
            f"{parts.kv_server.address[1]}; {lanes}",
            flush=True,
        )
        parts.dispatcher.on_lanes = _Readiness(len(parts.lanes))
        if args.ui or args.ui_at is not None:
            print(f"the page is at {stack.enter_context(live_page(args, *_run_of(args), server.port))}", flush=True)
        if trains:
            print(f"workers join from `atlas train {args.plan} ... --filler bubbletea`", flush=True)

    workers = announce if trains else _dedicated(args, windows)
    with ExitStack() as stack:
        asyncio.run(run(parts, where, workers, on_start))
    return 0


class _Readiness:
    """Prints when requests can be answered, when all lanes are there, and when the last one is gone."""

    def __init__(self, num_all: int) -> None:
        self._num_all, self._num_last = num_all, 0

    def __call__(self, num_lanes: int) -> None:
        before, self._num_last = self._num_last, num_lanes
        if num_lanes == before:
            return
        if num_lanes == 0:
            print("no copy of the model is left: requests are refused until workers return", flush=True)
        elif before == 0 or num_lanes == self._num_all:
            print(f"ready: {num_lanes} of {self._num_all} copies of the model", flush=True)


def _counted(lanes: list[tuple[str, int]]) -> str:
    """Lanes of the same datacenter and size, in one part: `4 copies of the model in east, each on 1 worker`."""
    parts = [
        f"{'1 copy' if count == 1 else f'{count} copies'} of the model in {dc}, "
        f"{'each ' * (count > 1)}on {size} worker{'s' * (size > 1)}"
        for (dc, size), count in Counter(lanes).items()
    ]
    return "; ".join(parts)


def _require_device(args: argparse.Namespace) -> None:
    """Checked here, because a worker without its device would be restarted forever."""
    if args.plan is not None:
        args.device = (args.device or ("paced" if args.dc is None else "cuda")).partition(":")[0]
        if args.device not in ("paced", "cpu", "cuda"):
            raise AtlasError(f"--device {args.device}: must be that of the run: paced, cpu or cuda")
        return
    args.device = args.device or "cpu"
    if args.device == "paced":
        raise AtlasError("--device paced: only training workers can be paced. Use cpu or cuda:N")
    require_device(args.device)


def _require_keys(args: argparse.Namespace) -> None:
    if not is_loopback(args.host) and args.keys is None and not args.without_keys:
        raise AtlasError(
            f"--host {args.host}: everybody who can reach it could use the service. Give --keys FILE, or "
            "--without-keys if that is wanted"
        )


def _token(args: argparse.Namespace) -> str:
    """Of the decode engines; empty: a new one is made."""
    token = "" if args.token_file is None else secret_in(args.token_file, "--token-file")
    if args.token_file is not None and not token:
        raise AtlasError(f"--token-file {args.token_file}: it is empty. Write a token into it (docs/vllm.md)")
    return token


def _security(args: argparse.Namespace) -> Security | None:
    if args.certs is None:
        return None
    if args.dc is None:
        raise AtlasError("--certs: certificates belong to one datacenter. Give --dc NAME too")
    require_current(args.certs, args.dc)
    security = Security(Credentials.of_folder(args.certs, f"{args.dc}/{SERVICE}"), ())
    _ = security.server_context  # raises now if files are missing or do not match
    return security


def _alone(args: argparse.Namespace, served: Served) -> WorkerWindows:
    if args.alone < 1 or not 0 <= args.busy < 1:
        raise AtlasError(
            f"--alone {args.alone} --busy {args.busy}: give at least one worker, and a busy share from 0 to below 1"
        )
    windows = alone(args.alone, args.arena_mib * MIB, busy=args.busy)
    if args.device != "cpu":
        windows = dataclasses.replace(windows, layer=calibrated(served, args.chunk, args.device))
    return windows


def _dedicated(args: argparse.Namespace, windows: WorkerWindows) -> Workers:
    period_s = windows.pattern.period_ns / 1e9

    def workers(address: str, token_file: str) -> DedicatedWorkers:
        return DedicatedWorkers(
            [
                DedicatedWorker(address, token_file, w, "localhost", period_s, args.busy, args.device)
                for w in range(args.alone)
            ]
        )

    return workers


def _run_of(args: argparse.Namespace) -> tuple[Job, TrainOptions]:
    """The run whose workers join."""
    recipe = load_recipe(args.recipe)
    job, plan = load_job_or_plan(args.plan, [*recipe.job_overrides, *args.set])
    if job.groups:
        raise AtlasError(
            f"{args.plan}: it has {len(job.groups)} groups of pipelines that are placed differently, and bubbles can "
            "be predicted only for pipelines that are placed alike. Give a plan with one group"
        )
    return job, TrainOptions.of(plan, args.schedule or None, args.tcp, **recipe_options(recipe, model=""))


def _training(args: argparse.Namespace, served: Served) -> WorkerWindows:
    """The windows of a run that `atlas train` starts, as its plan predicts them; its workers correct them."""
    job, options = _run_of(args)
    _, program, costs = build_program(job, options)
    costs = costs.scaled(args.slower)
    predicted = simulate(repeated(program, PREDICTED), costs)
    windows = of_training(predicted, args.arena_mib * MIB, cells=job.cells, datacenter=args.dc)
    priced, pace = price_prefill(job.cluster.gpu(windows.pattern.worker_dc[0]), model_of(served)), None
    head_ns = priced.head_ns
    if args.device == "paced":
        pace = dataclasses.replace(priced.layer, floor_ns=max(priced.layer.floor_ns, PIECE_NS))
        head_ns = max(head_ns, PIECE_NS)
    return dataclasses.replace(
        windows,
        pace=pace,
        head_ns=head_ns,
        layer=priced.layer if args.device == "cuda" else None,
        sensitivity=sensitivity(program, costs),
        plan=program_id(to_text(program)),
        device=args.device,
    )
