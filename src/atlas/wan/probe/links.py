"""Measurements as the `links:` section of a cluster file, with dates and percentiles in comments. It replaces the old
section without changing the rest of the file. And warnings where a cluster file differs from what was measured.

Knows the text of a cluster file, not its classes: the caller passes plain figures.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from atlas.errors import SpecError
from atlas.wan.probe.survey import LinkMeasurement
from atlas.weather.tcp_window import WINDOW_BYTES

TOLERANCE, WINDOW_TOLERANCE = 0.10, 0.25
"""Smaller relative differences cause no warning: repeated probes of one path differ by up to this."""
LATENCY_SLACK_MS = 1.0
"""Added to the tolerance of latencies, for short paths."""
MAX_WINDOW_BYTES = 100_000_000
"""A larger window is written as this: it never limits a path."""


class LinkFigures(NamedTuple):
    """The figures of a link in a cluster file. None: not known, or not given."""

    latency_ms: float
    """One way."""
    pair_gbps: float
    window_bytes: int | None
    trunk_gbps: float | None


def to_figures(found: LinkMeasurement) -> LinkFigures:
    """Median latency, the caps that were reached, and the slower direction where the two differ."""
    # If one connection fills the path, its window is only known to be at least this.
    is_known = found.window_limited or found.window_bytes > WINDOW_BYTES
    return LinkFigures(
        latency_ms=_round(found.rtt.median_s * 500),
        pair_gbps=_round(found.pair_bps / 1e9),
        window_bytes=min(found.window_bytes, MAX_WINDOW_BYTES) if is_known else None,
        trunk_gbps=_round(found.trunk_bps / 1e9) if found.trunk_bps is not None else None,
    )


PRICE = "egress_usd_per_gb"
Unmeasured = Mapping[frozenset[str], Mapping[str, Any]]
"""By pair of datacenters: keys of its link that a probe does not measure."""


def links_yaml(measurements: Iterable[LinkMeasurement], indent: int = 0, unmeasured: Unmeasured | None = None) -> str:
    """The text of the `links:` section."""
    lines = ["links:"]
    for found in measurements:
        lines += [f"  {line}" for line in _comments(found)]
        lines.append(f"  - between: [{', '.join(found.between)}]")
        lines += [f"    {key}: {value}" for key, value in to_figures(found)._asdict().items() if value is not None]
        more = (unmeasured or {}).get(frozenset(found.between), {})
        lines += [f"    {key}: {json.dumps(value)}" for key, value in more.items()]
    return "".join(" " * indent + line + "\n" for line in lines)


def _comments(found: LinkMeasurement) -> list[str]:
    rtt = found.rtt
    when = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(found.at))
    there, back = (", ".join(f"{g.streams}: {g.bps / 1e9:.3g}" for g in way) for way in (found.sweep, found.back))
    lines = [
        f"# measured {when}; RTT ms min {rtt.min_s * 1e3:.2f}, median {rtt.median_s * 1e3:.2f}, "
        f"p95 {rtt.p95_s * 1e3:.2f}, jitter {rtt.jitter_s * 1e3:.2f}",
        f"# Gbit/s by streams: {there}; {found.streams} streams fill the path"
        + ("" if found.window_limited else f"; the window is at least {found.window_bytes} bytes"),
        f"# other direction: {back}" + (", slower" if _less(found.back_bps, found.there_bps) else ""),
    ]
    if found.together_bps:
        alone, together = (
            " + ".join(f"{bps / 1e9:.3g}" for bps in rates) for rates in (found.alone_bps, found.together_bps)
        )
        lines.append(f"# pairs alone {alone}, together {together}: the {found.cap} cap binds")
    else:
        lines.append("# only one node pair: a trunk cap cannot be seen")
    return lines


def with_links(text: str, measurements: Sequence[LinkMeasurement], where: str = "cluster file") -> str:
    """The text of a cluster file (or a job with an inline cluster) with new links. Every other character stays."""
    try:
        root = yaml.compose(text)
    except yaml.YAMLError as error:
        raise _bad(where, f"is not YAML ({error})", "Fix it first") from None
    cluster = _value(root, "cluster") or root
    if not isinstance(cluster, yaml.MappingNode):
        raise _bad(where, "holds no cluster", "Name the file that has `datacenters`")
    if cluster.flow_style:
        raise _bad(where, "has its cluster in one line, {...}", "Write one key per line, or use --out")
    indent = cluster.value[0][0].start_mark.column if cluster.value else 0
    section = links_yaml(measurements, indent, _unmeasured(text))
    for key, value in cluster.value:
        if key.value == "links":
            start = key.start_mark.index - key.start_mark.column
            return text[:start] + section + text[_end(text, value) :]
    end = _end(text, cluster)
    gap = "" if not end or text[end - 1] == "\n" else "\n"
    return text[:end] + gap + section + text[end:]


def _unmeasured(text: str) -> Unmeasured:
    """The price of egress, and that it is a prior: a measurement does not replace it."""
    data = yaml.safe_load(text)
    cluster = data.get("cluster", data) if isinstance(data, dict) else None
    links = cluster.get("links") if isinstance(cluster, dict) else None
    found: dict[frozenset[str], dict[str, Any]] = {}
    for link in links if isinstance(links, list) else []:
        between = link.get("between") if isinstance(link, dict) else None
        if isinstance(between, list):
            kept = {PRICE: link[PRICE]} if PRICE in link else {}
            prior = link.get("prior")
            if isinstance(prior, dict) and PRICE in prior:
                kept["prior"] = {PRICE: prior[PRICE]}
            found[frozenset(map(str, between))] = kept
    return found


def write_links(path: Path, measurements: Sequence[LinkMeasurement]) -> None:
    path.write_text(with_links(path.read_text(), measurements, str(path)))


def drift(assumed: Mapping[frozenset[str], LinkFigures], measured: Iterable[LinkMeasurement]) -> list[str]:
    """One warning for every assumption that no longer holds. `assumed` is by pair of datacenters."""
    warnings: list[str] = []
    for found in measured:
        now, name = to_figures(found), " - ".join(found.between)
        if not found.window_limited:
            now = now._replace(window_bytes=None)
        then = assumed.get(frozenset(found.between))
        if then is None:
            warnings.append(f"{name}: measured, but the file has no such link")
            continue
        warnings += [f"{name}: {text}" for text in _changes(then, now)]
    return warnings


def _changes(then: LinkFigures, now: LinkFigures) -> Iterable[str]:
    if abs(now.latency_ms - then.latency_ms) > TOLERANCE * then.latency_ms + LATENCY_SLACK_MS:
        yield f"latency is {now.latency_ms:g} ms one way, {then.latency_ms:g} were assumed"
    if _less(now.pair_gbps, then.pair_gbps) or _less(then.pair_gbps, now.pair_gbps):
        yield f"a node pair gets {now.pair_gbps:g} Gbit/s, {then.pair_gbps:g} were assumed"
    if now.trunk_gbps is not None and then.trunk_gbps is None:
        yield f"all pairs together get {now.trunk_gbps:g} Gbit/s: a trunk cap, and none was assumed"
    elif _less(now.trunk_gbps, then.trunk_gbps) or _less(then.trunk_gbps, now.trunk_gbps):
        yield f"the trunk carries {now.trunk_gbps:g} Gbit/s, {then.trunk_gbps:g} were assumed"
    if _less(now.window_bytes, then.window_bytes, WINDOW_TOLERANCE):
        yield f"one connection's window is {now.window_bytes:,} bytes, {then.window_bytes:,} were assumed"


def _less(a: float | None, b: float | None, tolerance: float = TOLERANCE) -> bool:
    return a is not None and b is not None and a < (1 - tolerance) * b


def _value(node: yaml.Node | None, key: str) -> yaml.Node | None:
    if isinstance(node, yaml.MappingNode):
        for name, value in node.value:
            if name.value == key and isinstance(value, yaml.MappingNode):
                return value
    return None


def _end(text: str, node: yaml.Node) -> int:
    """The end of a block's own lines. Comments and blank lines after it belong to what follows."""
    end = node.end_mark.index
    if not getattr(node, "flow_style", False) and not isinstance(node, yaml.ScalarNode):
        body = text[node.start_mark.index : end].splitlines(keepends=True)
        while body and (not body[-1].strip() or body[-1].lstrip().startswith("#")):
            end -= len(body.pop())
        return end
    line_end = text.find("\n", end)
    return len(text) if line_end < 0 else line_end + 1


def _round(value: float) -> float:
    return float(f"{value:.4g}")


def _bad(where: str, rule: str, remedy: str) -> SpecError:
    return SpecError(where=where, key="links", rule=rule, remedy=remedy)
