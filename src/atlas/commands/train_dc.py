"""The flags of `atlas train --dc` (`launch.multi_dc`): this datacenter's part of a run over several.

Under torchrun (`torchrun --nproc-per-node=8 -m atlas train PLAN --dc NAME`) every process takes the worker of its rank
and the GPU of its local rank; without it, one launcher starts all workers of the host.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

from atlas.commands.watching import recorded, watched, write_evidence
from atlas.console import number, say, whole
from atlas.errors import AtlasError, SpecError
from atlas.evidence.recorder import EvidenceRecorder
from atlas.launch.rendezvous import AgentName
from atlas.launch.report import RunReport
from atlas.launch.train_options import OWN, TrainOptions
from atlas.spec import Job
from atlas.spec.recipe import Recipe

PORT = 7700


def dc_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("over several datacenters (docs/operating.md): run it in each of them")
    group.add_argument("--dc", metavar="NAME", help="name of this datacenter")
    group.add_argument(
        "--rendezvous",
        metavar="HOST:PORT",
        help=f"an address of the plan's first datacenter, which all others connect to (default: 127.0.0.1:{PORT})",
    )
    group.add_argument(
        "--coordinator",
        metavar="HOST:PORT",
        help="the address of `atlas coordinator`; without it, the first launcher of the plan coordinates",
    )
    group.add_argument(
        "--listen",
        default="127.0.0.1",
        metavar="ADDRESS",
        help="this host's address, as the other datacenters reach it (default: 127.0.0.1 only)",
    )
    group.add_argument("--node", metavar="I/N", help="this host, of several in the datacenter, from 0 (default: 0/1)")
    group_flags(group)


def group_flags(group: argparse._ActionsContainer) -> None:
    """What `atlas coordinator` has too."""
    group.add_argument("--certs", type=Path, metavar="DIR", help="certificates, as `atlas wan certs` made them")
    group.add_argument(
        "--trusted",
        action="append",
        default=[],
        metavar="NETWORK",
        help="network in which bytes may travel unencrypted (repeatable)",
    )
    group.add_argument("--auto-replan", action="store_true", help="continue without a lost datacenter, without asking")
    group.add_argument(
        "--without", action="append", default=[], metavar="NAME", help="a datacenter that is lost (repeatable)"
    )
    group.add_argument(
        "--grace",
        type=number(0.1, 1e6),
        metavar="S",
        help="treat a launcher as lost after S seconds out of reach (30)",
    )
    group.add_argument(
        "--gather",
        type=number(0.1, 1e6),
        metavar="S",
        help="wait S seconds for all launchers at the start: hours, for queued jobs (600)",
    )
    group.add_argument(
        "--patience",
        type=number(0.1, 1e6),
        metavar="S",
        help="report a stalled worker after S seconds (60)",
    )
    group.add_argument(
        "--max-restarts",
        type=whole(0, 1000),
        default=5,
        metavar="N",
        help="restarts in a row without a new step (default 5)",
    )


def run_dc(
    args: argparse.Namespace,
    job: Job,
    options: TrainOptions,
    recipe: Recipe,
    evidence: EvidenceRecorder | None = None,
) -> int:
    # torch: 1.9 s
    from atlas.launch.agent import AgentSettings
    from atlas.launch.coordinator import RunCallbacks
    from atlas.launch.multi_dc import is_coordinator, train_here

    name, local_rank = agent_name(args.dc, args.node, os.environ)
    _require_own(args.listen)
    if args.coordinator is not None and args.rendezvous is not None:
        raise AtlasError(
            "--coordinator and --rendezvous: give the first where `atlas coordinator` runs, the second otherwise"
        )
    flag = "--rendezvous" if args.coordinator is None else "--coordinator"
    settings = AgentSettings(
        name,
        address_of(flag, args.coordinator or args.rendezvous or f"127.0.0.1:{PORT}"),
        apart=args.coordinator is not None,
        host=args.listen,
        certificates=args.certs,
        trusted_networks=recipe.network.trusted,
        checkpoints=options.checkpoints,
        data=options.data,
        weights=options.model if options.model != OWN else "",
        device=options.device,
        local_rank=local_rank,
        auto_replan=args.auto_replan,
        without=tuple(args.without),
    )
    choice = watched(args, recipe.logging, {"job": job.name, "schedule": options.schedule})

    def say_line(line: str) -> None:
        say(f"atlas: {line}")

    signal.signal(signal.SIGTERM, interrupt)  # a scheduler sends it before it takes the hosts away
    with ExitStack() as stack:
        callbacks = RunCallbacks(say_line)
        if is_coordinator(job, options, settings):
            report = stack.enter_context(RunReport(choice, options.steps))
            callbacks = RunCallbacks(say_line, recorded(report, evidence))
            stack.callback(write_evidence, evidence)
        return train_here(job, options, settings, callbacks)


def interrupt(number: int, stack: object) -> None:
    raise KeyboardInterrupt


def agent_name(datacenter: str, node: str | None, environment: Mapping[str, str]) -> tuple[AgentName, int | None]:
    """Which launcher of its datacenter this is, and its first GPU under torchrun."""
    if "TORCHELASTIC_RUN_ID" in environment:
        rank, size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
        return AgentName(datacenter, rank, size), int(environment["LOCAL_RANK"])
    if node is None:
        return AgentName(datacenter), None
    part, _, count = node.partition("/")
    if not (part.isdecimal() and count.isdecimal() and int(part) < int(count)):
        raise SpecError(where="--node", key="I/N", value=node, rule="must count from 0", remedy="Write 0/2, or 1/2")
    return AgentName(datacenter, int(part), int(count)), None


def _require_own(host: str) -> None:
    """Raise if this host cannot listen at the address."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as sock:
            sock.bind(address)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or "no address"
        raise AtlasError(
            f"--listen {host}: not an address of this host ({reason}). Give one that `ip addr` shows"
        ) from None


def address_of(flag: str, text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise AtlasError(f"{flag} {text}: must be HOST:PORT, such as 10.0.0.1:{PORT}")
    return host.strip("[]"), int(port)
