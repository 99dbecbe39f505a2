"""Checks before a launcher starts workers: the accelerators exist, and what is trained fits into memory.

Counts; measures nothing. Loads torch only to ask for GPUs.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from atlas.cost.arrange import arrange
from atlas.cost.cluster_arrays import GIB
from atlas.cost.memory import StateBytes, peak_memory, state_bytes, worker_memory
from atlas.errors import AtlasError, SpecError
from atlas.runtime.assignment import FillerChoice, TrainingSetup
from atlas.runtime.models.config import model_layers
from atlas.runtime.models.sizes import layer_sizes
from atlas.runtime.topology import WorkerRole
from atlas.spec import Job

GRADIENT_BYTES = 4
"""Of a parameter: gradients are summed in float32."""
ADAMW_BYTES, MASTER_BYTES = 8, 4
"""Of a parameter: two moments; and a float32 copy where the model has fewer bits."""
WORKER_BYTES = 256 << 20
"""Host memory of a worker process besides: its own part of Python and torch, and buffers of the transport."""
CGROUP_FILES = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)
"""Limit and use of this container's memory, in version 2 and in version 1."""


def require_executable(job: Job, filler: FillerChoice | None = None) -> None:
    """Raise for jobs of another runtime, for a tensor-parallel group larger than a node, and for one with a filler."""
    if filler is not None and job.tp > 1:
        raise SpecError(
            where=job.where,
            key="tp",
            value=job.tp,
            rule=f"filler {filler.name} needs workers of one GPU each",
            remedy="Write tp: 1, or train without --filler",
        )
    if job.runtime != "atlas":
        raise SpecError(
            where=job.where,
            key="runtime",
            value=job.runtime,
            rule="another framework executes this job: it can be simulated and planned, not trained",
            remedy="Write runtime: atlas, or leave it out",
        )
    placed = {place.dc for part in job.parts for place in part.placement or ()}
    used = [dc for dc in job.cluster.datacenters if dc.name in placed or not placed]
    narrow = next((dc for dc in used if dc.gpus_per_node < job.tp), None)
    if narrow is not None and job.tp > 1:
        raise SpecError(
            where=job.where,
            key="tp",
            value=job.tp,
            rule=f"a tensor-parallel group is trained inside one node, and nodes of {narrow.name} have "
            f"{narrow.gpus_per_node} GPUs",
            remedy=f"Use a tp of at most {narrow.gpus_per_node}",
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


class WorkerNeed(NamedTuple):
    """Bytes of memory that a worker takes, over its tensor-parallel ranks."""

    state: int
    """Weights, gradients (the sums) and optimizer state."""
    activations: int
    """Of the microbatches in flight, and of the loss, at their most."""
    received: int
    """Parts of other pipelines' gradients while they are summed: after the last backward."""
    snapshot: int
    """In host memory: what a save copies before it is written."""

    @property
    def on_device(self) -> int:
        return self.state + max(self.activations, self.received)


def worker_needs(
    roles: Sequence[WorkerRole], job: Job, training: TrainingSetup, *, saves: bool = False
) -> list[WorkerNeed]:
    """By worker, counted as for a plan (`cost.memory`)."""
    peaks: tuple[int, ...] = ()
    if roles and training.model.layers_per_stage:  # not the stand-in model: it is small
        found = peak_memory(job, roles[0].program, worker_memory(job, arrange(job)))
        peaks = tuple(most - worker.weights - worker.gradients - worker.optimizer for worker, most in found)
    return [_need(role, training, peaks[role.rank] * job.tp if peaks else 0, saves=saves) for role in roles]


def _need(role: WorkerRole, training: TrainingSetup, activations: int, *, saves: bool) -> WorkerNeed:
    pipelines = role.num_pipelines
    mine = state_of(training, layers_of(role, training), pipelines if training.zero else 1)
    whole = state_of(training, layers_of(role, training))
    received = mine.gradients if pipelines > 1 else 0
    snapshot = (whole.weights + whole.optimizer) / pipelines if saves else 0  # each saves its share of the layers
    return WorkerNeed(int(mine.total), activations, int(received), int(snapshot))


def require_memory(needs: Sequence[WorkerNeed], device: str, *, tp: int = 1, beside: Sequence[WorkerNeed] = ()) -> None:
    """Raise if these workers exceed the memory of a GPU here, or the host's free memory. `beside`: workers of other
    launchers that use the same GPU."""
    if device.startswith("cuda"):
        from atlas.runtime.hardware import smallest_gpu_bytes  # torch: 1.9 s

        users = [need.on_device for need in (*needs, *beside)]
        shared = ":" in device  # one GPU for all of them
        most = (sum(users) if shared else max(users, default=0)) // tp
        where = f"of {device} for {len(users)} worker(s)" if shared else "of a GPU here"
        _require("weights, gradients, optimizer state and activations", most, smallest_gpu_bytes(), where)
    _require(
        _on_host(device), host_bytes(needs, device), free_bytes(), f"free on this host, for {len(needs)} worker(s)"
    )


def host_bytes(needs: Sequence[WorkerNeed], device: str) -> int:
    """Of host memory, for these workers."""
    on_host = sum(need.snapshot + WORKER_BYTES for need in needs)
    if device.startswith("cuda"):
        return on_host + sum(2 * need.received for need in needs)  # sent and received, where the host sums
    return on_host + sum(need.on_device for need in needs)


class LauncherMemory(NamedTuple):
    """A launcher's workers, and the memory that it has for them."""

    name: str
    needs: Sequence[WorkerNeed]
    device: str
    memory: str
    """The name of its machine's memory (`machine`)."""
    free_bytes: int | None
    """Before any of them starts workers."""

    def shares_gpu(self, other: LauncherMemory) -> bool:
        return ":" in self.device and (self.memory, self.device) == (other.memory, other.device) and bool(self.memory)


def require_memory_together(launchers: Sequence[LauncherMemory]) -> None:
    """Raise if launchers on one machine exceed its free memory together. Each checks its own part itself."""
    for memory in dict.fromkeys(launcher.memory for launcher in launchers if launcher.memory):
        mates = [launcher for launcher in launchers if launcher.memory == memory and launcher.needs]
        if len(mates) > 1:
            need = sum(host_bytes(mate.needs, mate.device) for mate in mates)
            # The highest: workers of an earlier attempt may have been ending when the others looked.
            free = max((mate.free_bytes for mate in mates if mate.free_bytes is not None), default=None)
            names = ", ".join(sorted(mate.name for mate in mates))  # they register in any order
            where = f"free on the host of {names}, for {sum(len(m.needs) for m in mates)} workers"
            _require(_on_host(mates[0].device), need, free, where)


def _on_host(device: str) -> str:
    """What takes memory of the host."""
    if device.startswith("cuda"):
        return "worker processes, and their copies for saves and gradient sums,"
    return "weights, gradients, optimizer state, activations and copies for saves"


def _require(what: str, need: int, there: int | None, where: str) -> None:
    if there is not None and need > there:
        raise AtlasError(
            f"the model does not fit: {what} take {need / GIB:.1f} GiB, and there are {there / GIB:.1f} GiB {where}. "
            "Plan with more stages or more hosts, set zero: 1 or recompute: true, or train a smaller model"
        )


def layers_of(role: WorkerRole, training: TrainingSetup) -> list[str]:
    """The layers of a worker, as checkpoints name them."""
    counts, names = training.model.layer_counts(role.program.num_stages), model_layers(training.model.config)
    last = len(counts) - 1
    found: list[str] = []
    for stage in role.stages:
        first = 1 + sum(counts[:stage])
        found += names[first - (stage == 0) : first + counts[stage] + (stage == last)]
    return found


def state_of(training: TrainingSetup, layers: Sequence[str], shards: int = 1) -> StateBytes:
    """Of these layers at rest. `shards`: pipelines that divide the optimizer state among them."""
    weight = 4 if training.model.dtype == "fp32" else 2
    optimizer = 0
    if training.optimizer.name == "adamw":
        optimizer = ADAMW_BYTES + (MASTER_BYTES if weight < MASTER_BYTES else 0)
    sizes = [size for layer in layers for size in layer_sizes(training.model.config, layer).values()]
    return state_bytes(sum(size.num_values for size in sizes), weight, GRADIENT_BYTES, optimizer, shards)


def free_bytes() -> int | None:
    """Memory that processes of this host may still take: what is available, and what a container's limit leaves."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        available = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
        found += [int(available[1]) * 1024] if available else []
    for limit, used in CGROUP_FILES:
        with contextlib.suppress(OSError, ValueError):  # another version of cgroups, or "max": no limit
            found.append(int(Path(limit).read_text()) - int(Path(used).read_text()))
    return min(found, default=None)
