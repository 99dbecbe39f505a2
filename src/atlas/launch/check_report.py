"""The report of `atlas wan check`: what every launcher found, as rows, and every fault as a sentence with its remedy.

Pure: knows no sockets. `network_check` collects the rows; the command prints them.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

from atlas.launch.control_channel import Message
from atlas.launch.rendezvous import Refusal
from atlas.launch.site_network import SiteFacts
from atlas.runtime.assignment import read
from atlas.wan.security.certs import WARN_DAYS
from atlas.wan.transport.base import Address

CLOCK_FAULT_S, CLOCK_WARN_S = 300.0, 1.0
"""A clock that is off by more is a fault, or gets a warning. A certificate is valid from an hour before it was made, so
a smaller difference does no harm."""
SMALL_MTU_BYTES = 1280
"""The least that IPv6 guarantees."""


def compiled(
    joined: Mapping[str, Message],
    rows: Sequence[Message],
    clocks: Mapping[str, float],
    missing: Sequence[str],
    refused: Sequence[Refusal],
    rendezvous: Address,
) -> Message:
    """`joined`: facts by host; `clocks`: how far ahead, in seconds; `missing`: datacenters; `refused`: connections that
    the rendezvous did not accept."""
    rows = sorted(rows, key=lambda row: (row["from"], row["to"]))
    faults = [
        *_absent(missing, refused, rendezvous),
        *_dials(rows),
        *_apart({host: read(SiteFacts, facts["site"]) for host, facts in joined.items()}),
        *(
            f"{host}: its clock differs by {ahead:+.0f} s from the first datacenter's. Run NTP there"
            for host, ahead in clocks.items()
            if abs(ahead) > CLOCK_FAULT_S
        ),
    ]
    sites = [
        {"host": host, **facts, "clock_s": round(clocks.get(host, 0.0), 3)} for host, facts in sorted(joined.items())
    ]
    return {"rows": rows, "sites": sites, "faults": faults, "warnings": _warnings(joined, rows, clocks)}


def _absent(missing: Sequence[str], refused: Sequence[Refusal], rendezvous: Address) -> list[str]:
    where = f"{rendezvous[0]}:{rendezvous[1]}"
    lines = [
        f"the rendezvous refused a connection from {host}: {why}. Give that host a valid certificate of its "
        "datacenter from the same CA (`atlas wan certs`)"
        for host, why in dict.fromkeys((refusal.host, refusal.why) for refusal in refused)
    ]
    for dc in missing:
        hint = "its certificate was refused, or" if refused else "it was not started, or"
        lines.append(
            f"{dc} did not join at {where}: {hint} a firewall blocks it. Run `atlas wan check --dc {dc}` "
            "there and read its message"
        )
    return lines


def _dials(rows: Sequence[Message]) -> list[str]:
    """One sentence for each host, port range and error, with all that dialled it."""
    found: dict[tuple[str, str, str], tuple[list[str], list[int]]] = {}
    for row in rows:
        for port, error in row["ports"].items():
            if error:
                sources, ports = found.setdefault((row["to"], row["host"], error), ([], []))
                sources.append(row["from"])
                ports.append(int(port))
    lines = []
    for (to, host, error), (sources, ports) in found.items():
        who = ", ".join(dict.fromkeys(sources))
        lines.append(
            f"{to} is not reached at {host}, port {spans(ports)}, from {who}: {error.rstrip('.?')}. Correct the "
            f"address, port or firewall of {to.partition('/')[0]}; if it can dial the others, give it --advertise none"
        )
    return lines


def _apart(sites: Mapping[str, SiteFacts]) -> list[str]:
    return [
        f"{a} and {b}: neither can dial the other (--advertise none, --reach none). Give one of them --advertise, or "
        "connect them by a VPN and give --reach"
        for a, b in combinations(sites, 2)
        if sites[a].dials(sites[b]) is None and sites[b].dials(sites[a]) is None
    ]


def _warnings(joined: Mapping[str, Message], rows: Sequence[Message], clocks: Mapping[str, float]) -> list[str]:
    soon = dt.datetime.now(dt.UTC) + dt.timedelta(days=WARN_DAYS)
    lines = [
        f"{host}: {file} expires on {one['until'][:10]}: make a new one with `atlas wan certs`"
        for host, facts in joined.items()
        for file, one in facts["certificates"].items()
        if dt.datetime.fromisoformat(one["until"]) < soon
    ]
    lines += [
        f"{host}: its clock differs by {ahead:+.1f} s from the first datacenter's"
        for host, ahead in clocks.items()
        if CLOCK_WARN_S < abs(ahead) <= CLOCK_FAULT_S
    ]
    lines += [
        f"{row['from']} to {row['to']}: an MTU of {row['mtu']} bytes lowers the throughput. Raise it if you can"
        for row in rows
        if 0 < row.get("mtu", 0) < SMALL_MTU_BYTES
    ]
    return lines


def spans(ports: Sequence[int]) -> str:
    """`7710-7712, 7715`."""
    parts: list[list[int]] = []
    for port in sorted(set(ports)):
        if parts and port == parts[-1][-1] + 1:
            parts[-1].append(port)
        else:
            parts.append([port])
    return ", ".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)


def matrix(report: Mapping[str, Any]) -> list[list[str]]:
    """The rows as text, under a header."""
    lines = [["from", "to", "dials", "ports", "round trip", "MTU", "rate"]]
    for row in report["rows"]:
        if row["host"] is None:
            lines.append([row["from"], row["to"], "none: the other side dials", "", "", "", ""])
            continue
        good = [int(port) for port, error in row["ports"].items() if not error]
        bad = [int(port) for port, error in row["ports"].items() if error]
        ports = "; ".join(f"{spans(some)} {word}" for some, word in ((good, "ok"), (bad, "FAULT")) if some)
        measured = ["", "", ""]
        if "rtt_ms" in row:
            measured = [f"{row['rtt_ms']:.1f} ms", str(row["mtu"]), f"{row['gbit_s']:.3g} Gbit/s"]
        lines.append([row["from"], row["to"], row["host"], ports, *measured])
    return lines
