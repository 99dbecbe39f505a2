"""Where on a plan's map each datacenter is drawn: by `location` where every one has it, else from the latencies
(classical scaling), so that what is near is drawn near. Knows the frame, draws nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

WIDTH, HEIGHT, MARGIN = 900, 520, 90
FEW = 8
"""Up to so many datacenters there is room for every link and every number."""

Floats = NDArray[np.float64]


def positions(scene: Mapping[str, Any]) -> list[tuple[float, float]]:
    """A place on the picture for each datacenter."""
    dcs = scene["datacenters"]
    if all(dc["location"] is not None for dc in dcs):
        raw = _on_the_globe(np.array([dc["location"] for dc in dcs], np.float64))
    else:
        raw = _scaled(np.array(scene["latency_ms"], np.float64), np.array(scene["joined"], np.bool_))
    return _fitted(raw)


def _on_the_globe(location: Floats) -> Floats:
    """Degrees on a flat map, cut open where the longest stretch without a datacenter is: no link goes around it."""
    latitude, longitude = location.T
    order = np.sort(longitude)
    gaps = np.diff(np.append(order, order[0] + 360))
    left = order[(int(gaps.argmax()) + 1) % len(order)]
    east = (longitude - left) % 360
    return np.stack([east * np.cos(np.radians(latitude.mean())), -latitude], axis=1)


def _scaled(latency: Floats, joined: NDArray[np.bool_]) -> Floats:
    """Classical scaling: the plane in which distances are as near as can be to the latencies."""
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
    # An eigenvector has no sign of its own: let the first datacenter be on the left and above.
    return np.asarray(found * np.where(found[0] > 0, -1.0, 1.0), np.float64)


def _fitted(raw: Floats) -> list[tuple[float, float]]:
    """Into the frame, pushed apart where two would overlap."""
    size = np.ptp(raw, axis=0)
    room = np.array([WIDTH - 2 * MARGIN, HEIGHT - 2 * MARGIN])
    scales = [room[k] / size[k] if size[k] > 1e-9 else np.inf for k in range(2)]
    # Few are drawn to scale; many need the room.
    scale = min(scales) if len(raw) <= FEW else np.array(scales)
    scale = np.where(np.isfinite(scale), scale, 1.0)
    place = (raw - raw.min(axis=0) - size / 2) * scale + np.array([WIDTH, HEIGHT]) / 2
    least = 118.0 if len(raw) <= FEW else 84.0
    for _ in range(80):
        for i in range(len(place)):
            for j in range(i):
                gap = place[i] - place[j]
                length = float(np.hypot(*gap))
                if length < least:
                    push = gap / length if length > 1e-6 else np.array([1.0, 0.3])
                    place[i] += push * (least - length) / 2
                    place[j] -= push * (least - length) / 2
        place = np.clip(place, [MARGIN, MARGIN * 0.7], [WIDTH - MARGIN, HEIGHT - MARGIN * 0.7])
    return [(float(x), float(y)) for x, y in place]
