"""Sailor's network: a fit of the bandwidth of each pair of (zone, GPU type, count) by message size, and its price.

    GB/s = a log2(MB)^2 + b log2(MB) + c        seconds(x) = x / 1e9 / GB/s        no latency, no upper cap

The fit was made on large messages and goes through zero for small ones. Below 1 % of the pair's measured maximum
we take that 1 % (`clamped` says when), where Sailor's own code returns a negative or an absurd time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from atlas.sailor.documents import FETCH, SailorFile, is_number
from atlas.spec.document import nearest

FLOOR_SHARE = 0.01
"""A fit is never taken as less than this share of the pair's measured maximum."""
MAX_USD_PER_GB = 1e6
_FUNCTIONS: dict[bool, tuple[Any, Any]] = {True: (math.log2, max), False: (np.log2, np.maximum)}
"""log2 and max: of one number (numpy's take ten times as long for it), or of an array."""


class ZoneGpu(NamedTuple):
    """GPUs of one type in one zone: one side of a transfer."""

    zone: str
    gpu: str


class BandwidthFit(NamedTuple):
    """Bandwidth by size between two ends."""

    a: float
    b: float
    c: float
    floor_gb_per_s: float

    def raw_gb_per_s(self, num_bytes: Any) -> Any:
        """The fit as it is, negative where it goes negative; of one size or of an array of them."""
        log2, most = _FUNCTIONS[isinstance(num_bytes, int | float)]
        x = log2(most(num_bytes, 1e-300) / 1e6)
        return (self.a * x + self.b) * x + self.c

    def seconds(self, num_bytes: Any) -> Any:
        """Of one message or of an array of them; 0 for no bytes."""
        _, most = _FUNCTIONS[isinstance(num_bytes, int | float)]
        return most(num_bytes, 0.0) / 1e9 / most(self.raw_gb_per_s(num_bytes), self.floor_gb_per_s)

    def clamped(self, num_bytes: float) -> bool:
        return num_bytes > 0 and self.raw_gb_per_s(num_bytes) < self.floor_gb_per_s


class Network:
    """`multizone_bandwidths_het.json`, read pair by pair as asked for."""

    def __init__(self, document: SailorFile) -> None:
        self.document = document
        self._fits: dict[tuple[ZoneGpu, int, ZoneGpu, int], BandwidthFit | None] = {}

    def fit(self, source: ZoneGpu, source_gpus: int, target: ZoneGpu, target_gpus: int) -> BandwidthFit:
        """The pair's fit, or the error that the file has none."""
        found = self.find(source, source_gpus, target, target_gpus)
        if found is None:
            self.document.at(source.zone, source.gpu, str(source_gpus), target.zone, target.gpu, str(target_gpus))
            raise AssertionError("the line above raises where `find` finds nothing")
        return found

    def find(self, source: ZoneGpu, source_gpus: int, target: ZoneGpu, target_gpus: int) -> BandwidthFit | None:
        """The pair's fit, or None where it was not measured."""
        key = (source, source_gpus, target, target_gpus)
        if key not in self._fits:
            self._fits[key] = self._read(source, source_gpus, target, target_gpus)
        return self._fits[key]

    def require_zone(self, zone: str, gpu: str) -> None:
        """The error that a zone, or a GPU type in it, was never measured."""
        zones = self.document.keys()
        if zone not in zones:
            rule = "this zone of the trace has no bandwidths"
            raise self.document.bad([zone], None, rule, nearest(zone, zones))
        if gpu not in self.document.keys(zone):
            rule = f"GPU type {gpu!r} has no bandwidths in {zone}"
            raise self.document.bad([zone, gpu], None, rule, nearest(gpu, self.document.keys(zone)))

    def _read(self, source: ZoneGpu, source_gpus: int, target: ZoneGpu, target_gpus: int) -> BandwidthFit | None:
        node = self.document.root
        keys = (source.zone, source.gpu, str(source_gpus), target.zone, target.gpu, str(target_gpus))
        for key in keys:
            if not isinstance(node, dict) or key not in node:
                return None
            node = node[key]
        try:
            (a, b, c), most = node
        except (TypeError, ValueError):
            a = b = c = most = None
        if not all(map(is_number, (a, b, c, most))) or most <= 0:
            rule = "must be [[a, b, c], bytes per second], all numbers, the last positive"
            raise self.document.bad(keys, node, rule, FETCH)
        return BandwidthFit(float(a), float(b), float(c), FLOOR_SHARE * most / 1e9)


class EgressPrices:
    """`egress_usd_per_gb.json`: what 10^9 bytes from one zone to another cost."""

    def __init__(self, document: SailorFile, zones: tuple[str, ...]) -> None:
        self.document = document
        self._usd: Mapping[tuple[str, str], float] = {
            (a, b): document.number(a, b, high=MAX_USD_PER_GB) for a in zones for b in zones
        }

    def usd_per_byte(self, source: str, target: str) -> float:
        return self._usd[source, target] / 1e9
