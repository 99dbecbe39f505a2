"""A small planning problem in Sailor's formats, made up here: nothing of its data is copied."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ZONES = ("east-a", "east-b", "west-a")


def write_inputs(
    folder: Path,
    counts: dict[str, int],
    *,
    num_layers: int = 5,
    global_batch: int = 16,
    gpus: dict[str, float] | None = None,
    mbs: tuple[int, ...] = (1, 2),
    tps: tuple[int, ...] = (1, 2),
    wan: float = 0.3,
    params: int = 50_000_000,
    activation: int = 2_000_000,
    gpus_per_node: int = 2,
) -> Path:
    """The folder with every file, and `trace.csv` in it. `counts` is by column, `gpus` slowness by type."""
    gpus = gpus or {"X-40": 1.0}
    folder.mkdir(exist_ok=True, parents=True)
    layers = [str(layer) for layer in range(num_layers)]
    times = {
        gpu: {
            str(m): {str(tp): {k: _times(int(k), num_layers, slow, m, tp) for k in layers} for tp in tps} for m in mbs
        }
        for gpu, slow in gpus.items()
    }
    sizes = {str(tp): {k: _sizes(int(k), num_layers, params, activation, tp) for k in layers} for tp in tps}
    zones = list(dict.fromkeys(column.partition("_")[2] for column in counts))
    write = {
        "profiles_tmp.json": {"toy": times},
        "llm_info.json": {"toy": sizes},
        "multizone_bandwidths_het.json": bandwidths(zones, list(gpus), tps, wan),
        "egress_usd_per_gb.json": {a: {b: _usd(a, b) for b in zones} for a in zones},
        "basic_cluster_config.json": {
            gpu: {"gpus_per_node": gpus_per_node, "mem_per_gpu": 40 * 2**30, "usd_per_gpu_hour": 3.6 / slow}
            for gpu, slow in gpus.items()
        },
        "training_config_toy.json": {"model": "toy", "global_batch_size": global_batch, "num_all_layers": num_layers},
    }
    for name, content in write.items():
        (folder / name).write_text(json.dumps(content))
    header, row = ["", "Timestamp", *counts], ["0", "1.0", *map(str, counts.values())]
    (folder / "trace.csv").write_text(",".join(header) + "\n" + ",".join(row) + "\n")
    return folder / "trace.csv"


def _times(layer: int, num_layers: int, slow: float, mbs: int, tp: int) -> list[float]:
    share = {0: 0.1, num_layers - 1: 0.6}.get(layer, 1.0)
    seconds = share * slow * (0.004 + 0.02 * mbs) * (0.6 if tp == 2 else 1.0) / (1 if tp < 4 else 2.5)
    return [seconds / 3, 2 * seconds / 3, 0.003 / tp]


def _sizes(layer: int, num_layers: int, params: int, activation: int, tp: int) -> dict[str, int]:
    head = layer == num_layers - 1
    return {
        "params_floats": params // tp * (2 if layer == 0 else 1),
        "act_mem_floats": 20 * activation // tp,
        "act_output_floats": activation * (5 if head else 1),
    }


def bandwidths(zones: list[str], gpus: list[str], tps: tuple[int, ...], wan: float) -> dict[str, Any]:
    """GB/s = c (1 + 0.1 log2 MB) with c by how far apart the zones are."""

    def fit(a: str, b: str, n: int, m: int) -> list[Any]:
        same = a.partition("-")[0] == b.partition("-")[0]
        c = min(n, m) ** 0.7 * (2.0 if a == b else 1.8 if same else wan * (1.1 if a < b else 1.0))
        return [[0.0, 0.1 * c, c], 2e9 * c]

    return {
        a: {
            g: {str(n): {b: {h: {str(m): fit(a, b, n, m) for m in tps} for h in gpus} for b in zones} for n in tps}
            for g in gpus
        }
        for a in zones
    }


def _usd(a: str, b: str) -> float:
    return 0.0 if a == b else 0.01 if a.partition("-")[0] == b.partition("-")[0] else 0.02
