"""Make certificates for the nodes of a run: a certificate and key per node, or one pair for all nodes of a datacenter
(as `atlas train --dc` needs). The first call also makes a small CA in the folder.

Everything that leaves a datacenter is encrypted, and a node may only use the names in its certificate. Give each node
its own pair and `ca.pem`; keep `ca.key` on a machine that is not a node.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from atlas.console import print_json, require_folder, whole
from atlas.wan.security.certs import CA_DAYS, DEFAULT_DAYS, expires, make_ca, make_node, require_names


def configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("nodes", nargs="+", metavar="DATACENTER[/WORKER]",
                        help="a node, or all nodes of a datacenter")  # fmt: skip
    add("--out", type=Path, default=Path("certs"), metavar="DIR", help="folder to write to")
    add("--days", type=whole(1, 36_500), default=DEFAULT_DAYS, metavar="N", help="days that a certificate is valid")
    add("--ca-days", type=whole(1, 36_500), default=CA_DAYS, metavar="N", help="days that a new CA is valid")
    add("--also", action="append", default=[], metavar="DATACENTER/WORKER",
                        help="another name that each of these nodes may use")  # fmt: skip
    add("--json", action="store_true", help="print the files as JSON")


def run(args: argparse.Namespace) -> int:
    require_names(args.nodes, args.also)  # before a CA is made
    require_folder(args.out, "--out")
    make_ca(args.out, days=args.ca_days)
    made = []
    for node in args.nodes:
        credentials = make_node(args.out, node, days=args.days, also=args.also)
        until = expires(credentials.cert_file).date().isoformat()
        made.append({"node": node, "certificate": str(credentials.cert_file), "key": str(credentials.key_file),
                     "valid_until": until})  # fmt: skip
    if args.json:
        print_json(made)
        return 0
    for one in made:
        print(f"{one['node']}: {one['certificate']}, {one['key']} (0600), valid until {one['valid_until']}")
    print(
        f"Copy each pair and {args.out / 'ca.pem'} to its node; "
        f"keep {args.out / 'ca.key'} on a machine that is not a node."
    )
    return 0
