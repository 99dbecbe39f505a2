"""Rehearse a cluster's WAN on this machine.

proxy (default): paths on loopback, for anybody. Each --forward SRC:DST=HOST:PORT opens an address at which SRC reaches
the service that DST has at HOST:PORT; they are printed as JSON lines.
namespace: real TCP between network namespaces, for root. Each --at NODE="COMMAND" runs a command on a node; $ATLAS_NODE
is its name and $ATLAS_ADDRESS_<NODE> are all addresses.

Ends with its commands, after --for seconds, or when interrupted; then it says how exact it was, and exits with 4 if it
was too late for the run to count.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import sys
import time
from pathlib import Path

from atlas.console import number, whole
from atlas.errors import AtlasError
from atlas.spec.cluster import Cluster
from atlas.spec.load import load_cluster, load_job
from atlas.wan.emulator.lateness import EmulatorLateError
from atlas.wan.emulator.namespace_net import NamespaceNet
from atlas.wan.emulator.paths import cluster_paths, scaled
from atlas.wan.emulator.proxy_net import ProxyNet

LATE = 4


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("cluster", type=Path, metavar="CLUSTER.yaml", help="a cluster file, or a job")
    parser.add_argument("--grade", choices=("proxy", "namespace"), default="proxy", help="how real (default proxy)")
    parser.add_argument(
        "--nodes-per-dc", type=whole(1, 10**6), metavar="N", help="emulate only so many nodes of each datacenter"
    )
    parser.add_argument(
        "--scale", type=float, default=1.0, metavar="X", help="rates and windows times X, for small hosts"
    )
    parser.add_argument("--jitter-ms", type=float, default=0.0, metavar="MS", help="extra one-way delay, 0 to this")
    parser.add_argument(
        "--forward",
        action="append",
        default=[],
        metavar="SRC:DST=HOST:PORT",
        help="proxy: reach a service through a path",
    )
    parser.add_argument("--at", action="append", default=[], metavar="NODE=COMMAND", help="namespace: run it on a node")
    parser.add_argument("--no-gso", action="store_true", help="namespace: packets of 1500 bytes, for studies of loss")
    parser.add_argument("--kernel", action="store_true", help="namespace: let the kernel's netem shape, where it is")
    parser.add_argument("--for", dest="seconds", type=number(0, 1e9), metavar="S", help="end after so many seconds")


def run(args: argparse.Namespace) -> int:
    cluster = _cluster(args.cluster)
    namespace = args.grade == "namespace"
    if (args.forward and namespace) or (args.at and not namespace):
        raise AtlasError("--forward is for --grade proxy, --at for --grade namespace")
    real = cluster_paths(cluster, nodes_per_dc=args.nodes_per_dc, lan=namespace, jitter_s=args.jitter_ms / 1e3)
    paths = scaled(real, args.scale)
    if not paths:
        raise AtlasError(f"{args.cluster}: no two datacenters have a path. Give wan.latency_ms, or links")
    net = NamespaceNet(paths, gso=not args.no_gso, kernel=args.kernel) if namespace else ProxyNet(paths)
    with net:
        with contextlib.suppress(KeyboardInterrupt):
            if isinstance(net, NamespaceNet):
                _on_nodes(net, args.at, args.seconds)
            else:
                _through_proxy(net, args.forward, args.seconds)
        late = net.lateness
        print(f"atlas: {late}", file=sys.stderr)
        try:
            if late.num_pieces:
                late.certify()
        except EmulatorLateError as error:
            print(f"atlas: this run does not count: {error}", file=sys.stderr)
            return LATE
    return 0


def _cluster(path: Path) -> Cluster:
    """A job's file has a model, a cluster's has not."""
    try:
        return load_cluster(path)
    except AtlasError as error:
        try:
            return load_job(path).cluster
        except AtlasError:
            raise error from None


def _through_proxy(net: ProxyNet, forwards: list[str], seconds: float | None) -> None:
    for text in forwards:
        match = re.fullmatch(r"([\w-]+):([\w-]+)=(.+):(\d{1,5})", text)
        if match is None:
            raise AtlasError(f"--forward {text!r}: write SRC:DST=HOST:PORT, like east-0:west-0=127.0.0.1:9000")
        src, dst, host, port = match.groups()
        address = net.listen(src, dst, (host, int(port)))
        print(json.dumps({"from": src, "to": dst, "address": list(address)}), flush=True)
    if not forwards:
        for (a, b), path in net.paths.items():
            print(json.dumps({"from": a, "to": b, **path.as_json()}), flush=True)
        return
    time.sleep(seconds if seconds is not None else 10**9)


def _on_nodes(net: NamespaceNet, commands: list[str], seconds: float | None) -> None:
    addresses = {f"ATLAS_ADDRESS_{name.replace('-', '_').upper()}": net.address(name) for name in net.nodes}
    for name in net.nodes:
        print(json.dumps({"node": name, "address": net.address(name)}), flush=True)
    running = []
    for text in commands:
        name, equals, command = text.partition("=")
        if not equals:
            raise AtlasError(f"--at {text!r}: write NODE=COMMAND, like east-0='iperf3 -s'")
        environment = {**os.environ, **addresses, "ATLAS_NODE": name}
        running.append(net.node(name).popen(["/bin/sh", "-c", command], env=environment))
    deadline = time.monotonic() + (seconds if seconds is not None else 10**9)
    while running and time.monotonic() < deadline and any(process.poll() is None for process in running):
        time.sleep(0.05)
