"""The flags of `atlas train --dc` (`launch.multi_dc`): this datacenter's part of a run over several.

Under torchrun (`torchrun --nproc-per-node=8 -m atlas train PLAN --dc NAME`) every process takes the worker of its rank
and the GPU of its local rank; without it, one launcher starts all workers of the host.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from contextlib import ExitStack

from atlas.commands.network_flags import network_flags, network_of, rendezvous_of, security_flags
from atlas.commands.watching import (
    end_traces,
    live_page,
    noted,
    recorded,
    reports_elsewhere,
    run_folder,
    watched,
    write_evidence,
)
from atlas.console import (
    ranged,
    remark,
    require_folder,
    whole,
)
from atlas.errors import AtlasError, SpecError
from atlas.evidence.recorder import EvidenceRecorder
from atlas.launch.coordinator import RunCallbacks
from atlas.launch.hosts import scheduled_place
from atlas.launch.rendezvous import SPARE, AgentName
from atlas.launch.report import RunReport
from atlas.launch.run_record import RunRecord
from atlas.launch.site_rails import EMULATED, require_switch
from atlas.launch.train_options import OWN, TrainOptions
from atlas.spec import Job
from atlas.spec.recipe import Recipe


def dc_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("across datacenters (docs/operating.md); run the command in each of them")
    add = group.add_argument
    add("--dc", metavar="NAME", help="name of this datacenter")
    add(
        "--coordinator",
        metavar="HOST:PORT",
        help="the address of `atlas coordinator`; without it, the first launcher of the plan coordinates",
    )
    network_flags(group)
    add("--spare", action="store_true", help="wait until a host of this datacenter is lost; replace it")
    add(
        "--switch",
        metavar="URL",
        help="RESTCONF root of this datacenter's optical switch, such as http://HOST/restconf (default: emulated)",
    )
    group_flags(group)


def group_flags(group: argparse._ActionsContainer) -> None:
    """What `atlas coordinator` has too."""
    add = group.add_argument
    security_flags(group)
    add("--auto-replan", action="store_true", help="if a datacenter is lost, continue without it and do not ask")
    add("--without", action="append", default=[], metavar="NAME", help="run without this lost datacenter")
    add(
        "--grace",
        type=ranged("grace_s"),
        metavar="S",
        help="treat an unreachable launcher as lost after S seconds (default 30)",
    )
    add(
        "--gather",
        type=ranged("gather_s"),
        metavar="S",
        help="wait S seconds for all launchers at the start; set hours if a scheduler queues jobs (default 600)",
    )
    add(
        "--patience",
        type=ranged("patience_s"),
        metavar="S",
        help="treat a stalled worker as failed after S seconds (default 60)",
    )
    add(
        "--max-restarts",
        type=whole(0, 1000),
        default=5,
        metavar="N",
        help="stop after N restarts in a row without a new step",
    )


def run_dc(
    args: argparse.Namespace,
    job: Job,
    options: TrainOptions,
    recipe: Recipe,
    evidence: EvidenceRecorder | None = None,
) -> int:
    from atlas.launch.agent import AgentSettings  # torch: 1.9 s
    from atlas.launch.multi_dc import is_coordinator, train_here  # torch

    name, local_rank = _place(args, job)
    if args.coordinator is not None and args.rendezvous is not None:
        raise AtlasError(
            "--coordinator and --rendezvous: give --coordinator if `atlas coordinator` runs, otherwise --rendezvous"
        )
    launchers_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if local_rank is not None else 1
    logs = run_folder(recipe.logging, job)
    require_folder(logs, "--runs")
    settings = AgentSettings(
        name,
        rendezvous_of(args),
        apart=args.coordinator is not None,
        network=network_of(args, recipe.network, share=(local_rank or 0, launchers_here)),
        certificates=args.certs,
        trusted_networks=recipe.network.trusted,
        checkpoints=options.checkpoints,
        data=options.data,
        weights=options.model if options.model != OWN else "",
        logs=logs,
        device=options.device,
        local_rank=local_rank,
        launchers_here=launchers_here,
        auto_replan=args.auto_replan,
        without=tuple(args.without),
        filler=options.filler,
        switch=args.switch or EMULATED,
    )
    require_switch(args.switch, job, args.dc)
    choice = watched(args, recipe.logging, job, options)

    with ExitStack() as stack:
        callbacks = RunCallbacks(remark)
        stack.callback(end_traces, args)
        if is_coordinator(job, options, settings):
            stack.enter_context(live_page(args, recipe.logging, job, options))
            report = stack.enter_context(RunReport(choice, options.steps))
            record = RunRecord(logs, {"run": job.name, "steps": options.steps})
            callbacks = RunCallbacks(noted(report), recorded(report, evidence, options), record=record)
            stack.callback(write_evidence, evidence)
        elif elsewhere := reports_elsewhere(args):
            remark(elsewhere)
        return train_here(job, options, settings, callbacks)


def _place(args: argparse.Namespace, job: Job) -> tuple[AgentName, int | None]:
    """As `agent_name`; without --node and torchrun, as a scheduler counts. Hosts beyond the plan's are spares."""
    found = None
    if args.node is None and not args.spare and "TORCHELASTIC_RUN_ID" not in os.environ:
        found = scheduled_place(job, args.dc, os.environ)
    if found is None:
        return agent_name(args.dc, args.node, os.environ, spare=args.spare)
    part, count = found
    return (AgentName(args.dc, part, count) if part < count else AgentName(args.dc, SPARE)), None


def agent_name(
    datacenter: str, node: str | None, environment: Mapping[str, str], *, spare: bool = False
) -> tuple[AgentName, int | None]:
    """Which launcher of its datacenter this is, and its first GPU under torchrun."""
    if spare and node is not None:
        raise AtlasError(f"--spare and --node {node}: a spare has no number until it replaces a host. Leave out --node")
    if spare:
        return AgentName(datacenter, SPARE), None
    if "TORCHELASTIC_RUN_ID" in environment:
        rank, size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
        return AgentName(datacenter, rank, size), int(environment["LOCAL_RANK"])
    if node is None:
        return AgentName(datacenter), None
    part, _, count = node.partition("/")
    if not (part.isdecimal() and count.isdecimal() and int(part) < int(count)):
        raise SpecError(
            where="--node",
            key="I/N",
            value=node,
            rule="must be two whole numbers, I below N",
            remedy="Write 0/2, or 1/2",
        )
    return AgentName(datacenter, int(part), int(count)), None
