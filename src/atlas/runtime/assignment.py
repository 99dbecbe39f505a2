"""Everything one worker is told: its Program, what it trains, on which device, over which network, where it saves.

Plain values that travel as JSON. Loads no torch, so that a launcher that only passes it on needs none. Says nothing of
how any of it is done.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal, TypeVar

from atlas.runtime.models.config import DecoderConfig, gpt
from atlas.runtime.recipe import LearningRate, OptimizerSettings

T = TypeVar("T")
Json = dict[str, Any]


# ---- what is trained -------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class ModelChoice:
    """A decoder by its dimensions, and where its first weights come from."""

    config: DecoderConfig
    dtype: Literal["fp32", "bf16"] = "fp32"
    """Of weights, activations and what crosses the WAN; gradients are summed in float32."""
    seed: int = 0
    """Of random weights and of dropout."""
    weights: str = ""
    """A Hugging Face folder of safetensors; empty: random weights."""
    layers_per_stage: tuple[int, ...] = ()
    """Empty: nearly equal, embedding and head counted as a layer each."""


@dataclass(frozen=True)
class DataChoice:
    """Where tokens come from. The order of samples follows from the seed alone (docs/data.md)."""

    length: int
    """Tokens of a sequence."""
    microbatch: int
    """Sequences in one."""
    folder: str = ""
    """Of shards; `SHIPPED` for the text that ships; empty for a made-up task with something to learn."""
    seed: int = 0


SHIPPED = "shipped"


@dataclass(frozen=True)
class TrainingSetup:
    """What is trained and how: the same for every worker of a run."""

    model: ModelChoice
    data: DataChoice
    optimizer: OptimizerSettings
    max_norm: float | None = None
    """Clip the gradients' global norm to this; needs a Program with NORM. None: do not."""

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
    optimizer: str = "sgd",
    learning_rate: float = 0.1,
) -> TrainingSetup:
    """A GPT small enough for any machine, and a made-up task for it: what a rehearsal trains."""
    config = gpt(num_layers=num_layers, width=width, num_heads=num_heads, vocabulary=vocabulary, max_length=length)
    settings = OptimizerSettings(LearningRate(learning_rate), optimizer)
    return TrainingSetup(ModelChoice(config), DataChoice(length, microbatch), settings)


# ---- where and how a worker works ------------------------------------------------------------------------------------
@dataclass(frozen=True)
class SaveChoice:
    """Checkpoints (docs/checkpoints.md)."""

    folder: str
    """Of this worker's datacenter: where its parts go."""
    every: int = 0
    """Steps from one save to the next; 0: only when the run is stopped or ends."""
    keep: int = 3
    attempt: int = 0
    """As the launcher counted."""
    sources: tuple[str, ...] = ()
    """Folders to resume from."""
    resume: int | None = None
    """The step to resume from, chosen by the launcher for all; None: begin anew."""
    copy: CopyChoice | None = None


@dataclass(frozen=True)
class CopyChoice:
    """Where this worker's parts are copied to, behind its own traffic: the keeper of another datacenter."""

    peer: str
    """Its node."""
    host: str
    port: int
    shelf: str


@dataclass(frozen=True)
class FillerChoice:
    """Who may use this worker's waits (`waits`): an entry point of the group `atlas.fillers`, and its settings."""

    name: str
    settings: Json = field(default_factory=dict)


@dataclass(frozen=True)
class Assignment:
    """One worker's."""

    worker: int
    """Within the Program of its cell."""
    program: str
    """As text: the iterations that are run over and over. Whether pipelines share the WAN is its word."""
    training: TrainingSetup
    num_steps: int
    first_step: int = 0
    cell: int = 0
    num_cells: int = 1
    compute_ns: tuple[tuple[int, ...], ...] = ()
    """[s, k] of its pipeline: the pace of a paced device. Empty: nothing is paced."""
    device: str = "cpu"
    """paced, cpu or cuda:N."""
    tp: int = 1
    """Processes of this node that share each stage by tensor parallelism; on CUDA, on as many GPUs from N on."""
    listen: str = "127.0.0.1"
    """The address to listen on."""
    streams: int = 0
    """TCP connections to each peer: 1, or 0 for as many as the transport likes."""
    certificates: str = ""
    """Folder that `atlas wan certs` wrote; empty: plain, on loopback only."""
    trusted_networks: tuple[str, ...] = ()
    """Beside certificates: where bytes may travel plain, such as inside the datacenter."""
    epoch: int = 0
    """One life of the whole group; peers of another are turned away."""
    patience_s: float = 20.0
    """How long to wait for a peer before complaining."""
    save: SaveChoice | None = None
    filler: FillerChoice | None = None
    weights_file: str = ""
    """Where to leave the final weights (npz); empty: nowhere."""
    skew_ns: int = 0
    """For tests: pretend that this host's clock is ahead by so much."""

    def to_json(self) -> Json:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: Json) -> Assignment:
        return read(cls, data)


# ---- JSON back into dataclasses --------------------------------------------------------------------------------------
def read(cls: type[T], data: Json) -> T:
    """A dataclass of this module from what `asdict` made of it."""
    hints = _hints(typing.cast(Any, cls))
    return cls(**{name: _value(hints[name], value) for name, value in data.items()})


@cache
def _hints(cls: Any) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _value(hint: Any, value: Any) -> Any:
    """Lists become tuples and mappings dataclasses where the field says so."""
    if value is None:
        return None
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is tuple:
        return tuple(_value(inner[0], item) for item in value)
    if origin in (types.UnionType, typing.Union):
        return _value(next(option for option in inner if option is not types.NoneType), value)
    return read(hint, value) if dataclasses.is_dataclass(hint) and isinstance(hint, type) else value
