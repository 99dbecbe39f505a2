"""Random jobs of every kind for `bench/monotone.py --wide`, and what is swept in each.

Two to four datacenters that differ in GPU type, GPUs a node, nodes, network and links; tp up to 8; models of 1B to 70B
parameters; every runtime. A job is kept as the data of its file, so that a sweep can be written down and repeated.
Knows files and keys; runs nothing.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations, groupby
from typing import Any

import numpy as np

from atlas.cost.arrange import arrange
from atlas.spec import Job, parse_job

Data = dict[str, Any]
LATENCIES = (0.1, 0.2, 0.5, 1, 2, 3, 5, 10, 20, 30, 40, 60, 100, 200)
RATES = (0.5, 1, 2, 4, 5, 6, 8, 10, 20, 50)
NODES, NETWORKS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24), (25, 50, 100, 200, 400, 800, 1600)
MEMORIES = (12, 16, 20, 24, 32, 40, 48, 64, 72)
FACTORS = (0.1, 0.25, 0.5, 0.8, 1, 1.25, 2, 4)
"""On the latencies or rates of all links, where they differ."""
GPUS = ("A100-80", "A100-40", "H100", "H200", "L40S", "V100-16")
SHAPES = ((24, 2048, 16), (32, 2560, 32), (32, 4096, 32), (40, 5120, 40), (60, 6656, 52), (80, 8192, 64))
"""Layers, width and heads: 1B, 3B, 7B, 13B, 30B and 70B parameters."""
KINDS = {"simulate": ("latency", "bandwidth", "network", "nodes", "memory"), "plan": ("nodes", "memory", "latency",
         "bandwidth", "network")}  # fmt: skip
WEIGHTS = {"simulate": (0.3, 0.3, 0.1, 0.15, 0.15), "plan": (0.35, 0.25, 0.15, 0.15, 0.1)}


@dataclass(frozen=True)
class WideSweep:
    """One job, and the values of one key, the best first."""

    data: Data
    kind: str
    key: str
    values: list[float]

    def data_at(self, value: float) -> Data:
        """The job's file with one value of the key."""
        data = copy.deepcopy(self.data)
        cluster, path = data["cluster"], self.key.split(".")
        if self.kind == "memory":
            data["memory_gib"] = value
        elif self.kind in ("nodes", "network"):
            dc = next(dc for dc in cluster["datacenters"] if dc["name"] == path[2])
            dc[path[-1]] = int(value) if self.kind == "nodes" else value
        elif path[1] == "wan":
            cluster["wan"][path[-1]] = value
        elif path[2] == "all":
            for link in cluster["links"]:
                link[path[-1]] *= value
        else:
            cluster["links"][int(path[2])][path[-1]] = value
        return data

    def jobs(self) -> list[Callable[[], Job]]:
        """Makers of its jobs: one may be infeasible."""
        return [lambda value=value: parse_job(self.data_at(value)) for value in self.values]  # type: ignore[misc]

    @property
    def words(self) -> str:
        """What the job is, in a line."""
        data, cluster = self.data, self.data["cluster"]
        dcs = "+".join(
            f"{dc['nodes']}x{dc['gpus_per_node']}x{dc['gpu']}/{dc.get('net_gbps', '-')}"
            for dc in cluster["datacenters"]
        )
        links = "links" if "links" in cluster else "wan"
        model = data["model"]
        keys = ("runtime", "tp", "pp", "num_microbatches", "pipelines_per_cell", "cells", "recompute", "memory_gib")
        settings = " ".join(f"{key}={data[key]}" for key in keys if key in data)
        return f"{dcs} {links} {settings} L={model['layers']} H={model['hidden']} S={model['seq_len']}"


def wide_sweep(rng: np.random.Generator, part: str) -> WideSweep:
    """May be infeasible: the caller draws again."""
    kind = str(rng.choice(KINDS[part], p=WEIGHTS[part]))
    data = _job(rng, part)
    dc = data["cluster"]["datacenters"][int(rng.integers(len(data["cluster"]["datacenters"])))]["name"]
    links = data["cluster"].get("links")
    link = "all" if links is None or rng.random() < 0.5 else str(rng.integers(len(links)))
    where = "wan" if links is None else f"links.{link}"
    key, values, less = {
        "latency": (f"cluster.{where}.latency_ms", FACTORS if where == "links.all" else LATENCIES, True),
        "bandwidth": (f"cluster.{where}.pair_gbps", FACTORS if where == "links.all" else RATES, False),
        "network": (f"cluster.datacenters.{dc}.net_gbps", NETWORKS, False),
        "nodes": (f"cluster.datacenters.{dc}.nodes", NODES, False),
        "memory": ("memory_gib", MEMORIES, False),
    }[kind]
    chosen = sorted(rng.choice(values, 5, replace=False).tolist(), reverse=not less)
    sweep = WideSweep(data, kind, key, chosen)
    return _placed(sweep) if (part, kind) == ("simulate", "nodes") else sweep


def _placed(sweep: WideSweep) -> WideSweep:
    """With the placement of the fewest nodes: left out, it follows the nodes."""
    rank_dc = arrange(parse_job(sweep.data_at(sweep.values[-1]))).rank_dc
    placement = [{"dc": dc, "stages": len(list(run))} for dc, run in groupby(rank_dc)]
    return WideSweep({**sweep.data, "placement": placement}, sweep.kind, sweep.key, sweep.values)


def _job(rng: np.random.Generator, part: str) -> Data:
    count, same = int(rng.integers(2, 5)), rng.random() < 0.5
    gpus = [str(rng.choice(GPUS))] * count if same else [str(gpu) for gpu in rng.choice(GPUS, count)]
    per_node = int(rng.choice([1, 2, 4, 8]))
    dcs = [
        {"name": f"d{i}", "nodes": int(rng.choice([1, 2, 3, 4, 6, 8, 12])), "gpus_per_node": per_node, "gpu": gpu}
        for i, gpu in enumerate(gpus)
    ]
    for dc in dcs:
        if rng.random() < 0.2:
            dc["gpus_per_node"] = int(rng.choice([1, 2, 4, 8]))
        if rng.random() < 0.5:
            dc["net_gbps"] = float(rng.choice([50, 100, 400]))
    layers, hidden, heads = SHAPES[int(rng.choice(6, p=[0.25, 0.2, 0.25, 0.1, 0.1, 0.1]))]
    model: Data = {"layers": layers, "hidden": hidden, "heads": heads, "vocab": 32_000}
    model |= {"seq_len": int(rng.choice([1024, 2048, 4096])), "family": str(rng.choice(["gpt", "llama"]))}
    if rng.random() < 0.2:
        model["tied_embeddings"] = True
    data: Data = {
        "name": "wide",
        "model": model,
        "cluster": {"datacenters": dcs, **_links(rng, [dc["name"] for dc in dcs])},
        "runtime": str(rng.choice(["atlas", "megatron", "torch"], p=[0.7, 0.15, 0.15])),
        "tp": int(rng.choice([tp for tp in (1, 2, 4, 8) if tp <= per_node])),
        "pp": int(rng.integers(count, 9)),
        "num_microbatches": int(rng.choice([4, 8, 12, 16, 24])),
        "microbatch": int(rng.choice([1, 2], p=[0.8, 0.2])),
        "pipelines_per_cell": int(rng.integers(1, 5)),
        "cells": int(rng.choice([1, 2, 3], p=[0.7, 0.2, 0.1])),
        "recompute": bool(rng.random() < 0.6),
    }
    if rng.random() < 0.2:
        data["memory_gib"] = float(rng.choice([12, 16, 24, 40]))
    if rng.random() < 0.15:
        data["zero"] = 1
    return data


def _links(rng: np.random.Generator, names: list[str]) -> Data:
    """Alike, or different for each pair; with a trunk in some."""

    def one() -> Data:
        link = {"latency_ms": float(rng.choice(LATENCIES)), "pair_gbps": float(rng.choice(RATES))}
        return link | ({"trunk_gbps": float(rng.choice([4, 10, 20]))} if rng.random() < 0.25 else {})

    if rng.random() < 0.5:
        return {"wan": one()}
    return {"links": [{"between": list(pair), **one()} for pair in combinations(names, 2)]}
