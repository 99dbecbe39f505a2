"""Sailor's plan format, read and written.

    {"pipeline_list": [{"num_stages": P, "layers_per_stage": [[0, 1], [2, 3]],
                        "tmp_per_stage": [[[[["A100-40", 4, "us-central1-a"]], 4], ...], ...], "dp": [D, D]}], "mbs": 2}

Replica j of stage i talks to replica j of stage i + 1; a replica is one VM (or part of one) and its tp. Knows shapes
only: `check` finds whether a plan fits the cluster.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from atlas.ir.replace import replacing
from atlas.sailor.documents import SailorFile
from atlas.sailor.links import ZoneGpu
from atlas.spec.document import wrong


class Replica(NamedTuple):
    """One replica of one stage: a tensor-parallel group inside one VM."""

    zone: str
    gpu: str
    tp: int
    gpus_in_vm: int

    @property
    def zone_gpu(self) -> ZoneGpu:
        return ZoneGpu(self.zone, self.gpu)

    @property
    def sending_gpus(self) -> int:
        return min(self.tp, self.gpus_in_vm)


@dataclass(frozen=True)
class SailorPlan:
    """One pipeline layout with its replicas: `replicas[i][j]` is replica j of stage i."""

    mbs: int
    layers: tuple[tuple[int, ...], ...]
    replicas: tuple[tuple[Replica, ...], ...]

    @property
    def num_stages(self) -> int:
        return len(self.layers)

    @property
    def ends(self) -> list[int]:
        """Of each stage: the layer after its last."""
        return [stage[-1] + 1 for stage in self.layers]

    def split(self, ends: Sequence[int]) -> SailorPlan:
        """With other layers on the same stages."""
        return replace(self, layers=tuple(tuple(range(a, b)) for a, b in pairwise([0, *ends])))

    @property
    def num_replicas(self) -> int:
        return len(self.replicas[0])

    @property
    def num_gpus(self) -> int:
        return sum(replica.tp for stage in self.replicas for replica in stage)

    def gpus_by_zone(self) -> dict[ZoneGpu, int]:
        used: dict[ZoneGpu, int] = {}
        for stage in self.replicas:
            for replica in stage:
                used[replica.zone_gpu] = used.get(replica.zone_gpu, 0) + replica.tp
        return used


def as_document(plan: SailorPlan) -> dict[str, Any]:
    """The plan as Sailor writes it."""
    return {
        "pipeline_list": [
            {
                "num_stages": plan.num_stages,
                "layers_per_stage": [list(stage) for stage in plan.layers],
                "tmp_per_stage": [[[[[r.gpu, r.gpus_in_vm, r.zone]], r.tp] for r in stage] for stage in plan.replicas],
                "dp": [len(stage) for stage in plan.replicas],
            }
        ],
        "mbs": plan.mbs,
    }


def write_plan(plan: SailorPlan, path: Path) -> None:
    """One JSON file."""
    with replacing(path) as file:
        file.write((json.dumps(as_document(plan)) + "\n").encode())


def read_plan(path: Path) -> SailorPlan:
    """A plan file of Sailor's or ours. Extra keys are Sailor's to have."""
    document = SailorFile(path)
    pipelines = document.at("pipeline_list")
    if not isinstance(pipelines, list) or len(pipelines) != 1:
        raise document.bad(["pipeline_list"], pipelines, "must hold exactly one pipeline", "Split the plan")
    try:
        pipeline = pipelines[0]
        layers = tuple(tuple(_whole(layer, 0) for layer in stage) for stage in pipeline["layers_per_stage"])
        replicas = tuple(tuple(_replica(item) for item in stage) for stage in pipeline["tmp_per_stage"])
        dp = tuple(_whole(value, 1) for value in pipeline["dp"])
        num_stages = _whole(pipeline["num_stages"], 1)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        rule = f"must have num_stages, layers_per_stage, tmp_per_stage and dp in Sailor's shapes ({error!r})"
        raise wrong(path, "pipeline_list.0", rule, "docs/sailor.md shows the format") from None
    lengths = (len(layers), len(replicas), len(dp))
    if set(lengths) != {num_stages} or any(len(stage) != d for stage, d in zip(replicas, dp, strict=True)):
        rule = f"num_stages, layers_per_stage, tmp_per_stage and dp disagree ({num_stages}, {lengths})"
        raise wrong(path, "pipeline_list.0", rule, "Write one entry per stage, and one replica for each of its dp")
    return SailorPlan(document.whole("mbs", high=1_000_000), layers, replicas)


def _replica(item: Any) -> Replica:
    machines, tp = item
    if len(machines) != 1:
        raise ValueError("a replica on several VMs cannot be scored: give one VM per replica")
    gpu, gpus_in_vm, zone = machines[0]
    if not isinstance(gpu, str) or not isinstance(zone, str):
        raise TypeError("a VM is [gpu, gpus_in_vm, zone]")
    return Replica(zone, gpu, _whole(tp, 1), _whole(gpus_in_vm, 1))


def _whole(value: Any, low: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < low:
        raise ValueError(f"{value!r} is not a whole number of at least {low}")
    return value
