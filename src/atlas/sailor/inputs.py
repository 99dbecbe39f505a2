"""Sailor's inputs, unchanged and under their own names, as one object for the judge and the search.

A missing, truncated or invalid file, or one without the requested model, GPU type or zone, gives one message.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from atlas.sailor.documents import FETCH, MAX_BYTES, SailorFile
from atlas.sailor.links import EgressPrices, Network, ZoneGpu
from atlas.spec.document import nearest, read_text, wrong

GIB = 1 << 30
MAX_LAYERS, MAX_GPUS_PER_NODE, MAX_GPUS_PER_ZONE = 10_000, 1024, 1_000_000
MAX_LAYER_S = 1e6
"""Larger values in a file are taken as mistakes."""
LIST_PRICES_USD_PER_HOUR = {"A100-40": 3.673385, "V100-16": 2.859998, "GH-96": 11.06}
"""The constants of Sailor's own simulator, because its files carry no GPU price; used only where no price is given."""


@dataclass(frozen=True)
class Pool:
    """GPUs of one type that are free in one zone."""

    zone: str
    gpu: str
    num_gpus: int

    @property
    def zone_gpu(self) -> ZoneGpu:
        return ZoneGpu(self.zone, self.gpu)


@dataclass(frozen=True)
class SailorGpu:
    """A GPU type of the cluster file."""

    gpus_per_node: int
    memory_bytes: int
    """Whole GiB, rounded up: the file gives what an A100-40 reports (39.4), Sailor's rule counts 40."""
    usd_per_hour: float | None
    price_from: str


@dataclass(frozen=True)
class LayerTimes:
    """Seconds by layer for one microbatch."""

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    update_s: tuple[float, ...]


@dataclass(frozen=True)
class LayerSizes:
    """By layer, in floats of 4 bytes, of one GPU of a tensor-parallel group."""

    params: tuple[int, ...]
    act_memory: tuple[int, ...]
    act_output: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Inputs:
    """One planning problem in Sailor's terms."""

    folder: Path
    trace: Path
    model: str
    num_layers: int
    global_batch: int
    pools: tuple[Pool, ...]
    gpus: Mapping[str, SailorGpu]
    times: Mapping[tuple[str, int, int], LayerTimes]
    """By (GPU type, microbatch, tp)."""
    sizes: Mapping[int, LayerSizes]
    """By tp."""
    network: Network
    egress: EgressPrices
    notes: tuple[str, ...] = field(default=())
    """Notes about how the files were read, shown with the result."""

    def microbatches(self) -> list[int]:
        return sorted({mbs for _, mbs, _ in self.times})

    def tps(self, gpu: str, mbs: int) -> list[int]:
        """Tensor-parallel degrees that were measured, fit a node, and have known sizes."""
        node = self.gpus[gpu].gpus_per_node
        return sorted(tp for g, m, tp in self.times if g == gpu and m == mbs and tp in self.sizes and node % tp == 0)


def read_inputs(
    folder: Path,
    trace: Path,
    model: str,
    gpus: Sequence[str] = (),
    prices_usd_per_hour: Mapping[str, float] | None = None,
) -> Inputs:
    """Everything a plan depends on. Without `gpus` every type of the trace is used."""
    notes: list[str] = []
    pools = _pools(trace, gpus, notes)
    kinds = tuple(dict.fromkeys(pool.gpu for pool in pools))
    sizes_file = SailorFile(folder / "llm_info.json")
    training = _training_config(folder, model)
    num_layers = training.whole("num_all_layers", high=MAX_LAYERS)
    network = Network(SailorFile(folder / "multizone_bandwidths_het.json"))
    for pool in pools:
        network.require_zone(pool.zone, pool.gpu)
    zones = tuple(dict.fromkeys(pool.zone for pool in pools))
    return Inputs(
        folder=folder,
        trace=trace,
        model=model,
        num_layers=num_layers,
        global_batch=training.whole("global_batch_size"),
        pools=pools,
        gpus=_gpus(SailorFile(folder / "basic_cluster_config.json"), kinds, prices_usd_per_hour or {}),
        times=_times(SailorFile(folder / "profiles_tmp.json"), model, kinds, num_layers),
        sizes=_sizes(sizes_file, model, num_layers),
        network=network,
        egress=EgressPrices(SailorFile(folder / "egress_usd_per_gb.json"), zones),
        notes=tuple(notes),
    )


# ---- the trace ---------------------------------------------------------------------------------------------
def find_trace(folder: Path, trace: str) -> Path:
    """A trace as the user may name it: a path, or a file of the folder's `traces`."""
    given = Path(trace)
    for path in (given, folder / "traces" / given, folder / "traces" / f"{trace}.csv"):
        if path.is_file():
            return path
    return given


def _pools(trace: Path, gpus: Sequence[str], notes: list[str]) -> tuple[Pool, ...]:
    rows = list(csv.reader(read_text(trace, key="--trace", max_bytes=MAX_BYTES).splitlines()))
    rows = [row for row in rows if any(cell.strip() for cell in row)]
    if len(rows) < 2 or "Timestamp" not in rows[0]:
        rule = "a trace has a header with Timestamp and GPUTYPE_ZONE columns, and a row of counts"
        raise wrong(trace, "header", rule, "Write e.g. ,Timestamp,A100-40_us-central1-a", rows[0] if rows else None)
    if len(rows) > 2:
        notes.append(f"{trace.name} has {len(rows) - 1} rows; the first is planned")
    pools = []
    for column, name in enumerate(rows[0]):
        if name.strip() in ("", "Timestamp"):
            continue
        gpu, _, zone = name.strip().partition("_")
        if not zone:
            raise wrong(trace, "header", "a column is named GPUTYPE_ZONE", "Write e.g. A100-40_us-central1-a", name)
        pools.append(Pool(zone, gpu, _count(trace, name, rows[1], column)))
    if len({pool.zone_gpu for pool in pools}) < len(pools):
        raise wrong(trace, "header", "a GPU type and zone occur twice", "Add the two columns up", rows[0])
    return _chosen(trace, pools, gpus, notes)


def _count(trace: Path, name: str, row: list[str], column: int) -> int:
    text = row[column].strip() if column < len(row) else ""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (0 <= value <= MAX_GPUS_PER_ZONE and value == int(value)):
        raise wrong(trace, name, "must be a whole number of GPUs", "Write 0 where there are none", text)
    return int(value)


def _chosen(trace: Path, pools: list[Pool], gpus: Sequence[str], notes: list[str]) -> tuple[Pool, ...]:
    there = tuple(dict.fromkeys(pool.gpu for pool in pools))
    for gpu in gpus:
        if gpu not in there:
            raise wrong(trace, "--gpu", "the trace has no GPUs of this type", nearest(gpu, there), gpu)
    if gpus and set(there) - set(gpus):
        notes.append(f"left out, because --gpu does not name them: {', '.join(g for g in there if g not in gpus)}")
    chosen = tuple(pool for pool in pools if pool.num_gpus and (not gpus or pool.gpu in gpus))
    if not chosen:
        raise wrong(trace, "counts", "no zone has a GPU that may be used", "Add GPUs, or name another --gpu")
    return chosen


# ---- the model and the GPUs --------------------------------------------------------------------------------
def _training_config(folder: Path, model: str) -> SailorFile:
    """The training_config_*.json of the model."""
    found = {}
    for path in sorted(folder.glob("training_config_*.json")):
        document = SailorFile(path)
        found[str(document.at("model"))] = document
    if model not in found:
        rule = "no training_config_*.json of the folder is for this model"
        raise wrong(folder, "--model", rule, nearest(model, found), model)
    return found[model]


def _gpus(cluster: SailorFile, kinds: tuple[str, ...], prices: Mapping[str, float]) -> dict[str, SailorGpu]:
    found = {}
    for kind in kinds:
        memory = cluster.number(kind, "mem_per_gpu", low=1)
        usd, source = prices.get(kind), "--gpu-price"
        if usd is None and "usd_per_gpu_hour" in cluster.keys(kind):
            usd, source = cluster.number(kind, "usd_per_gpu_hour"), cluster.path.name
        if usd is None:
            usd, source = LIST_PRICES_USD_PER_HOUR.get(kind), "Sailor's own constants: its files carry no GPU price"
        per_node = cluster.whole(kind, "gpus_per_node", high=MAX_GPUS_PER_NODE)
        found[kind] = SailorGpu(per_node, math.ceil(memory / GIB) * GIB, usd, source)
    return found


def _times(
    profiles: SailorFile, model: str, kinds: tuple[str, ...], num_layers: int
) -> dict[tuple[str, int, int], LayerTimes]:
    found = {}
    profiles.keys(model)
    for kind in kinds:
        for mbs in profiles.keys(model, kind):
            for tp in profiles.keys(model, kind, mbs):
                where = (model, kind, mbs, tp)
                layers = [profiles.at(*where, str(layer)) for layer in range(num_layers)]
                for layer, row in enumerate(layers):
                    _require_row(profiles, (*where, str(layer)), row)
                forward, backward, update = (tuple(float(row[k]) for row in layers) for k in range(3))
                if not sum(forward) + sum(backward):
                    raise profiles.bad(where, 0, "all forward and backward times are 0", FETCH)
                found[kind, _int(profiles, where[:3]), _int(profiles, where)] = LayerTimes(forward, backward, update)
    return found


def _require_row(profiles: SailorFile, where: tuple[str, ...], row: object) -> None:
    good = isinstance(row, list) and len(row) == 3
    if not good or not all(isinstance(x, (int, float)) and 0 <= x < MAX_LAYER_S for x in row):  # type: ignore[attr-defined]
        raise profiles.bad(where, row, "must be [forward, backward, update] in seconds", FETCH)


def _int(document: SailorFile, where: tuple[str, ...]) -> int:
    if not where[-1].isdigit() or int(where[-1]) < 1:
        raise document.bad(where, where[-1], "must be a positive whole number", FETCH)
    return int(where[-1])


def _sizes(info: SailorFile, model: str, num_layers: int) -> dict[int, LayerSizes]:
    found = {}
    for tp in info.keys(model):
        columns = {
            name: tuple(info.whole(model, tp, str(layer), name, low=0) for layer in range(num_layers))
            for name in ("params_floats", "act_mem_floats", "act_output_floats")
        }
        sizes = LayerSizes(columns["params_floats"], columns["act_mem_floats"], columns["act_output_floats"])
        found[_int(info, (model, tp))] = sizes
    if 1 not in found:
        raise info.bad((model, "1"), None, "is missing: activations are counted with the sizes of tp 1", "Add it")
    return found
