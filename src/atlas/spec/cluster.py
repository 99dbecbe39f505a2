"""The cluster a user describes: datacenters, the links between them, and defaults for those links.

It holds the hardware and its rent, not what runs on it.
"""

from __future__ import annotations

from pydantic import Field

from atlas.spec.fields import Count, Frozen, Latitude, Longitude, Name, NonNegative, Positive, Size, Text
from atlas.spec.gpus import GPUS, Gpu

WINDOW_BYTES = 3_000_000
"""Window of one TCP connection: the papers' 1220 / 600 / 396 / 293 Mbit/s at 10 / 20 / 30 / 40 ms are about 3 MB
over the round trip."""


class DataCenter(Frozen):
    """One site whose nodes share a fast network."""

    name: Name
    """How links, placements and `--set` call it."""
    nodes: Count
    """Machines a job may use here."""
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
    location: tuple[Latitude, Longitude] | None = None
    """`[latitude, longitude]` in degrees, north and east positive: where the map of a plan draws it. Nothing else."""


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

    def joins(self, a: str, b: str) -> bool:
        return {a, b} == set(self.between)


class Route(Frozen):
    """A link with every default filled in: what the cost model reads."""

    latency_ms: NonNegative
    pair_gbps: Positive
    window_bytes: Size
    trunk_gbps: Positive | None
    egress_usd_per_gb: NonNegative
    trace: Text | None


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
            own = {key: value for key, value in link if key != "between" and value is not None}
        merged = {**dict(self.wan), **own}
        return Route.model_validate(merged) if merged["latency_ms"] is not None else None
