"""The network between datacenters: emulate it, measure it, fit a model of it, check it, and make certificates for it.

    atlas wan emulate CLUSTER.yaml     emulate the cluster's paths on this machine, with their delays and caps
    atlas wan probe                    measure round trips, rates, and whether node pairs or trunks limit them
    atlas wan learn DIR --out F.path   learn how a path varies from recorded packets
    atlas wan certs DC/WORKER...       make a small CA and a certificate per node
    atlas wan check PLAN --dc NAME     check, in every datacenter, that all hosts can reach each other

`atlas wan ACTION --help` explains an action.
"""

from __future__ import annotations

import argparse
from importlib import import_module
from typing import Any

ACTIONS = {
    "emulate": "emulate a cluster's paths on this machine",
    "probe": "measure the paths between hosts",
    "learn": "learn how a path varies over time",
    "certs": "make certificates for nodes",
    "check": "check the network of a plan before training",
}


def configure(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION", help=", ".join(ACTIONS))
    for name, summary in ACTIONS.items():
        module = _module(name)
        module.configure(actions.add_parser(name, description=module.__doc__, help=summary))


def run(args: argparse.Namespace) -> int:
    return int(_module(args.action).run(args))


def _module(name: str) -> Any:
    return import_module(f"atlas.commands.wan_{name}")
