"""The job: a model, a cluster and the parallelism. What `load_job` returns.

It holds what the user wrote; of the cluster the hardware and its rent, not what runs on it. Missing values that must be
derived (pipelines per cell, placement, layers per stage) are computed by `cost.arrange`, because that needs prices.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, PrivateAttr

from atlas.spec.fabric import Fabric
from atlas.spec.fields import (
    Count,
    Flag,
    Frozen,
    Latitude,
    Longitude,
    Name,
    NonNegative,
    Positive,
    Share,
    Sigma,
    Size,
    Text,
)
from atlas.spec.gpus import GPUS, Gpu
from atlas.weather.tcp_window import WINDOW_BYTES

MAX_RANKS = 1000
"""Stages of a pipeline."""
MAX_MICROBATCHES = 100_000
DEFAULT_EFFICIENCY = 0.5
"""Of a GPU that was not measured: the share of its peak that matrix products reach."""


# ---- the cluster ---------------------------------------------------------------------------------------------------
Unknown = Literal["unknown"]
"""A figure that no source has."""


class DataCenterPrior(Frozen):
    """Figures of a datacenter that come from the catalogue. One that is no longer the same was replaced by the user."""

    usd_per_gpu_hour: NonNegative | Unknown | None = None
    """Rent of one GPU, US dollars an hour."""


class LinkPrior(Frozen):
    """Figures of a link that come from the catalogue. One that is no longer the same was replaced by the user."""

    latency_ms: NonNegative | None = None
    """One-way latency, milliseconds."""
    pair_gbps: Positive | Unknown | None = None
    """The most one pair of nodes gets, Gbit/s."""
    egress_usd_per_gb: NonNegative | Unknown | None = None
    """Price of 10^9 bytes that leave a datacenter."""


class DataCenter(Frozen):
    """One site whose nodes share a fast network."""

    name: Name
    """Its name in links, placements and `--set`."""
    nodes: Count
    """Machines a job may use here. With `power_kw` it may be left out: as many as the power allows."""
    gpus_per_node: Count = 8
    """GPUs of one machine."""
    gpu: Name = "A100-80"
    """A built-in type, or one defined under `cluster.gpus`."""
    net_gbps: Positive | None = None
    """Network of one node inside the datacenter, Gbit/s each way; its workers divide it evenly. Left out: what nodes
    of this GPU type usually have (`net_gbps_per_gpu` of the type)."""
    net_latency_us: NonNegative = 20.0
    """One-way latency inside the datacenter, microseconds."""
    usd_per_gpu_hour: NonNegative = 0.0
    """Rent of one GPU, US dollars an hour."""
    power_kw: Positive | None = None
    """IT power, kilowatts: servers and fabric, without cooling. Left out: no limit."""
    pue: Annotated[float, Field(strict=True, ge=1, le=10, allow_inf_nan=False)] = 1.0
    """Power of the whole site / IT power. Figures of energy are those of the site."""
    fabric: Fabric | None = None
    """The network between the nodes. Left out: no switch is simulated; for power and prices it counts as `rail`."""
    location: tuple[Latitude, Longitude] | None = None
    """`[latitude, longitude]` in degrees, north and east positive: where maps draw it. No cost depends on it."""
    prior: DataCenterPrior = DataCenterPrior()
    """Figures that `atlas init` took from its catalogue: reports call them priors as long as they are unchanged."""


class Wan(Frozen):
    """Default values of every link."""

    latency_ms: NonNegative | None = None
    """One-way latency, milliseconds."""
    pair_gbps: Positive = 5.0
    """The most one pair of nodes gets, however many connections it opens, Gbit/s each way."""
    window_bytes: Size = WINDOW_BYTES
    """Bytes in flight on one TCP connection: alone it carries window / round trip."""
    trunk_gbps: Positive | None = None
    """The most all nodes of two datacenters get together, Gbit/s each way. Left out: no limit of its own."""
    egress_usd_per_gb: NonNegative = 0.0
    """Price of 10^9 bytes that leave a datacenter."""
    trace: Text | None = None
    """File of how rate and latency change over time: CSV or JSON with `time_s, rate, extra_latency_ms`."""
    model: Text | None = None
    """File of `atlas wan learn`: what the path does. `--monte-carlo` draws its weather; without it, its mean counts."""
    cross_traffic: NonNegative = 1.0
    """Factor on the model's cross traffic: 2 is twice as much."""


class Link(Frozen):
    """The path between two datacenters, the same in both directions. Missing keys come from `cluster.wan`."""

    between: tuple[Name, Name]
    """The two datacenters, in either order."""
    latency_ms: NonNegative | None = None
    """One-way latency, milliseconds."""
    pair_gbps: Positive | None = None
    """The most one pair of nodes gets, Gbit/s each way."""
    window_bytes: Size | None = None
    """Bytes in flight on one TCP connection."""
    trunk_gbps: Positive | None = None
    """The most all nodes of the two datacenters get together, Gbit/s each way."""
    egress_usd_per_gb: NonNegative | None = None
    """Price of 10^9 bytes that leave a datacenter over this link."""
    trace: Text | None = None
    """File of how rate and latency change over time."""
    model: Text | None = None
    """File of `atlas wan learn`: what the path does. Not with `trace`."""
    cross_traffic: NonNegative | None = None
    """Factor on the model's cross traffic."""
    prior: LinkPrior = LinkPrior()
    """Figures that `atlas init` took from its catalogue: reports call them priors as long as they are unchanged."""

    def joins(self, a: str, b: str) -> bool:
        return self.between in ((a, b), (b, a))


class Route(Wan):
    """A link with every default filled in: what the cost model reads."""

    latency_ms: NonNegative


class Cluster(Frozen):
    """Datacenters and the links between them."""

    datacenters: tuple[DataCenter, ...] = Field(min_length=1, max_length=1000)
    """In the order in which a pipeline visits them, unless the job has a `placement`."""
    wan: Wan = Wan()
    """Defaults of all links."""
    links: tuple[Link, ...] | None = None
    """The pairs that have a path. Left out: every pair has one, as `wan` describes it."""
    gpus: dict[Name, Gpu] = Field(default_factory=dict, max_length=1000)
    """The user's own GPU types; they hide built-in ones of the same name."""

    def __hash__(self) -> int:
        """`gpus` is a dict, which pydantic's own hash refuses."""
        return hash((self.datacenters, self.wan, self.links, tuple(self.gpus.items())))

    def dc(self, name: str) -> DataCenter:
        return next(dc for dc in self.datacenters if dc.name == name)

    def gpu(self, dc_name: str) -> Gpu:
        return self.gpu_type(self.dc(dc_name).gpu)

    def gpu_type(self, name: str) -> Gpu:
        return self.gpus.get(name) or GPUS[name]

    def node_gbps(self, dc: DataCenter) -> float:
        """`net_gbps` of a datacenter, or what is usual for its GPU type."""
        return dc.net_gbps or self.gpu_type(dc.gpu).net_gbps_per_gpu * dc.gpus_per_node

    def route(self, a: str, b: str) -> Route | None:
        """The path between two datacenters, or None if they are not connected."""
        if self.links is None:
            own: dict[str, object] = {}
        else:
            link = next((link for link in self.links if link.joins(a, b)), None)
            if link is None:
                return None
            own = {key: value for key, value in link if key not in ("between", "prior") and value is not None}
        merged = {**dict(self.wan), **own}
        return Route.model_validate(merged) if merged["latency_ms"] is not None else None


# ---- the job -------------------------------------------------------------------------------------------------------
class Model(Frozen):
    """Dimensions of one decoder-only transformer."""

    family: Literal["gpt", "llama"] = "gpt"
    """gpt: learned positions, biases, two-matrix MLP of 4 x hidden. llama: rotary positions, no biases, gated
    three-matrix MLP."""
    config: Text | None = None
    """A Hugging Face `config.json` that the dimensions come from; keys beside it take precedence."""
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
    batch: Annotated[int, Field(strict=True, ge=1, le=10**15)] | Text | None = None
    """Of one iteration, over all pipelines: tokens (`1M`) or sequences (`512 sequences`). The planner keeps it; left
    out, it is what microbatch, num_microbatches, cells and pipelines make."""
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
    zero: Annotated[int, Field(strict=True, ge=0, le=1)] = 0
    """1: the pipelines divide the optimizer state among them (ZeRO-1)."""
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
    _left_open: tuple[str, ...] = PrivateAttr(default=())
    _powered: tuple[str, ...] = PrivateAttr(default=())
    _groups: tuple[Job, ...] = PrivateAttr(default=())

    @property
    def where(self) -> str:
        """The file that errors about this job name."""
        return self._where

    @property
    def files(self) -> tuple[str, ...]:
        """Every file that this job was read from, and those it names."""
        return self._files

    @property
    def left_open(self) -> tuple[str, ...]:
        """Keys that the file does not state and the planner chooses; ignore their values here."""
        return self._left_open

    @property
    def powered(self) -> tuple[str, ...]:
        """Datacenters whose `nodes` are what their power allows."""
        return self._powered

    @property
    def groups(self) -> tuple[Job, ...]:
        """Of a plan with several groups of pipelines: the job of each, in the order in which they pass sums on."""
        return self._groups

    @property
    def parts(self) -> tuple[Job, ...]:
        """The jobs of all groups, or the job itself."""
        return self._groups or (self,)

    def alone(self, **changes: Any) -> Job:
        """A copy with other values and without groups."""
        found = self.model_copy(update=changes)
        found._groups = ()
        return found

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

    @property
    def tied_bytes(self) -> int:
        """The gradient of a matrix that is both embedding and LM head, on two workers; 0 where they are separate."""
        return self.model.vocab * self.model.hidden * self.gradient_bytes if self.model.tied_embeddings else 0
