"""Compare the networks that a datacenter could be built with: ports, watts and dollars, and the nodes its power allows.

Prices each datacenter of JOB with rail, fat-tree, flat-rail and photonic fabrics. Fibre, NICs, cooling and control are
not counted. See docs/fabric.md.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from atlas.console import as_json, job_flags, show
from atlas.spec.fabric import KINDS
from atlas.spec.job import Cluster, DataCenter, Job
from atlas.spec.plan import load_job_or_plan
from atlas.spec.power import bill_in, it_watts, nodes_allowed, parts_in, server_watts
from atlas.view.table import plain_table


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("job", metavar="JOB", help="a job file or a plan")
    job_flags(parser)
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")


def run(args: argparse.Namespace) -> int:
    job, _ = load_job_or_plan(args.job, args.set)
    found = [_datacenter(job, dc) for dc in job.cluster.datacenters]
    if args.json:
        sys.stdout.write(as_json({"datacenters": found}))
        return 0
    for number, one in enumerate(found):
        show(*([""] if number else []), _verdict(one), *_table(one))
    return 0


def _datacenter(job: Job, dc: DataCenter) -> dict[str, Any]:
    cluster, parts = job.cluster, parts_in(job.cluster, dc)
    return {
        "name": dc.name,
        "gpu": dc.gpu,
        "nodes": dc.nodes,
        "gpus_per_node": dc.gpus_per_node,
        "nodes_from_power": dc.name in job.powered,
        "power_kw": dc.power_kw,
        "pue": dc.pue,
        "kind": dc.fabric.kind if dc.fabric else None,
        "server_watts_per_gpu": cluster.gpu_type(dc.gpu).server_watts,
        "server_watts_source": cluster.gpu_type(dc.gpu).server_watts_source,
        "parts": parts.model_dump(),
        "fabrics": [_fabric(cluster, dc, kind, parts.switch_ports) for kind in KINDS],
    }


def _fabric(cluster: Cluster, dc: DataCenter, kind: Any, switch_ports: int) -> dict[str, Any]:
    found: dict[str, Any] = {"kind": kind, "fits": kind != "flat-rail" or dc.nodes <= switch_ports}
    bill = bill_in(cluster, dc, kind)
    found |= {
        "switch_ports": bill.switch_ports,
        "optical_ports": bill.optical_ports,
        "transceivers": bill.transceivers,
        "watts": bill.watts,
        "watts_per_gpu": bill.watts_per_gpu,
        "usd": bill.usd,
        "usd_per_gpu": bill.usd_per_gpu,
        "it_watts": it_watts(cluster, dc, kind),
        "nodes_allowed": None,
    }
    if dc.power_kw is not None and server_watts(cluster, dc) is not None:
        found["nodes_allowed"] = nodes_allowed(cluster, dc, kind)
    return found


# ---- text ----------------------------------------------------------------------------------------------------------
def _verdict(one: dict[str, Any]) -> str:
    """The sentence that comes first."""
    name, gpus = one["name"], one["nodes"] * one["gpus_per_node"]
    if one["nodes"] == 1:
        return f"{name}: one node needs no fabric: 0 W, $0."
    light = next(row for row in one["fabrics"] if row["kind"] == "photonic")
    rest = [row for row in one["fabrics"] if row["kind"] != "photonic" and row["fits"]]
    best = min(rest, key=lambda row: row["watts"])
    text = (
        f"{name}: for {gpus:,} {one['gpu']}, photonic rails need {_ratio(best, light, 'watts')} fewer watts than "
        f"{best['kind']}, the electrical fabric with the fewest ({light['watts_per_gpu']:.2f} against "
        f"{best['watts_per_gpu']:.2f} W a GPU), and cost {_ratio(best, light, 'usd')} less "
        f"(${light['usd_per_gpu']:,.0f} against ${best['usd_per_gpu']:,.0f})."
    )
    if light["nodes_allowed"] is not None:
        per_node = one["gpus_per_node"]
        text += f" {one['power_kw']:,g} kW hold {light['nodes_allowed'] * per_node:,} GPUs with photonic rails and "
        text += f"{best['nodes_allowed'] * per_node:,} with {best['kind']}."
    return text


def _ratio(a: dict[str, Any], b: dict[str, Any], key: str) -> str:
    return f"{a[key] / b[key]:.2f}x" if b[key] else "infinitely"


def _table(one: dict[str, Any]) -> list[Any]:
    if one["nodes"] == 1:
        return []
    parts = one["parts"]
    watts = one["server_watts_per_gpu"]
    servers = f" Servers: {watts:,g} W a GPU ({one['server_watts_source'] or 'of the job'})." if watts else ""
    few = "" if all(row["fits"] for row in one["fabrics"]) else f" > {parts['switch_ports']}: more nodes than ports."
    table = plain_table(caption=f"Parts: {parts['source']}, {parts['date']}.{servers}{few} * in the job")
    table.add_column("fabric", no_wrap=True)
    powered = one["power_kw"] is not None
    for name in ("ports", "optics", "kW", "W/GPU", "$", "$/GPU", *(["GPUs fit"] if powered else [])):
        table.add_column(name, justify="right", no_wrap=True)
    for row in one["fabrics"]:
        ports = row["switch_ports"] or row["optical_ports"]
        fit = row["nodes_allowed"]
        allowed = [f"{fit * one['gpus_per_node']:,}" if fit is not None else "-"] if powered else []
        name = row["kind"] + (" *" if row["kind"] == one["kind"] else "")
        if not row["fits"]:
            table.add_row(name, f"> {parts['switch_ports']}", *["-"] * 5, *allowed)
            continue
        cells = [f"{ports:,}", f"{row['transceivers']:,}", f"{row['watts'] / 1e3:,.1f}", f"{row['watts_per_gpu']:.2f}"]
        table.add_row(name, *cells, f"{row['usd']:,.0f}", f"{row['usd_per_gpu']:,.0f}", *allowed)
    return [table]
