"""What a search may choose from: degrees of parallelism, microbatch sizes, depths; and the global batch that every
candidate must train on.

The global batch is the job's own: microbatch x num_microbatches x cells x pipelines per cell sequences, where
pipelines that the file leaves out are those `cost.arrange` derives (one, where the job as written does not fit).
Knows no times: `estimate` and `judge` find out which choices are good.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from atlas.cost.arrange import arrange
from atlas.cost.price import Tcp
from atlas.cost.profile import load_profile
from atlas.errors import AtlasError, InfeasibleError, SpecError
from atlas.planner.candidate import Group
from atlas.spec import Job
from atlas.spec.batch import batch_sequences

MAX_MICROBATCH, MAX_TP = 16, 1024
"""Sequences of a microbatch, and GPUs of a layer: the largest powers of two that are tried."""
MAX_CELL = 16
"""Pipelines of one cell: a scatter over more peers takes more than milliseconds."""
KEEPABLE = ("tp", "pp", "microbatch", "cells", "pipelines_per_cell", "datacenters")
"""Keys that `--keep` accepts: the search leaves them as the job has them."""

EVERY_DEPTH, MAX_DEPTH = 12, 128
"""Up to so many stages every depth is tried; beyond MAX_DEPTH only the job's own."""


@dataclass(frozen=True)
class Space:
    """One search's choices."""

    job: Job
    sequences: int
    """Of one iteration, over all replicas."""
    tps: tuple[int, ...]
    microbatches: tuple[int, ...]
    depths: tuple[int, ...]
    cell_sizes: tuple[int, ...]
    """Pipelines per cell; 1 is no sharing."""
    num_cells: int | None
    """Only this many, or any number."""
    tcp: Tcp
    datacenters: frozenset[str] | None
    """A candidate uses all of these and no others; None: any."""
    kind: str | None = None
    """Only candidates of this kind (`candidate.KINDS`); None: any."""
    below: float = math.inf
    """Only candidates that may score lower than this; the search ends with one that clearly does."""

    @property
    def tokens(self) -> int:
        """Of one iteration."""
        return self.sequences * self.job.model.seq_len

    def uses_kept(self, names: Iterable[str]) -> bool:
        """Whether a candidate in these datacenters is in those that are kept."""
        return self.datacenters is None or self.datacenters == frozenset(names)

    def is_kind(self, kind: str) -> bool:
        return self.kind in (None, kind)

    def allows_group(self, names: Collection[str]) -> bool:
        """Whether candidates of one group in these datacenters are wanted."""
        return self.uses_kept(names) and self.is_kind("one" if len(names) == 1 else "pipeline")

    def can_use(self, name: str) -> bool:
        return self.datacenters is None or name in self.datacenters

    def takes_turns(self, groups: Iterable[Group]) -> bool:
        """Whether pipelines of these groups may take turns on the WAN."""
        return self.tcp == "many" and any(group.num_hops and group.pipelines_per_cell > 1 for group in groups)

    def total_microbatches(self, microbatch: int) -> int:
        """Microbatches of one iteration, over all replicas."""
        return self.sequences // microbatch


def space_of(
    job: Job,
    *,
    keep: Collection[str] = (),
    global_batch: int | None = None,
    tcp: Tcp = "many",
    kind: str | None = None,
    below: float = math.inf,
) -> Space:
    """Every choice that fits the job's dimensions, except for the keys in `keep`."""
    for key in keep:
        if key not in KEEPABLE:
            remedy = f"Give one of {', '.join(KEEPABLE)}"
            raise SpecError(where="--keep", key=key, rule="is not chosen by the planner", remedy=remedy)
        if key in job.left_open:
            rule, remedy = "is not stated in the job, so there is nothing to keep", f"Write {key}: in the job"
            raise SpecError(where="--keep", key=key, rule=rule, remedy=remedy)
    if len(job.cluster.datacenters) > 1 and job.cluster.links is None and job.cluster.wan.latency_ms is None:
        raise SpecError(
            where=job.where,
            key="cluster.wan.latency_ms",
            rule="is needed to plan over several datacenters",
            remedy="Write it, or list cluster.links",
        )
    sequences = global_batch or batch_of(job)
    tps = (job.tp,) if "tp" in keep else _tps(job)
    sizes = (job.microbatch,) if "microbatch" in keep else _microbatches(job, sequences)
    sizes = tuple(size for size in sizes if sequences % size == 0)
    if not sizes:
        rule = f"does not divide the global batch of {sequences} sequences"
        raise SpecError(where=job.where, key="microbatch", value=job.microbatch, rule=rule, remedy="Change one of them")
    tps, sizes = _measured(job, tps, sizes)
    cell_sizes: tuple[int, ...] = tuple(range(1, MAX_CELL + 1)) if tcp == "many" else (1,)
    if "pipelines_per_cell" in keep:
        cell_sizes = (job.pipelines_per_cell or arrange(job).num_pipelines,)
    return Space(
        job=job,
        sequences=sequences,
        tps=tps,
        microbatches=sizes,
        depths=(job.pp,) if "pp" in keep else _depths(job),
        cell_sizes=cell_sizes,
        num_cells=job.cells if "cells" in keep else None,
        tcp=tcp,
        datacenters=_kept_datacenters(job) if "datacenters" in keep else None,
        kind=kind,
        below=below,
    )


def _kept_datacenters(job: Job) -> frozenset[str]:
    """Those of the job's placement; all of the cluster's where it has none."""
    if job.placement is not None:
        return frozenset(place.dc for place in job.placement)
    return frozenset(dc.name for dc in job.cluster.datacenters)


def batch_of(job: Job) -> int:
    """Sequences of one iteration of the job as it is written."""
    if job.batch is not None:
        return batch_sequences(job.batch, job.model.seq_len, where=job.where)
    pipelines = job.pipelines_per_cell
    if pipelines is None:
        try:
            pipelines = arrange(job).num_pipelines
        except InfeasibleError:
            pipelines = 1
    return job.microbatch * job.num_microbatches * job.cells * pipelines


def _tps(job: Job) -> tuple[int, ...]:
    """Powers of two, and the job's own, that divide the heads and fit a node somewhere."""
    widest = max(dc.gpus_per_node for dc in job.cluster.datacenters)
    powers = [2**k for k in range(min(widest, MAX_TP).bit_length())]
    return tuple(sorted({tp for tp in [*powers, job.tp] if tp <= widest and job.model.heads % tp == 0}))


def _microbatches(job: Job, sequences: int) -> tuple[int, ...]:
    powers = [2**k for k in range(MAX_MICROBATCH.bit_length())]
    return tuple(sorted({size for size in [*powers, job.microbatch] if sequences % size == 0}))


def _depths(job: Job) -> tuple[int, ...]:
    """Every depth up to EVERY_DEPTH, then only those at which the largest stage gets smaller, and the job's own.

    A depth between two of those has the same slowest stage and more of them. The LM head weighs about as much as a
    layer or two, so the count is also taken with one more layer.
    """
    layers = job.model.layers
    found = {pp for pp in range(1, layers + 1) if pp <= EVERY_DEPTH or pp == job.pp}
    for pieces in (layers, layers + 1):
        found |= {
            math.ceil(pieces / per) for per in range(1, pieces + 1) if math.ceil(pieces / per) <= min(layers, MAX_DEPTH)
        }
    return tuple(sorted(found))


def _measured(job: Job, tps: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """With a profile, only what was measured: nothing is scaled."""
    if job.profile is None:
        return tps, sizes
    entries = load_profile(job.profile).entries
    kept = tuple(tp for tp in tps if any(e.tp == tp for e in entries))
    kept_sizes = tuple(size for size in sizes if any(e.microbatch == size for e in entries))
    if not kept or not kept_sizes:
        raise AtlasError(
            f"{job.profile}: nothing was measured for any tp of {list(tps)} with a microbatch of {list(sizes)}. "
            "Measure one, or leave `profile` out"
        )
    return kept, kept_sizes
