"""Check the network of a plan before training: run it in every datacenter, with the flags that `atlas train` will get.
Every host listens on the ports of its workers and dials those of the others; all print the same report: who reaches
whom on which port, certificates, MTU, clocks and rates.

    atlas wan check plan.yaml --dc west --rendezvous 203.0.113.10:7700 --listen 0.0.0.0 --advertise 198.51.100.7 \\
        --ports 7710-7719 --certs certs

With `atlas coordinator`, run it on the coordinator's host too (`--dc coordinator`), and give `--coordinator HOST:PORT`
in place of `--rendezvous` everywhere. Exit code 0: no faults; 2: faults, each with what to change. Starts no worker.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from atlas.commands.network_flags import network_flags, network_of, rendezvous_of, security_flags
from atlas.commands.train_dc import agent_name
from atlas.console import job_flags, number, print_json, remark
from atlas.launch.check_report import matrix
from atlas.launch.network_check import CheckSettings, check_network
from atlas.launch.site_network import rendezvous_to_bind
from atlas.spec.plan import load_job_or_plan
from atlas.spec.recipe import load_recipe


def configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("plan", type=Path, metavar="PLAN.yaml", help="a plan, or a job")
    add("--dc", required=True, metavar="NAME", help="name of this datacenter")
    add("--recipe", type=Path, metavar="FILE", help="recipe whose `network:` is used (docs/recipes.md)")
    add("--coordinator", metavar="HOST:PORT", help="the address that `atlas coordinator` will have")
    network_flags(parser)
    security_flags(parser)
    add("--gather", type=number(0.1, 1e7), default=60.0, metavar="S", help="wait S seconds for the other hosts")
    add("--json", action="store_true", help="print the report as JSON")
    job_flags(parser)


def run(args: argparse.Namespace) -> int:
    recipe = load_recipe(args.recipe)
    job, _ = load_job_or_plan(args.plan, [*recipe.job_overrides, *args.set])
    name, _ = agent_name(args.dc, args.node, os.environ)
    network = network_of(args, recipe.network)
    rendezvous = rendezvous_of(args)
    settings = CheckSettings(
        name,
        network,
        rendezvous,
        rendezvous_to_bind(rendezvous, network),
        certificates=args.certs,
        trusted_networks=tuple(args.trusted) or recipe.network.trusted,
        gather_s=args.gather,
        apart=args.coordinator is not None,
    )
    report = check_network(job, settings, remark)
    if args.json:
        print_json(report)
    else:
        _print(report)
    return 2 if report["faults"] else 0


def _print(report: dict[str, Any]) -> None:
    lines = matrix(report)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
    for site in report["sites"]:
        for file, one in site["certificates"].items():
            what = f"is for {', '.join(one['names'])}, until" if one["names"] else "is valid until"
            print(f"{site['host']}: {file} {what} {one['until'][:10]}")
        if site["clock_s"]:
            print(f"{site['host']}: its clock differs by {site['clock_s']:+.3f} s from the first datacenter's")
    for warning in report["warnings"]:
        print(f"warning: {warning}")
    for fault in report["faults"]:
        print(f"FAULT: {fault}")
    print(f"{len(report['faults'])} fault(s)" if report["faults"] else "no faults: `atlas train` can start")
