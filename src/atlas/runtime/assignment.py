"""Everything one worker needs to know: its Program, what it trains, its device, its network, where it saves.

Plain values that travel as JSON. Loads no torch, so a launcher that only forwards them needs none.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Literal, TypeVar

from pydantic import TypeAdapter

from atlas.errors import AtlasError
from atlas.ir.text import from_text
from atlas.runtime.models.config import DecoderConfig, even_layers, gpt
from atlas.runtime.recipe import LearningRate, OptimizerSettings
from atlas.runtime.topology import GroupShape, WorkerRole
from atlas.wan.transport.base import PeerRoute

T = TypeVar("T")
FILLERS = "atlas.fillers"
"""The group of entry points."""
Json = dict[str, Any]
SumsKind = Literal["ordered", "fast", "transport"]


def require_device_name(name: str) -> None:
    """Raise for a device that no host has; `hardware.require_device` also looks at this host."""
    if re.fullmatch(r"paced|cpu|cuda(:\d+)?", name) is None:
        raise AtlasError(f"device {name!r}: must be paced, cpu, cuda or cuda:N. Write one of them")


# ---- what is trained -------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class ModelChoice:
    """A decoder by its dimensions, and the source of its first weights."""

    config: DecoderConfig
    dtype: Literal["fp32", "bf16"] = "fp32"
    """Of weights, activations and what crosses the WAN; gradients are summed in float32."""
    seed: int = 0
    """Of random weights and of dropout."""
    weights: str = ""
    """A Hugging Face folder of safetensors; empty: random weights."""
    layers_per_stage: tuple[int, ...] = ()
    """Empty: nearly equal, counting embedding and head as a layer each."""

    def layer_counts(self, num_stages: int) -> tuple[int, ...]:
        """Layers of each stage."""
        return self.layers_per_stage or even_layers(self.config.num_layers, num_stages)


@dataclass(frozen=True)
class DataChoice:
    """Where tokens come from. The order of samples follows from the seed alone (docs/data.md)."""

    length: int
    """Tokens of a sequence."""
    microbatch: int
    """Sequences of a microbatch."""
    folder: str = ""
    """Of shards; `SHIPPED` for the text that ships; empty for a made-up task."""
    seed: int = 0


SHIPPED = "shipped"


@dataclass(frozen=True)
class TrainingSetup:
    """What is trained and how: the same for every worker of a run."""

    model: ModelChoice
    data: DataChoice
    optimizer: OptimizerSettings
    max_norm: float | None = None
    """Clip the gradients' global norm to this; needs a Program with NORM. None: no clipping."""
    compile: str = ""
    """The backend of torch's compiler for layers and head: inductor, or aot_eager for tests; empty: run eagerly."""
    sums: SumsKind = "ordered"
    """How gradients are summed over pipelines. ordered: by torch.distributed, added in the order of pipelines; fast:
    added by the backend in an order of its own; transport: over the WAN transport, added in the order of pipelines."""
    zero: int = 0
    """1: each pipeline keeps the optimizer state of its own slice of the parameters (ZeRO-1). 0: of all of them."""

    @property
    def activation_shape(self) -> tuple[int, int, int]:
        """Of what passes between stages: batch, length, width."""
        return self.data.microbatch, self.data.length, self.model.config.width

    @property
    def activation_bytes(self) -> int:
        batch, length, width = self.activation_shape
        return batch * length * width * (4 if self.model.dtype == "fp32" else 2)


def stand_in(
    *,
    num_layers: int = 4,
    width: int = 64,
    num_heads: int = 2,
    vocabulary: int = 64,
    length: int = 32,
    microbatch: int = 4,
    learning_rate: float = 0.1,
) -> TrainingSetup:
    """A GPT small enough for any machine, and a made-up task for it: the default of a rehearsal."""
    config = gpt(num_layers=num_layers, width=width, num_heads=num_heads, vocabulary=vocabulary, max_length=length)
    settings = OptimizerSettings(LearningRate(learning_rate), "sgd")
    return TrainingSetup(ModelChoice(config), DataChoice(length, microbatch), settings)


# ---- where and how a worker runs -------------------------------------------------------------------------------------
@dataclass(frozen=True)
class SaveChoice:
    """Checkpoints (docs/checkpoints.md)."""

    folder: str
    """Of this worker's datacenter."""
    every: int = 0
    """Steps between saves; 0: only when the run is stopped or ends."""
    keep: int = 3
    attempt: int = 0
    """The number of this attempt, counted by the launcher."""
    sources: tuple[str, ...] = ()
    """Folders to resume from."""
    resume: int | None = None
    """The step to resume from, chosen by the launcher for all workers; None: a new run."""
    copy: CopyChoice | None = None
    prunes: bool = True
    """Whether this worker deletes old saves, of all workers of its folder: one of a launcher's does."""


@dataclass(frozen=True)
class CopyChoice:
    """Where this worker's checkpoints are copied to, after its other traffic: a checkpoint server elsewhere."""

    peer: str
    """Its node."""
    route: PeerRoute
    store: str


@dataclass(frozen=True)
class FillerChoice:
    """A filler of this worker's waits (`waits`): an entry point of the group `atlas.fillers`, and its settings."""

    name: str
    settings: Json = field(default_factory=dict)
    host: str = "127.0.0.1"
    """The address of this host inside its datacenter."""


def find_filler(name: str) -> EntryPoint:
    """Raises AtlasError if it is not installed."""
    found = {entry.name: entry for entry in entry_points(group=FILLERS)}
    if name not in found:
        known = ", ".join(sorted(found)) or "none"
        raise AtlasError(f"filler {name!r}: not installed; installed are {known}. Install the package that provides it")
    return found[name]


@dataclass(frozen=True)
class Assignment:
    """For one worker."""

    worker: int
    """Within the Program of its cell."""
    program: str
    """As text: the iterations that are run repeatedly."""
    training: TrainingSetup
    num_steps: int
    first_step: int = 0
    cell: int = 0
    num_cells: int = 1
    groups: tuple[GroupShape, ...] = ()
    """All groups of pipelines, where they are placed differently."""
    group: int = 0
    compute_ns: tuple[tuple[int, ...], ...] = ()
    """[s, k] of its pipeline: op durations of a paced device. Empty: not paced."""
    device: str = "cpu"
    """paced, cpu or cuda:N."""
    tp: int = 1
    """Processes of this node that share each stage by tensor parallelism; on CUDA, on as many GPUs from N on."""
    listen: str = "127.0.0.1"
    """The address to listen on."""
    port: int = 0
    """The port to listen on; 0: the kernel chooses one."""
    streams: int = 0
    """TCP connections to each peer; 0: the transport chooses."""
    certificates: str = ""
    """Folder that `atlas wan certs` wrote; empty: unencrypted, on loopback only."""
    trusted_networks: tuple[str, ...] = ()
    """Networks in which bytes may travel unencrypted, such as inside the datacenter."""
    epoch: int = 0
    """The attempt of the whole group; peers of another attempt are refused."""
    patience_s: float = 20.0
    """How long to wait for a peer before failing."""
    circuits: tuple[tuple[int, int], ...] = ()
    """Pairs of ranks whose circuits change: it asks the launcher before it sends between them, or sums (`circuits`)."""
    save: SaveChoice | None = None
    filler: FillerChoice | None = None
    weights_file: str = ""
    """Where to write the final weights (npz); empty: nowhere."""
    sums_listen: str = "127.0.0.1"
    """The address on which it exchanges with the other pipelines by torch.distributed."""
    shares_gpu: bool = False
    """Whether workers share one GPU: then they sum in host memory, unless `nccl_on_shared_gpu`."""
    nccl_on_shared_gpu: bool = False
    """For tests: each process appears to NCCL as a host of its own. Correct, and slow."""
    skew_ns: int = 0
    """For tests: how far this worker's clock is ahead."""

    @property
    def role(self) -> WorkerRole:
        return WorkerRole(from_text(self.program), self.worker, self.cell, self.num_cells, self.groups, self.group)


def read(cls: type[T], data: Mapping[str, Any]) -> T:
    """A dataclass from its `asdict`, nested dataclasses and tuples included."""
    kind: Any = cls
    found: T = _adapter(kind).validate_python(data)
    return found


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)
