"""The job: a model, a cluster and the parallelism. What `load_job` returns.

It holds what the user wrote. Missing values that must be derived (pipelines per cell, placement, layers per stage) are
computed by `cost.arrange`, because that needs prices.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PrivateAttr

from atlas.spec.cluster import Cluster
from atlas.spec.fields import Count, Flag, Frozen, Name, NonNegative, Positive, Share, Sigma, Size, Text

MAX_RANKS = 1000
MAX_MICROBATCHES = 100_000
DEFAULT_EFFICIENCY = 0.5


class Model(Frozen):
    """Dimensions of one decoder-only transformer."""

    family: Literal["gpt", "llama"] = "gpt"
    """gpt: learned positions, biases, two-matrix MLP of 4 x hidden. llama: rotary positions, no biases, gated
    three-matrix MLP."""
    config: Text | None = None
    """A Hugging Face `config.json` that the dimensions come from; keys written beside it win."""
    layers: Annotated[int, Field(strict=True, ge=1, le=512)]
    """Transformer layers."""
    hidden: Size
    """Width of the residual stream (H)."""
    heads: Count
    """Attention heads."""
    kv_heads: Count | None = None
    """Heads of keys and values when fewer (grouped queries). Left out: as many as `heads`."""
    head_dim: Count | None = None
    """Width of one head. Left out: hidden / heads."""
    ffn: Size | None = None
    """Inner width of the MLP. Left out: 4 x hidden (gpt), 8/3 x hidden rounded up to 256 (llama)."""
    gated: Flag | None = None
    """Whether the MLP has three matrices. Left out: as the family has it."""
    vocab: Size = 50_304
    """Rows of the embedding and of the LM head."""
    seq_len: Size
    """Tokens of one training sequence (L)."""
    tied_embeddings: Flag = False
    """Whether embedding and LM head are one matrix. Over several stages both ends hold it and must agree on its
    gradient every iteration, over the WAN."""

    @property
    def num_kv_heads(self) -> int:
        return self.kv_heads or self.heads

    @property
    def head_width(self) -> int:
        return self.head_dim or self.hidden // self.heads

    @property
    def is_gated(self) -> bool:
        return self.family == "llama" if self.gated is None else self.gated

    @property
    def ffn_width(self) -> int:
        if self.ffn is not None:
            return self.ffn
        return 4 * self.hidden if self.family == "gpt" else -(-8 * self.hidden // 3 // 256) * 256


class Place(Frozen):
    """A run of consecutive pipeline workers in one datacenter."""

    dc: Name
    """The datacenter's name."""
    stages: Annotated[int, Field(strict=True, ge=1, le=MAX_RANKS)]
    """How many of the `pp` workers of each pipeline it holds."""


class Jitter(Frozen):
    """Random spread of durations for Monte-Carlo runs: sigma of a log-normal factor, so 0.05 is about 5 %."""

    compute: Sigma = 0.0
    """Spread of every op, at most 3."""
    wan: Sigma = 0.0
    """Spread of every transfer between datacenters."""
    seed: Annotated[int, Field(strict=True, ge=0, le=2**32 - 1)] = 0
    """The same seed gives the same run."""


class Job(Frozen):
    """One training job."""

    name: Text = "job"
    """Shown in tables and titles."""
    model: Model
    """What is trained."""
    cluster: Cluster
    """Where: inline, or the path of a cluster file."""
    microbatch: Count = 1
    """Sequences in one microbatch (b)."""
    num_microbatches: Annotated[int, Field(strict=True, ge=1, le=MAX_MICROBATCHES)]
    """Microbatches per pipeline and iteration (M)."""
    tp: Annotated[int, Field(strict=True, ge=1, le=1024)] = 1
    """Tensor parallelism: GPUs of one worker, in one node or in several whole ones."""
    pp: Annotated[int, Field(strict=True, ge=1, le=MAX_RANKS)]
    """Pipeline parallelism: workers of one pipeline."""
    interleave: Annotated[int, Field(strict=True, ge=1, le=64)] = 1
    """Stages each worker holds (virtual stages); a pipeline has pp x interleave stages."""
    cells: Annotated[int, Field(strict=True, ge=1, le=100_000)] = 1
    """DP-cells (D)."""
    pipelines_per_cell: Annotated[int, Field(strict=True, ge=1, le=4096)] | None = None
    """Pipelines that take turns on the WAN (C). Left out: WAN time of an activation over one node pair / forward
    time of a stage, rounded, at least 1, at most what the GPUs allow."""
    placement: Annotated[tuple[Place, ...], Field(min_length=1, max_length=MAX_RANKS)] | None = None
    """Which datacenter holds which run of the pipeline, first stage first. Left out: every datacenter, in file
    order, in proportion to the workers it has room for."""
    layers_per_stage: tuple[Annotated[int, Field(strict=True, ge=1, le=512)], ...] | None = None
    """Layers of each stage, first to last. Left out: the split that makes the slowest stage fastest, embedding and
    LM head counted."""
    recompute: Flag = True
    """Keep only a stage's input and recompute the rest before its backward."""
    precision: Literal["bf16", "fp16", "fp32"] = "bf16"
    """Of weights, activations and what crosses the WAN."""
    gradient_bytes: Annotated[int, Field(strict=True, ge=1, le=16)] = 4
    """Bytes per parameter of the accumulated gradient."""
    optimizer_bytes: Annotated[int, Field(strict=True, ge=0, le=64)] = 12
    """Bytes per parameter of optimizer state (Adam with fp32 master weights: 12)."""
    memory_gib: Positive | None = None
    """Memory of one GPU that the job may use, GiB. Left out: 92 % of what the GPU has; all of it under another
    runtime, whose overheads are counted."""
    reserved_gib: NonNegative = 0.0
    """Of that, set aside for others (weights and KV cache of a prefill service), GiB per GPU."""
    runtime: Literal["atlas", "megatron", "torch"] = "atlas"
    """What executes the job: `atlas train`, or a framework whose habits the costs then follow."""
    efficiency: Share | None = None
    """Share of the GPU's peak that the matrix products reach. Left out: by `calibrated`; 0.5 where there are no
    constants."""
    calibrated: Flag | None = None
    """Price compute by the `calibration` of the GPU types, fitted on measured runs. Left out: if every type of the
    cluster has one and no `efficiency` is stated."""
    profile: Text | None = None
    """File of measured times; it replaces FLOPs and efficiency."""
    jitter: Jitter = Jitter()
    """Spread of durations for Monte-Carlo runs."""

    _where: str = PrivateAttr(default="job")
    _files: tuple[str, ...] = PrivateAttr(default=())

    @property
    def where(self) -> str:
        """The file that errors about this job name."""
        return self._where

    @property
    def files(self) -> tuple[str, ...]:
        """Every file that this job was read from, and those it names."""
        return self._files

    @property
    def is_calibrated(self) -> bool:
        """Whether constants of the GPU types price this job; one rule for all its types, so that they compare."""
        if self.calibrated is not None:
            return self.calibrated
        return self.efficiency is None and not self.without_constants

    @property
    def without_constants(self) -> tuple[str, ...]:
        """GPU types of the cluster that have no calibration."""
        names = dict.fromkeys(dc.gpu for dc in self.cluster.datacenters)
        return tuple(name for name in names if self.cluster.gpu_type(name).calibration is None)

    @property
    def stated_efficiency(self) -> float:
        """Where no constants price the job."""
        return DEFAULT_EFFICIENCY if self.efficiency is None else self.efficiency

    @property
    def num_stages(self) -> int:
        return self.pp * self.interleave

    @property
    def element_bytes(self) -> int:
        """Bytes of one weight or activation."""
        return 4 if self.precision == "fp32" else 2

    @property
    def activation_bytes(self) -> int:
        """Bytes across a boundary for one microbatch, forward and backward: b * L * H elements."""
        return self.microbatch * self.model.seq_len * self.model.hidden * self.element_bytes
