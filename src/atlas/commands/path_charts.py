"""What the page of a path shows: series of a recorded table and of its model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from atlas.view.chart import Points
from atlas.weather.cell import Floats
from atlas.weather.draw import drawn_rows
from atlas.weather.fit import predicted_rtts, window_of
from atlas.weather.packets import LOST, Ints, PacketTable
from atlas.weather.path_model import WINDOW_NS, PathModel

Charts = dict[str, tuple[str, str, Mapping[str, Points]]]
DRAWN_WINDOWS = 6000
"""Ten minutes of new weather."""


def path_charts(model: PathModel, table: PacketTable) -> Charts:
    """Delay and rate, measured and modelled; cross traffic over time and, of long tables, over the day."""
    table = table.part(int(np.searchsorted(table.sent_ns, model.start_ns)), len(table.sent_ns))
    rtts = predicted_rtts(model, table)
    window = window_of(table, model.start_ns)
    both = ~table.lost & (rtts != LOST)
    at = (np.arange(len(model.cross_bps)) * WINDOW_NS / 1e9).tolist()
    share = 100 * model.cross_bps / model.capacity_bps
    left = drawn_rows(model, 0, ("page",), DRAWN_WINDOWS).rate
    charts: Charts = {
        "Delay": (
            "seconds",
            "round trip (ms), mean of a window",
            {
                "measured": _means(window[both], table.rtt_ns[both] / 1e6),
                "modelled": _means(window[both], rtts[both] / 1e6),
            },
        ),
        "Rate of the sender": (
            "seconds",
            "Mbit/s",
            {"measured": _rates(window, table, ~table.lost), "modelled": _rates(window, table, rtts != LOST)},
        ),
        "Cross traffic": ("seconds", "% of the capacity", {"estimated": list(zip(at, share.tolist(), strict=True))}),
        "Rate left by cross traffic": (
            "% of the time at most",
            "% of the capacity",
            {"recorded": _ranked(100 - np.minimum(share, 98)), "ten minutes drawn with seed 0": _ranked(100 * left)},
        ),
    }
    if model.seconds > 2 * 3600:
        hour = ((model.start_ns + np.arange(len(share)) * WINDOW_NS) // 3_600_000_000_000) % 24
        points = [(float(h), float(share[hour == h].mean())) for h in range(24) if (hour == h).any()]
        charts["Cross traffic over the day"] = ("hour (UTC)", "% of the capacity", {"mean": points})
    return charts


def _means(window: Ints, values: Any) -> list[tuple[float, float]]:
    count = np.bincount(window)
    total = np.bincount(window, values)
    return [(k * WINDOW_NS / 1e9, float(total[k] / count[k])) for k in np.flatnonzero(count).tolist()]


def _rates(window: Ints, table: PacketTable, arrived: Any) -> list[tuple[float, float]]:
    rate = np.bincount(window[arrived], table.num_bytes[arrived]) * (8e3 / WINDOW_NS)
    return [(k * WINDOW_NS / 1e9, value) for k, value in enumerate(rate.tolist())]


def _ranked(values: Floats) -> list[tuple[float, float]]:
    ranked = np.sort(values)
    return list(zip((100 * np.arange(len(ranked)) / len(ranked)).tolist(), ranked.tolist(), strict=True))
