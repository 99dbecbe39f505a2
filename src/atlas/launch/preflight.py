"""Checks before a launcher starts workers: the accelerators exist, and what is trained fits into memory.

Counts; measures nothing. Loads torch only to ask for GPUs.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from atlas.errors import AtlasError, SpecError
from atlas.runtime.assignment import TrainingSetup
from atlas.runtime.models.config import DecoderConfig, even_layers, model_layers
from atlas.runtime.wiring import WorkerRole
from atlas.spec import Job

GIB = 1 << 30
GRADIENT_BYTES = 4
"""Of a parameter: gradients are summed in float32."""
ADAMW_BYTES, MASTER_BYTES = 8, 4
"""Of a parameter: two moments; and a float32 copy where the model has fewer bits."""


def require_executable(job: Job) -> None:
    """Raise for jobs of another runtime, and for a tensor-parallel group larger than a node."""
    if job.runtime != "atlas":
        raise SpecError(
            where=job.where,
            key="runtime",
            value=job.runtime,
            rule="another framework executes this job: it can be simulated and planned, not trained",
            remedy="Write runtime: atlas, or leave it out",
        )
    narrow = next((dc for dc in job.cluster.datacenters if dc.gpus_per_node < job.tp), None)
    if narrow is not None and job.tp > 1:
        raise SpecError(
            where=job.where,
            key="tp",
            value=job.tp,
            rule=f"a tensor-parallel group is trained inside one node, and nodes of {narrow.name} have "
            f"{narrow.gpus_per_node} GPUs",
            remedy=f"tp of at most {narrow.gpus_per_node}",
        )


def devices_for(
    num_workers: int, device: str, datacenter: str, local_rank: int | None = None, *, tp: int = 1
) -> list[str]:
    """The first of each worker's `tp` devices on this host; raises if there are too few."""
    if not device.startswith("cuda") or ":" in device:
        return [device] * num_workers
    from atlas.runtime.hardware import num_gpus  # torch: 1.9 s

    count = num_gpus()
    first = (local_rank or 0) * tp
    if first + num_workers * tp > count:
        each = f" of {tp} GPUs each" if tp > 1 else ""
        raise AtlasError(
            f"the plan puts {num_workers} worker(s){each} on this host of {datacenter}, from GPU {first} on; it has "
            f"{count or 'no'} GPU(s). Plan for the hardware that is there (cluster.datacenters.{datacenter}), start a "
            "launcher on every host (torchrun, or --node), let them share one GPU (--device cuda:0), or train on "
            "--device cpu"
        )
    return [f"cuda:{first + k * tp}" for k in range(num_workers)]


def require_room(roles: Sequence[WorkerRole], training: TrainingSetup, device: str, *, tp: int = 1) -> None:
    """Raise if weights, gradients and optimizer state of these workers exceed the host's free memory, or a GPU's."""
    needs = [state_bytes(training, layers_of(role, training)) for role in roles]
    if device.startswith("cuda"):
        from atlas.runtime.hardware import smallest_gpu_bytes  # torch: 1.9 s

        shared = ":" in device  # one GPU for all of them
        need = (sum(needs) if shared else max(needs, default=0)) // tp
        there, what = smallest_gpu_bytes(), f"of {device} for {len(roles)} worker(s)" if shared else "of a GPU here"
    else:
        need, there, what = sum(needs), _free_bytes(), f"that is free on this host, for {len(roles)} worker(s)"
    if there is not None and need > there:
        raise AtlasError(
            f"the model does not fit: weights, gradients and optimizer state take {need / GIB:.1f} GiB, and there are "
            f"{there / GIB:.1f} GiB {what}. Plan with more stages or more hosts, or train a smaller model"
        )


def layers_of(role: WorkerRole, training: TrainingSetup) -> list[str]:
    """The layers of a worker, as checkpoints name them."""
    config = training.model.config
    counts = training.model.layers_per_stage or even_layers(config.num_layers, role.program.num_stages)
    names, last = model_layers(config), len(counts) - 1
    found: list[str] = []
    for stage in role.stages:
        first = 1 + sum(counts[:stage])
        found += names[first - (stage == 0) : first + counts[stage] + (stage == last)]
    return found


def state_bytes(training: TrainingSetup, layers: Sequence[str]) -> int:
    """Of these layers, without activations."""
    weight = 4 if training.model.dtype == "fp32" else 2
    optimizer = 0
    if training.optimizer.name == "adamw":
        optimizer = ADAMW_BYTES + (MASTER_BYTES if weight < MASTER_BYTES else 0)
    return sum(num_parameters(training.model.config, layer) for layer in layers) * (weight + GRADIENT_BYTES + optimizer)


def num_parameters(config: DecoderConfig, layer: str) -> int:
    """Of the embedding, the head or a decoder layer; matrices only."""
    if layer == "embedding":
        return config.width * (config.vocabulary + (config.max_length if config.positions == "learned" else 0))
    if layer == "head":
        return config.width * config.vocabulary
    attention = config.width * config.head_width * 2 * (config.num_heads + config.num_kv_heads)
    return attention + config.width * config.ffn_width * (3 if config.gated else 2)


def _free_bytes() -> int | None:
    try:
        found = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    except OSError:
        return None
    return int(found[1]) * 1024 if found else None
