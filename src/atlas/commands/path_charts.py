"""What the page of a path shows: series of a recorded table and of its model."""

from __future__ import annotations

from typing import Any

import numpy as np

from atlas.view.path_page import PathChart
from atlas.weather.cell import Floats
from atlas.weather.draw import drawn_rows
from atlas.weather.fit import predicted_rtts, window_of
from atlas.weather.packets import LOST, Ints, PacketTable
from atlas.weather.path_model import WINDOW_NS, PathModel

DRAWN_WINDOWS = 6000
"""Ten minutes of new weather."""
MAX_CROSS_PERCENT = 98
"""Cross traffic is drawn as at most this share of the capacity."""
HOUR_S = 3600
MIN_DAY_S = 2 * HOUR_S
"""Of longer recordings, cross traffic is also drawn by hour of the day."""


def path_charts(model: PathModel, table: PacketTable) -> dict[str, PathChart]:
    """Delay and rate, measured and modelled; cross traffic over time and, of long tables, over the day."""
    table = table.part(int(np.searchsorted(table.sent_ns, model.start_ns)), len(table.sent_ns))
    rtts = predicted_rtts(model, table)
    window = window_of(table, model.start_ns)
    both = ~table.lost & (rtts != LOST)
    at = (np.arange(len(model.cross_bps)) * WINDOW_NS / 1e9).tolist()
    share, recorded = 100 * model.cross_bps / model.capacity_bps, model.recorded
    left = drawn_rows(model, 0, ("page",), DRAWN_WINDOWS).rate
    charts = {
        "Delay": PathChart(
            "seconds",
            "round trip (ms), mean of 0.1 s",
            {
                "measured": _means(window[both], table.rtt_ns[both] / 1e6),
                "modelled": _means(window[both], rtts[both] / 1e6),
            },
            "Round trips of the recorded packets: measured, and as the model predicts them. With a good model both "
            "curves agree.",
        ),
        "Rate of the recorded sender": PathChart(
            "seconds",
            "Mbit/s",
            {"measured": _rates(window, table, ~table.lost), "modelled": _rates(window, table, rtts != LOST)},
            "How much of the sender's data arrived. It is below the capacity where the sender sent less, or where "
            "packets were lost.",
        ),
        "Cross traffic": PathChart(
            "seconds",
            "% of the capacity",
            {
                "estimated": [
                    point for point, known in zip(zip(at, share.tolist(), strict=True), recorded, strict=True) if known
                ]
            },
            "What other users of the path sent. Where the sender did not fill the path, this cannot be seen, and the "
            "last value that was seen is repeated.",
        ),
        "Rate that cross traffic leaves": PathChart(
            "% of the time",
            "% of the capacity, at most",
            {"recorded": _ranked(100 - np.minimum(share[recorded], MAX_CROSS_PERCENT)), "drawn": _ranked(100 * left)},
            "For x % of the time a sender gets at most y % of the capacity. Drawn: ten minutes of new cross traffic, "
            "as `atlas simulate --monte-carlo` uses it. Similar curves mean that the drawn cross traffic resembles the "
            "recorded one.",
        ),
    }
    if model.seconds > MIN_DAY_S:
        hour = ((model.start_ns + np.arange(len(share)) * WINDOW_NS) // (HOUR_S * 10**9)) % 24
        points = [
            (float(h), float(share[recorded & (hour == h)].mean())) for h in range(24) if (recorded & (hour == h)).any()
        ]
        words = "Mean of everything recorded in that hour of the day."
        charts["Cross traffic over the day"] = PathChart("hour (UTC)", "% of the capacity", {"mean": points}, words)
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
