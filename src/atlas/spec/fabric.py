"""The network inside a datacenter: its kind, and the parts it is built of, with their watts and prices.

Built-in parts carry their source and date; a `parts` file replaces any of them. What a fabric of these parts needs for
a datacenter is counted in `spec.power`.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from atlas.spec.document import read_yaml, wrong
from atlas.spec.fields import Count, Flag, Frozen, NonNegative, Text
from atlas.spec.refusal import validated

Kind = Literal["rail", "fat-tree", "flat-rail", "photonic"]
KINDS: tuple[Kind, ...] = ("rail", "fat-tree", "flat-rail", "photonic")
MOST_MS = 3_600_000.0
"""A reconfiguration takes at most an hour."""


class Fabric(Frozen):
    """The network between the nodes of one datacenter."""

    kind: Kind = "rail"
    """rail: leaf switches by rail and a spine. fat-tree. flat-rail: one switch a rail, no spine. photonic: optical
    circuit switches, which change circuits within an iteration."""
    reconfigure_ms: Annotated[float, Field(strict=True, ge=0, le=MOST_MS, allow_inf_nan=False)] = 200.0
    """photonic: time from asking a switch for other circuits until they carry data, milliseconds."""
    provision: Flag = True
    """photonic: ask for the next circuits as soon as the last transfer on the old ones has arrived. false: when the
    first transfer needs them."""
    ports_per_gpu: Annotated[int, Field(strict=True, ge=1, le=64)] = 2
    """photonic: circuits that one GPU can have at once. Two make a ring."""
    traffic: Literal["ring", "all-to-all"] = "ring"
    """What the job does between the nodes of a rail: pipeline hops and ring sums, or exchanges of each with each."""
    electrical_gbps: NonNegative = 0.0
    """photonic: a small packet network beside the circuits, Gbit/s of one node. Slices for the WAN use it."""
    fallback: Literal["ring", "none"] = "none"
    """photonic: what `atlas train` does when a switch fails. ring: go on with the circuits as they are."""
    parts: Text | None = None
    """File with watts and prices of the parts; it replaces built-in figures one by one."""


class FabricParts(Frozen):
    """Watts and dollars of what a fabric is built of."""

    source: Text
    """Where the figures come from."""
    date: Text
    """When they were true."""
    switch_ports: Count
    """Ports of one electrical switch."""
    switch_watts: NonNegative
    """Of one electrical switch."""
    switch_usd: NonNegative
    """Of one electrical switch."""
    transceiver_watts: NonNegative
    """Of one optical transceiver."""
    transceiver_usd: NonNegative
    """Of one optical transceiver."""
    transceiver_at_switch: Flag
    """Whether a port of an electrical switch has one too; a GPU's port always has."""
    optical_port_watts: NonNegative
    """Of one port of an optical circuit switch."""
    optical_port_usd: NonNegative
    """Of one port of an optical circuit switch."""
    optical_switch_ports: Count | None = None
    """The most ports that the optical switch of one rail can have. Left out: as many as are needed."""


OPUS = "Opus, Photonic Rails in ML Datacenters, arXiv 2602.12521"
PARTS_400G = FabricParts(
    source=OPUS,
    date="2026-02",
    switch_ports=64,
    switch_watts=2524,
    switch_usd=37_299,
    transceiver_watts=10,
    transceiver_usd=879,
    transceiver_at_switch=True,
    optical_port_watts=75 / 192,
    optical_port_usd=520,
)
PARTS_800G = PARTS_400G.model_copy(
    update={
        "switch_ports": 144,
        "switch_watts": 7000.0,
        "switch_usd": 149_939.0,
        "transceiver_watts": 16.0,
        "transceiver_at_switch": False,
    }
)


def parts_of(fabric: Fabric, gbps_per_gpu: float) -> FabricParts:
    """The parts for GPUs of this network rate: built in, or with the changes of the user's file."""
    built_in = PARTS_400G if gbps_per_gpu <= 400 else PARTS_800G
    return built_in if fabric.parts is None else _read_parts(fabric.parts, built_in)


@lru_cache(maxsize=64)
def _read_parts(path: str, built_in: FabricParts) -> FabricParts:
    document = read_yaml(Path(path), key="parts")
    if not isinstance(document.data, dict):
        raise wrong(path, "parts", "a parts file is a mapping of keys", "Write, for example, switch_watts: 2524")
    stated = {"source": path, "date": "not stated", **document.data}
    data, remedy = {**built_in.model_dump(), **stated}, "Watts and dollars are 0 or more"
    return validated(FabricParts, data, lambda keys: document.origin(keys, path), remedy)
