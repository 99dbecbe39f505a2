"""Measure the paths between datacenters: round trips, the goodput of 1 to K streams, and whether the node pair or the
trunk limits it.

On every host:   atlas wan probe --listen 10.0.0.5:7077 --token-file secret
On one of them:  atlas wan probe --token-file secret --node east-0=10.0.0.5:7077 --node west-0=10.9.0.5:7077 ...

Nodes are named after their datacenter and a number. Two nodes on each side are needed to see a trunk cap.
The token is a shared secret of at least 16 characters, from a file or $ATLAS_PROBE_TOKEN.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from atlas.commands.network_flags import address_of
from atlas.commands.wan_emulate import cluster_of
from atlas.console import number, print_json, remark, require_folder, require_outputs, secret_in, whole
from atlas.errors import AtlasError
from atlas.ir.replace import write_whole
from atlas.spec.job import Cluster
from atlas.spec.trace import TraceRow
from atlas.wan.probe.agent import ProbeAgent
from atlas.wan.probe.links import LinkFigures, drift, links_yaml, write_links
from atlas.wan.probe.recorded_path import Observation, trace_rows, write_csv
from atlas.wan.probe.survey import LinkMeasurement, Survey, survey
from atlas.wan.probe.wire import require_token
from atlas.weather.packets import LOST, PacketLog


def configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--listen", metavar="HOST:PORT", help="run an agent at this address, until interrupted")
    add("--token-file", type=Path, metavar="FILE", help="the shared secret (or $ATLAS_PROBE_TOKEN)")
    add("--node", action="append", default=[], metavar="NAME=HOST:PORT", help="name and address of an agent")
    add("--write", type=Path, metavar="CLUSTER.yaml", help="replace the links section of this file")
    add("--out", type=Path, metavar="FILE", help="write the links section to a new file")
    add("--check", type=Path, metavar="FILE", help="warn where this job or cluster file differs from the measurement")
    add("--json", action="store_true", help="print all measurements as JSON")
    add("--max-streams", type=whole(1, 1024), default=32, metavar="K", help="maximum number of connections")
    add(
        "--max-mb",
        type=number(0.001, 1e6),
        default=1000.0,
        metavar="MB",
        help="maximum size of a transfer, in megabytes",
    )
    add("--repeat", type=whole(1, 10**6), default=1, metavar="N", help="probe N times, for --record")
    add("--every", type=number(0, 1e6), default=60.0, metavar="S", help="seconds from one probe to the next")
    add(
        "--record",
        type=Path,
        metavar="DIR",
        help="for each link, write three files: its probes, rows for its `trace:` key, packets for `atlas wan learn`",
    )
    add(
        "--record-seconds",
        type=number(0, 30),
        default=10.0,
        metavar="S",
        help="seconds for which each probe fills a path to record packets (default 10; 0: none)",
    )


def run(args: argparse.Namespace) -> int:
    if args.listen is None and not args.node:
        raise AtlasError("nothing to do: give --listen HOST:PORT to run an agent, or --node NAME=HOST:PORT to measure")
    file = args.token_file
    token = require_token(secret_in(file, "--token-file") if file else os.environ.get("ATLAS_PROBE_TOKEN", ""))
    if args.listen is not None:
        host, port = address_of("--listen", args.listen)
        with ProbeAgent(host, port, token) as agent:
            print(json.dumps({"listening": list(agent.address)}), flush=True)
            agent.wait()
        return 0
    _require_files(args)
    agents = dict(_node(text) for text in args.node)
    how = Survey(agents, token, max_streams=args.max_streams, max_bytes=round(args.max_mb * 1e6))
    rounds = _rounds(how, args)
    found = rounds[-1]
    if args.json:
        print_json([asdict(m) | {"cap": m.cap, "streams": m.streams} for m in found])
    else:
        sys.stdout.write(links_yaml(found))
    if args.out is not None:
        write_whole(args.out, links_yaml(found).encode())
    if args.write is not None:
        write_links(args.write, found)
    if args.record is not None:
        _record(args.record, rounds)
    return _warn(args.check, found) if args.check is not None else 0


def _require_files(args: argparse.Namespace) -> None:
    """Checks before the measurement that all files can be written, and that no output replaces an input."""
    inputs = [path for path in (args.token_file, args.check, args.write) if path is not None]
    require_outputs({"--out": args.out}, inputs)
    require_outputs({"--write": args.write})
    if args.record is not None:
        require_folder(args.record, "--record")


def check(cluster: Cluster, found: list[LinkMeasurement]) -> list[str]:
    """Warnings where a cluster file differs from what was measured."""
    assumed = {}
    for m in found:
        if (route := cluster.route(*m.between)) is not None:
            figures = LinkFigures(route.latency_ms, route.pair_gbps, route.window_bytes, route.trunk_gbps)
            assumed[frozenset(m.between)] = figures
    return drift(assumed, found)


def _warn(path: Path, found: list[LinkMeasurement]) -> int:
    warnings = check(cluster_of(path), found)
    remark(*(f"{path}: {warning}" for warning in warnings))
    return 3 if warnings else 0


def _rounds(how: Survey, args: argparse.Namespace) -> list[list[LinkMeasurement]]:
    rounds: list[list[LinkMeasurement]] = []
    logs: dict[tuple[str, str], PacketLog] = {}
    begun = time.monotonic()
    for i in range(args.repeat):
        time.sleep(max(0.0, begun + i * args.every - time.monotonic()))
        rounds.append(survey(how))
        if args.record is not None and args.record_seconds:
            for link in rounds[-1]:
                if link.between not in logs:
                    logs[link.between] = PacketLog(args.record, "-".join(link.between))
                record_packets(logs[link.between], how.packets(link, args.record_seconds))
    for log in logs.values():
        log.close()
    return rounds


def record_packets(log: PacketLog, found: dict[str, Any]) -> None:
    start_ns, block_bytes = int(found["start_ns"]), int(found["block_bytes"])
    for at_ns, rtt_ns in found["rows"]:
        log.add(start_ns + int(at_ns), block_bytes, max(int(rtt_ns), LOST))


def _record(folder: Path, rounds: list[list[LinkMeasurement]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for i, link in enumerate(rounds[0]):
        name = "-".join(link.between)
        series = [Observation(r[i].at, r[i].rtt.median_s * 1e3, r[i].pair_bps / 1e9) for r in rounds]
        write_csv(folder / f"{name}.series.csv", Observation._fields, series)
        write_csv(folder / f"{name}.trace.csv", TraceRow._fields, trace_rows(series))


def _node(text: str) -> tuple[str, tuple[str, int]]:
    name, equals, address = text.partition("=")
    if not equals:
        raise AtlasError(f"--node {text!r}: write NAME=HOST:PORT, like east-0=10.0.0.5:7077")
    return name, address_of("--node", address)
