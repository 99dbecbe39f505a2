"""The job file that `atlas init` writes: a model, regions with GPUs, and priors of everything between them, commented.

Text out, nothing written. The regions' figures are `priors`; the loader validates the result like any other file.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

from atlas.catalogue.models import shape, shapes
from atlas.catalogue.priors import great_circle_km, link_priors
from atlas.catalogue.table import GpuPrice, Region, gpu_prices, region, regions, today
from atlas.errors import SpecError
from atlas.spec.batch import batch_sequences
from atlas.spec.gpus import ALIASES, GPUS
from atlas.spec.huggingface import dimensions
from atlas.spec.refusal import near_gpus

_SITE = re.compile(r"(?P<region>[^=]+)=(?P<count>[0-9]{1,7})x(?P<gpu>[^@]+)(@\$?(?P<usd>[0-9]*\.?[0-9]+))?")
NODE = 8
"""GPUs of the usual node."""
SUGGESTED = 4
"""Regions that are named where a GPU type is not sold."""


@dataclass(frozen=True)
class Site:
    """GPUs in a region."""

    region: Region
    count: int
    gpu: str
    usd_per_gpu_hour: float | None
    """As the user stated it."""

    @property
    def listed(self) -> GpuPrice | None:
        return gpu_prices().get((self.region.name, self.gpu))

    @property
    def gpus_per_node(self) -> int:
        return next(n for n in range(min(NODE, self.count), 0, -1) if self.count % n == 0)


def site(text: str) -> Site:
    """`aws:us-east-1=64xH100`, or `...@2.5` with the user's own price. SpecError for anything else."""
    found = _SITE.fullmatch(text.strip())
    if found is None or int(found["count"]) == 0:
        remedy = "Write it like aws:us-east-1=64xH100, or aws:us-east-1=64xH100@2.50 with your own price of a GPU hour"
        rule = "is not CLOUD:REGION=COUNTxGPU"
        raise SpecError(where="--dc", key="dc", value=text, rule=rule, remedy=remedy)
    where = region(found["region"], "--dc")
    gpu = next((one for one in (*GPUS, *ALIASES) if one.lower() == found["gpu"].strip().lower()), "")
    gpu = ALIASES.get(gpu, gpu)
    if not gpu:
        remedy = near_gpus(found["gpu"].strip())
        raise SpecError(where="--dc", key="gpu", value=found["gpu"], rule="no such GPU type", remedy=remedy)
    one = Site(where, int(found["count"]), gpu, float(found["usd"]) if found["usd"] else None)
    if one.usd_per_gpu_hour is None and one.listed is None:
        raise _not_sold(one)
    return one


def _not_sold(one: Site) -> SpecError:
    sold = [regions()[name] for name, gpu in gpu_prices() if gpu == one.gpu]
    sold.sort(key=lambda other: (other.cloud != one.region.cloud, great_circle_km(other.location, one.region.location)))
    own = f"your own price of a GPU hour: {one.region.name}={one.count}x{one.gpu}@USD"
    near = ", ".join(other.name for other in sold[:SUGGESTED])
    rule = f"no price list has {one.gpu} in {one.region.name}" if sold else f"no price list has {one.gpu} anywhere"
    remedy = f"Choose a region that has it, such as {near}, or give {own}" if sold else f"Give {own}"
    return SpecError(where="--dc", key="gpu", value=one.gpu, rule=rule, remedy=remedy)


def sites(texts: Sequence[str]) -> list[Site]:
    """All of them. SpecError where a region is named twice."""
    found = [site(text) for text in texts]
    for one in found:
        if sum(other.region == one.region for other in found) > 1:
            rule = "is named twice; a datacenter of a job has one type of GPU"
            remedy = "Name each region once, and add the other GPUs to the file as a datacenter of their own"
            raise SpecError(where="--dc", key="region", value=one.region.name, rule=rule, remedy=remedy)
    return found


# ---- the model ---------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class ChosenModel:
    """Lines of a job's `model`, and what they came from."""

    name: str
    lines: tuple[str, ...]
    seq_len: int
    source: str


def model(text: str, seq_len: int | None) -> ChosenModel:
    """A built-in shape by name, or a Hugging Face folder or config."""
    path = Path(text).expanduser()
    if text.strip().lower() not in shapes() and path.exists():
        found = dimensions(path, key="--model")
        length = seq_len or found.get("seq_len")
        if not isinstance(length, int):
            rule, remedy = "the config does not give the sequence length", "Give --seq, such as --seq 4096"
            raise SpecError(where="--seq", key="seq", rule=rule, remedy=remedy)
        lines = (f"config: {path.absolute()}", f"seq_len: {length}")
        folder = path if path.is_dir() else path.absolute().parent
        return ChosenModel(folder.name or "job", lines, length, f"{path}")
    known = shape(text)
    length = seq_len or int(known.keys["seq_len"])
    keys = {**known.keys, "seq_len": length}
    written = (f"{key}: {str(value).lower() if isinstance(value, bool) else value}" for key, value in keys.items())
    return ChosenModel(known.name, tuple(written), length, known.source)


# ---- the file ----------------------------------------------------------------------------------------------
def job_text(chosen: ChosenModel, where: Sequence[Site], batch: str, out: str) -> str:
    """The whole file."""
    sequences = batch_sequences(batch, chosen.seq_len, where="--batch")
    asked = " and ".join(f"{one.count} {one.gpu} in {one.region.name}" for one in where)
    names = _names(where)
    lines = [
        f"# {chosen.name} on {asked}. Written by `atlas init` on {today().isoformat()}.",
        "#",
        f"#   atlas plan {out} --out plan.yaml --page plan.html",
        "#",
        '# A figure marked "prior" is a list price or a measurement of others (docs/regions.md). Replace it with your',
        "# own figure: reports then no longer mark it as a prior. `atlas wan probe` measures the links.",
        f"name: {re.sub(r'[^A-Za-z0-9._-]', '-', chosen.name)}",
        "",
        f"model: # {chosen.source}",
        *(f"  {line}" for line in chosen.lines),
        "",
        f"batch: {batch} # {sequences:,} sequences of {chosen.seq_len:,} tokens; every plan keeps it",
        "",
        "cluster:",
        "  datacenters:",
    ]
    for name, one in zip(names, where, strict=True):
        lines += _datacenter(name, one)
    if len(where) > 1:
        lines += ["  links: # latency is one way", *_links(names, where)]
    return "\n".join(lines) + "\n"


def _names(where: Sequence[Site]) -> list[str]:
    """The region's name, with its cloud where two clouds have it."""
    shorts = [one.region.short for one in where]
    return [
        one.region.short if shorts.count(one.region.short) == 1 else f"{one.region.cloud}-{one.region.short}"
        for one in where
    ]


def _datacenter(name: str, one: Site) -> list[str]:
    lines = [
        f"    - name: {name} # {one.region.name}: {one.region.place}",
        f"      nodes: {one.count // one.gpus_per_node}",
        f"      gpus_per_node: {one.gpus_per_node}",
        f"      gpu: {one.gpu}",
    ]
    price = one.listed
    if one.usd_per_gpu_hour is not None:
        lines.append(f"      usd_per_gpu_hour: {one.usd_per_gpu_hour:g} # yours")
    elif price is not None:
        usd = f"{price.usd_per_gpu_hour:.4g}"
        spot = price.usd_per_gpu_hour_spot
        also = "spot unknown" if spot is None else f"spot {spot:.4g}"
        lines += [
            f"      usd_per_gpu_hour: {usd} # prior: {price.instance} on demand, list of {price.date}; {also}",
            f"      prior: {{ usd_per_gpu_hour: {usd} }}",
        ]
    lat, lon = one.region.location
    return [*lines, f"      location: [{lat:g}, {lon:g}]"]


def _links(names: Sequence[str], where: Sequence[Site]) -> list[str]:
    lines = []
    for (name_a, a), (name_b, b) in combinations(zip(names, where, strict=True), 2):
        found = link_priors(a.region, b.region)
        assert found.rtt_ms.value is not None
        one_way = f"{found.rtt_ms.value / 2:.4g}"
        lines += [
            f"    - between: [{name_a}, {name_b}]",
            f"      latency_ms: {one_way} # prior: round trip {found.rtt_ms.value:g} ms {found.rtt_ms.basis}",
        ]
        gbps, egress = found.gbps, found.egress_usd_per_gb
        if gbps.value is not None:
            lines.append(f"      pair_gbps: {gbps.value:g} # prior: one pair of VMs, {gbps.basis}")
        else:
            lines.append(f"      # pair_gbps: {gbps.basis}; the default is used")
        if egress.value is not None:
            lines.append(
                f"      egress_usd_per_gb: {egress.value:g} # prior: {egress.basis}, of {egress.date} or later"
            )
        else:
            lines.append(f"      # egress_usd_per_gb: {egress.basis}; plans leave it out")
        speed = "unknown" if gbps.value is None else f"{gbps.value:g}"
        price = "unknown" if egress.value is None else f"{egress.value:g}"
        lines.append(f"      prior: {{ latency_ms: {one_way}, pair_gbps: {speed}, egress_usd_per_gb: {price} }}")
    return lines


def dates(where: Sequence[Site]) -> set[str]:
    """Of the prices in the file."""
    found = {one.listed.date for one in where if one.listed is not None and one.usd_per_gpu_hour is None}
    for a, b in combinations(where, 2):
        found |= {price.date for price in link_priors(a.region, b.region).each_way if price is not None}
    return found
