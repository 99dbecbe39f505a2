"""Where a map draws each datacenter, and the outline of land behind them.

By its `location` where every datacenter has one, else by the latencies (classical scaling), so that near datacenters
are drawn near each other. Knows no SVG but the data of a path.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from atlas.view.page import asset

FEW = 8
"""Up to this number of datacenters, every link and every number is drawn."""
Floats = NDArray[np.float64]


class Picture(NamedTuple):
    """The size of a map, in pixels of its text."""

    width: int
    height: int
    margin: tuple[int, int]
    apart: tuple[float, float]
    """Least distance of two datacenters: of few, of many."""
    radius: tuple[float, float]
    line: int
    """Height of a line of text."""
    legend: bool


PAGE = Picture(900, 520, (90, 90), (118.0, 84.0), (26.0, 19.0), 15, legend=True)
PANEL = Picture(640, 150, (90, 34), (72.0, 60.0), (16.0, 13.0), 15, legend=False)
"""A part of a page, without a legend."""


class MapPlaces(NamedTuple):
    at: list[tuple[float, float]]
    """By datacenter: x and y in pixels."""
    coast: str
    """The outline of land as the data of an SVG path; "" where positions are not places on the globe."""


def map_places(scene: Mapping[str, Any], picture: Picture = PAGE) -> MapPlaces:
    """Where the datacenters of a scene are drawn."""
    dcs = scene["datacenters"]
    if not all(dc["location"] is not None for dc in dcs):
        raw = _scaled(np.array(scene["latency_ms"], np.float64), np.array(scene["joined"], np.bool_))
        scale, shift = _fit(raw, picture, keep=len(raw) <= FEW and picture.legend)
        return MapPlaces(_apart(raw * scale + shift, picture), "")
    location = np.array([dc["location"] for dc in dcs], np.float64)
    left, squeeze = _cut(location)
    raw = _flat(location, left, squeeze)
    scale, shift = _fit(raw, picture, keep=len(raw) <= FEW)
    return MapPlaces(_apart(raw * scale + shift, picture), _coast(left, squeeze, scale, shift, picture))


# ---- the globe -----------------------------------------------------------------------------------------------------
def _cut(location: Floats) -> tuple[float, float]:
    """Where a flat map begins: after the longest stretch without a datacenter, so that no link crosses its edge. And
    the width of a degree of longitude in degrees of latitude."""
    latitude, longitude = location.T
    order = np.sort(longitude)
    gaps = np.diff(np.append(order, order[0] + 360))
    return float(order[(int(gaps.argmax()) + 1) % len(order)]), float(np.cos(np.radians(latitude.mean())))


def _flat(location: Floats, left: float, squeeze: float) -> Floats:
    latitude, longitude = location.T
    return np.stack([(longitude - left) % 360 * squeeze, -latitude], axis=1)


def _coast(left: float, squeeze: float, scale: Floats, shift: Floats, picture: Picture) -> str:
    """Every ring that the picture shows, once for each turn around the globe that it shows."""
    parts = []
    for ring in _rings():
        for turn in (-360.0, 0.0, 360.0):
            flat = np.stack([(ring[:, 0] - left + turn) * squeeze, -ring[:, 1]], axis=1) * scale + shift
            (x0, y0), (x1, y1) = flat.min(axis=0), flat.max(axis=0)
            if x1 > 0 and x0 < picture.width and y1 > 0 and y0 < picture.height:
                parts.append("M" + "L".join(f"{x:.0f} {y:.0f}" for x, y in flat.tolist()) + "Z")
    return "".join(parts)


@cache
def _rings() -> list[Floats]:
    lines = [line for line in asset("coast.txt").splitlines() if not line.startswith("#")]
    return [np.array([pair.split(",") for pair in line.split()], np.float64) / 2 for line in lines]


# ---- latencies -----------------------------------------------------------------------------------------------------
def _scaled(latency: Floats, joined: NDArray[np.bool_]) -> Floats:
    """Classical scaling: points in a plane whose distances approximate the latencies best."""
    n = len(latency)
    if n == 1:
        return np.zeros((1, 2))
    far = float(latency[joined].max(initial=1.0)) or 1.0
    distance = np.where(joined, np.maximum(latency, 0.05 * far), 1.5 * far)
    np.fill_diagonal(distance, 0.0)
    if np.allclose(distance[~np.eye(n, dtype=bool)], distance[0, 1]):
        turn = 2 * np.pi * np.arange(n) / n - np.pi / 2
        return np.stack([np.cos(turn), np.sin(turn)], axis=1) if n > 2 else np.array([[0.0, 0.0], [1.0, 0.0]])
    centre = np.eye(n) - 1 / n
    values, vectors = np.linalg.eigh(-0.5 * centre @ distance**2 @ centre)
    found = vectors[:, -2:][:, ::-1] * np.sqrt(np.maximum(values[-2:][::-1], 0.0))
    # The sign of an eigenvector is arbitrary: put the first datacenter at the upper left.
    return np.asarray(found * np.where(found[0] > 0, -1.0, 1.0), np.float64)


# ---- the picture ---------------------------------------------------------------------------------------------------
def _fit(raw: Floats, picture: Picture, *, keep: bool) -> tuple[Floats, Floats]:
    """(scale, shift) that fill the picture. `keep`: keep the aspect ratio."""
    size, middle = np.ptp(raw, axis=0), (raw.min(axis=0) + raw.max(axis=0)) / 2
    whole = np.array([picture.width, picture.height], np.float64)
    inner = whole - 2 * np.array(picture.margin)
    scales = [float(inner[k] / size[k]) if size[k] > 1e-9 else np.inf for k in range(2)]
    found = np.array([min(scales)] * 2 if keep else scales)
    scale = np.where(np.isfinite(found), found, 1.0)
    return scale, whole / 2 - middle * scale


def _apart(place: Floats, picture: Picture) -> list[tuple[float, float]]:
    """Moved apart where two would overlap."""
    least = picture.apart[len(place) > FEW]
    low = np.array([picture.margin[0], picture.margin[1] * 0.7])
    high = np.array([picture.width, picture.height]) - picture.margin
    for _ in range(80):
        for i in range(len(place)):
            for j in range(i):
                gap = place[i] - place[j]
                length = float(np.hypot(*gap))
                if length < least:
                    push = gap / length if length > 1e-6 else np.array([1.0, 0.3])
                    place[i] += push * (least - length) / 2
                    place[j] -= push * (least - length) / 2
        place = np.clip(place, low, high)
    return [(float(x), float(y)) for x, y in place]
