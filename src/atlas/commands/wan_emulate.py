"""Emulate a cluster's WAN on this machine.

proxy (default): paths on loopback, without privileges. Each --forward SRC:DST=HOST:PORT opens an address at which SRC
reaches the service that DST has at HOST:PORT; the addresses are printed as JSON lines.
namespace: real TCP between network namespaces, needs root. Each --at NODE="COMMAND" runs a command on a node;
$ATLAS_NODE is its name and $ATLAS_ADDRESS_<NODE> are the addresses of all nodes.

Ends when its commands end, after --for seconds, or when interrupted. Then it prints how late the emulator was, and
exits with 4 if it was so late that measurements are not valid.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import time
from dataclasses import asdict
from itertools import combinations
from pathlib import Path
from typing import Any

from atlas.console import number, remark, require_folder, whole
from atlas.cost.weather import emulated_cross, emulated_rivals, link_weather
from atlas.errors import AtlasError
from atlas.spec.job import Cluster, Route
from atlas.spec.load import load_cluster, load_job
from atlas.wan.emulator.lateness import EmulatorLateError
from atlas.wan.emulator.namespace_net import NamespaceNet
from atlas.wan.emulator.paths import MAX_NODES, PathSpec, Trunk, scaled
from atlas.wan.emulator.proxy_net import ProxyNet
from atlas.weather.packets import PacketLog

LATE = 4
"""Exit status if the emulator was late."""
FOREVER_S = 1e9
"""Without --for; also the largest value of --for."""
POLL_S = 0.05
"""How often it is checked whether commands have ended."""
MAX_PACKETS = 4_000_000
"""Packets that --record keeps."""


def configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("cluster", type=Path, metavar="CLUSTER.yaml", help="a cluster file, or a job")
    add("--grade", choices=("proxy", "namespace"), default="proxy", help="proxy on loopback, or real TCP")
    add("--nodes-per-dc", type=whole(1, 10**6), metavar="N", help="emulate at most N nodes of each datacenter")
    add("--scale", type=float, default=1.0, metavar="X", help="multiply rates and windows by X, for small hosts")
    add("--jitter-ms", type=float, default=0.0, metavar="MS", help="extra one-way delay, random from 0 to MS")
    add(
        "--forward",
        action="append",
        default=[],
        metavar="SRC:DST=HOST:PORT",
        help="proxy: reach a service through a path",
    )
    add("--at", action="append", default=[], metavar="NODE=COMMAND", help="namespace: run a command on a node")
    add(
        "--no-gso", action="store_true", help="namespace: send packets of 1500 bytes, as a real WAN does; to study loss"
    )
    add("--kernel", action="store_true", help="namespace: shape with the kernel's netem, if available")
    add(
        "--weather-seed",
        type=whole(0, 2**32 - 1),
        default=0,
        metavar="N",
        help="seed of the cross traffic of links that have a `model`",
    )
    add(
        "--record",
        type=Path,
        metavar="DIR",
        help="namespace: write the round trip or loss of every packet, for `atlas wan learn`",
    )
    add("--for", dest="seconds", type=number(0, FOREVER_S), metavar="S", help="end after S seconds")


def run(args: argparse.Namespace) -> int:
    cluster = cluster_of(args.cluster)
    namespace = args.grade == "namespace"
    if (args.forward and namespace) or (args.at and not namespace):
        flag, grade = ("--forward", "proxy") if namespace else ("--at", "namespace")
        raise AtlasError(f"{flag} needs --grade {grade}. Give that, or leave out {flag}")
    if args.record is not None:
        if not namespace:
            raise AtlasError(
                "--record needs --grade namespace: the proxy does not see packets. Give that, or leave out --record"
            )
        require_folder(args.record, "--record")
    real = cluster_paths(
        cluster,
        nodes_per_dc=args.nodes_per_dc,
        lan=namespace,
        jitter_s=args.jitter_ms / 1e3,
        weather_seed=args.weather_seed,
    )
    paths = scaled(real, args.scale)
    if not paths:
        raise AtlasError(f"{args.cluster}: no two datacenters have a path. Give wan.latency_ms, or links")
    net = NamespaceNet(paths, gso=not args.no_gso, kernel=args.kernel) if namespace else ProxyNet(paths)
    with net:
        with contextlib.suppress(KeyboardInterrupt):
            if isinstance(net, NamespaceNet):
                if args.record is not None:
                    net.record_packets(MAX_PACKETS)
                _on_nodes(net, args.at, args.seconds)
            else:
                _through_proxy(net, args.forward, args.seconds)
        if isinstance(net, NamespaceNet) and args.record is not None:
            _write_packets(args.record, net)
        late = net.lateness
        remark(late)
        try:
            if late.num_pieces:
                late.certify()
        except EmulatorLateError as error:
            remark(f"measurements of this run are not valid: {error}")
            return LATE
    return 0


def cluster_of(path: Path) -> Cluster:
    """Reads a cluster file, or the cluster of a job."""
    try:
        return load_cluster(path)
    except AtlasError as error:
        try:
            return load_job(path).cluster
        except AtlasError:
            raise error from None


def cluster_paths(
    cluster: Cluster,
    *,
    nodes_per_dc: int | None = None,
    lan: bool = False,
    jitter_s: float = 0.0,
    weather_seed: int = 0,
) -> dict[tuple[str, str], PathSpec]:
    """The paths of a cluster file. Nodes are named after their datacenter: `east-0`, `east-1`.

    With `lan`, nodes of one datacenter have paths too, with their latency and no cap.
    """
    nodes = {dc.name: [f"{dc.name}-{i}" for i in range(min(dc.nodes, nodes_per_dc or dc.nodes))]
             for dc in cluster.datacenters}  # fmt: skip
    if (total := sum(map(len, nodes.values()))) > MAX_NODES:
        raise AtlasError(f"the cluster has {total} nodes: at most {MAX_NODES} are emulated. Lower --nodes-per-dc")
    paths: dict[tuple[str, str], PathSpec] = {}
    for a, b in combinations(nodes, 2):
        if (route := cluster.route(a, b)) is None:
            continue
        path = PathSpec(
            latency_s=route.latency_ms / 1e3,
            window_bytes=route.window_bytes,
            pair_bps=route.pair_gbps * 1e9,
            trunk=Trunk(f"{a}~{b}", route.trunk_gbps * 1e9) if route.trunk_gbps is not None else None,
            jitter_s=jitter_s,
            **_weather(route, a, b, weather_seed, queued=lan),
        )
        paths |= {(x, y): path for x in nodes[a] for y in nodes[b]}
    for dc in cluster.datacenters if lan else ():
        near = PathSpec(latency_s=dc.net_latency_us / 1e6, window_bytes=None)
        paths |= dict.fromkeys(combinations(nodes[dc.name], 2), near)
    return paths


def _weather(route: Route, a: str, b: str, seed: int, *, queued: bool) -> dict[str, Any]:
    """Of both directions: an hour of drawn cross traffic, as shares of the capacity. In an emulator with a queue,
    competing flows instead where the model has some."""
    found: dict[str, Any] = {}
    for src, dst, back in ((a, b, ""), (b, a, "_back")):
        if (weather := link_weather(route, src, dst)) is None:
            continue
        if queued and (rivals := emulated_rivals(weather)):
            found["rivals" + back] = rivals
        else:
            found["cross" + back] = emulated_cross(weather, seed)
    return found


def _write_packets(folder: Path, net: NamespaceNet) -> None:
    shift_ns = time.time_ns() - time.monotonic_ns()
    for (src, dst), table in net.packets().items():
        if len(table.sent_ns):
            log = PacketLog(folder, f"{src}~{dst}")
            for row in zip(table.sent_ns.tolist(), table.num_bytes.tolist(), table.rtt_ns.tolist(), strict=True):
                log.add(row[0] + shift_ns, *row[1:])
            log.close()


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
            weather = {"cross": len(path.cross), "cross_back": len(path.cross_back)}
            print(json.dumps({"from": a, "to": b, **asdict(path), **weather}), flush=True)
        return
    time.sleep(seconds if seconds is not None else FOREVER_S)


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
    deadline = time.monotonic() + (seconds if seconds is not None else FOREVER_S)
    while running and time.monotonic() < deadline and any(process.poll() is None for process in running):
        time.sleep(POLL_S)
