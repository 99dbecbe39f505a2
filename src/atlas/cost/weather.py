"""Weather on the links of Costs: what a link's `model:` gives without draws (its mean), and traces drawn from a seed.

Both engines read traces, so a draw is the same for both. Knows models of paths and links, no Programs.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import numpy as np

from atlas.cost.table import Costs, LinkWeather, Trace
from atlas.spec.job import Route
from atlas.weather.draw import LEAST_SHARE, drawn_cross, drawn_rows, mean_rows
from atlas.weather.path_model import MAX_RIVALS, WINDOW_NS, PathModel, load_model

MAX_SPANS = 20_000
"""Windows of one draw. Beyond them a link has its mean."""
HOUR_S = 3600.0
"""An emulator gets at most this much cross traffic. Then it starts again."""


def link_weather(route: Route, src: str, dst: str) -> LinkWeather | None:
    """The weather of one direction of a link; None without a model."""
    return None if route.model is None else LinkWeather(f"{src}>{dst}", route.model, route.cross_traffic)


def mean_trace(weather: LinkWeather) -> Trace:
    """One span: the mean share of the capacity that is left, and the mean delay of cross traffic's queue."""
    rate, late_ns = mean_rows(_model(weather), weather.cross_traffic)
    return Trace((0,), (rate,), (round(late_ns * weather.slower),))


def drawn_trace(weather: LinkWeather, seed: int, run: int, horizon_ns: int) -> Trace:
    """New weather until `horizon_ns`, then the mean. The two directions of a link have draws of their own."""
    window_ns = WINDOW_NS * weather.slower
    num = min(MAX_SPANS, -(-horizon_ns // window_ns))
    rows = drawn_rows(_model(weather), seed, (run, weather.path), num, weather.cross_traffic)
    mean = mean_trace(weather)
    at: list[int] = []
    rate: list[float] = []
    late: list[int] = []
    for k, (one, extra) in enumerate(zip(rows.rate.tolist(), rows.extra_latency_ns.tolist(), strict=True)):
        extra_ns = round(extra * weather.slower)
        if not rate or (one, extra_ns) != (rate[-1], late[-1]):
            at.append(k * window_ns)
            rate.append(one)
            late.append(extra_ns)
    return Trace((*at, num * window_ns), (*rate, *mean.rate), (*late, *mean.extra_latency_ns))


def emulated_cross(weather: LinkWeather, seed: int, seconds: float = HOUR_S) -> tuple[float, ...]:
    """A draw for an emulator: the share of the capacity that cross traffic takes, by tenths of a second."""
    model, num = _model(weather), math.ceil(min(seconds, HOUR_S) * 1e9 / WINDOW_NS)
    cross = drawn_cross(model, seed, (0, weather.path), -(-num // weather.slower))
    shares = cross * (weather.cross_traffic / model.capacity_bps)
    return tuple(np.repeat(shares, weather.slower)[:num].tolist())


def emulated_rivals(weather: LinkWeather) -> int:
    """How many TCP flows an emulator with a queue has in place of drawn cross traffic; 0 if it does not react."""
    return min(MAX_RIVALS, round(_model(weather).rivals * weather.cross_traffic))


def cross_queue_s(weather: LinkWeather) -> float:
    """The longest delay of cross traffic's own queue: a full buffer."""
    model = _model(weather)
    return weather.slower * model.buffer_bytes * 8 / model.capacity_bps


def least_share(costs: Costs) -> float:
    """Of the rate: what a transfer gets in the worst weather."""
    return LEAST_SHARE if paths_with_weather(costs) else 1.0


def paths_with_weather(costs: Costs) -> list[str]:
    """Directions of links (`east>west`) that have a model, in order."""
    return list(dict.fromkeys(link.weather.path for link in costs.links if link.weather is not None))


def drawn(costs: Costs, seed: int, run: int, horizon_ns: int, calm: Collection[str] = ()) -> Costs:
    """The costs with new weather on every link that has a model, except the mean on the paths in `calm`."""
    known: dict[LinkWeather, Trace] = {}
    links = []
    for link in costs.links:
        weather = link.weather
        if weather is not None and weather not in known:
            quiet = weather.path in calm
            known[weather] = mean_trace(weather) if quiet else drawn_trace(weather, seed, run, horizon_ns)
        links.append(link if weather is None else replace(link, trace=known[weather]))
    return replace(costs, links=tuple(links))


def _model(weather: LinkWeather) -> PathModel:
    path = Path(weather.model)
    try:
        found = path.stat()
        return _loaded(path, found.st_mtime_ns, found.st_size)
    except OSError:
        return load_model(path)


@lru_cache(maxsize=64)
def _loaded(path: Path, _changed_ns: int, _num_bytes: int) -> PathModel:
    return load_model(path)
