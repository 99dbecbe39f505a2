"""Serve a model in the bubbles of a training run: an OpenAI-compatible service that the run's workers join.

Training is a command of its own: `atlas train PLAN --emulate --filler bubbletea`, or `--dc NAME` in each datacenter,
with one service in each (`bubbletea serve PLAN --dc NAME`). Service and training can start, stop and restart in any
order. Without PLAN there is no training: `--alone N` workers only prefill. Without --model a tiny shipped model is
served. A hand-off sends the keys and values (KV) of a prompt to a decode engine, such as vLLM. Ctrl-C drains the
service: admitted requests are finished, new ones refused; a second Ctrl-C stops it at once.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from atlas.console import job_flags, whole
from bubbletea.constants import SLOWDOWN_BUDGET
from bubbletea.flags import aim_flags

PORT, MEBIBYTES = whole(0, 65_535), whole(1, 10_000_000)


def configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("plan", nargs="?", type=Path, metavar="PLAN.yaml", help="the plan or job that is trained")
    run_flags(parser)
    add("--alone", type=int, metavar="N", help="no training: start N workers that only prefill")
    add(
        "--busy",
        type=float,
        default=0.0,
        metavar="X",
        help="with --alone: share of time that workers are busy, as if they trained",
    )
    add(
        "--device",
        metavar="NAME",
        help="device of the workers, as in training (default: paced; with --dc: cuda); with --alone: cpu or cuda:N",
    )
    add("--model", type=Path, metavar="DIR", help="a Hugging Face folder (default: a tiny shipped model)")
    add("--name", metavar="NAME", help="model name in the API (default: the folder's name)")
    add("--dtype", choices=("float32", "bfloat16", "float16"), default="float32", help="weight type")
    add("--stages", type=whole(1, 64), metavar="N", help="workers per copy of the model (default: the fewest)")
    add(
        "--chunk",
        type=whole(16, 65_536),
        default=512,
        metavar="N",
        help="tokens of a prompt that a worker prefills at once, at most",
    )
    add("--arena-mib", type=MEBIBYTES, default=256, metavar="N", help="MiB per worker for prefill")
    add("--store-mib", type=MEBIBYTES, default=1024, metavar="N", help="host memory for KV, in MiB")
    add("--prefix-mib", type=whole(0, 10_000_000), default=256, metavar="N", help="size of the prefix cache in MiB")
    add(
        "--slowdown",
        type=float,
        default=SLOWDOWN_BUDGET,
        metavar="X",
        help="largest slowdown of training by prefill, as a share",
    )
    add("--deadline", type=float, default=30.0, metavar="S", help="deadline of requests that give none, in seconds")
    aim_flags(parser)
    port_flags(parser)
    page_flags(parser)


def port_flags(parser: argparse.ArgumentParser) -> None:
    """Where it listens, who may call, and how it ends."""
    add = parser.add_argument
    add("--host", default="127.0.0.1", help="address to listen on")
    add("--port", type=PORT, default=8000, help="port to listen on")
    add("--handoff-port", type=PORT, default=0, metavar="PORT", help="port for decode engines (default: any)")
    add("--handoff-only", action="store_true", help="no embedded decoder: every request is a hand-off")
    add("--handoff-anywhere", action="store_true", help="accept decode engines from other hosts")
    add(
        "--nixl-unencrypted",
        action="store_true",
        help="decode engines of other hosts may read by NIXL, which does not encrypt: in private networks only",
    )
    add("--token-file", type=Path, metavar="FILE", help="token of the decode engines (default: a new one)")
    add("--keys", type=Path, metavar="FILE", help="API keys by tenant (default: no key needed)")
    add("--without-keys", action="store_true", help="allow a --host other than loopback without --keys")
    add("--drain", type=float, default=30.0, metavar="S", help="seconds to finish admitted requests at the end")


def page_flags(parser: argparse.ArgumentParser) -> None:
    """Of the live page (docs/page.md)."""
    add = parser.add_argument
    add("--ui", action="store_true", help="serve the live page of the run, with this service's figures")
    add(
        "--ui-at", metavar="[HOST:]PORT", help="where --ui serves (default: any port of 127.0.0.1; others need a token)"
    )
    add("--runs", type=Path, metavar="DIR", help="the run's folder (default runs/NAME)")


def run_flags(parser: argparse.ArgumentParser) -> None:
    """Of the run whose workers join: as `atlas train` has them."""
    add = parser.add_argument
    add("--dc", metavar="NAME", help="use the workers of this datacenter (default: of all)")
    add(
        "--folder",
        type=Path,
        metavar="DIR",
        help="folder where workers find this service: their --filler-folder (default: one of this user on this host)",
    )
    add("--workers-host", default="127.0.0.1", metavar="ADDRESS", help="address to listen on for workers")
    add("--workers-port", type=PORT, default=0, metavar="PORT", help="port for workers (default: any)")
    add("--certs", type=Path, metavar="DIR", help="the run's certificates, for workers on other hosts")
    add("--recipe", type=Path, metavar="FILE", help="the run's recipe, if it has one")
    add("--schedule", default="", metavar="NAME", help="schedule of a job (default 1f1b)")
    add("--tcp", choices=("one", "many"), help="TCP connections between two nodes (default many)")
    add("--slower", type=whole(1, 1000), default=1, metavar="X", help="the same value as --slower of the emulated run")
    job_flags(parser)


def run(args: argparse.Namespace) -> int:
    from bubbletea.serve.start import start  # torch: 1.9 s

    return start(args)
