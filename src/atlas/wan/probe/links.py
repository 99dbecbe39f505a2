"""What was measured, as a cluster file says it: the `links:` section, with dates and percentiles in comments, put in
the place of the old one without touching the rest of the file; and a warning where a plan's assumptions have gone.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import yaml

from atlas.errors import SpecError
from atlas.spec.cluster import WINDOW_BYTES, Link, Route
from atlas.wan.probe.survey import LinkMeasurement

Pair = frozenset[str]
TOLERANCE = 0.10
LATENCY_SLACK_MS = 1.0
WINDOW_TOLERANCE = 0.25


def to_link(found: LinkMeasurement) -> Link:
    """The cluster file's view: median latency, caps that were reached, the slower way where the two differ."""
    return Link(
        between=found.between,
        latency_ms=_round(found.rtt.median_s * 500),
        pair_gbps=_round(found.pair_bps / 1e9),
        window_bytes=min(found.window_bytes, 100_000_000) if _tells_window(found) else None,
        trunk_gbps=_round(found.trunk_bps / 1e9) if found.trunk_bps is not None else None,
    )


def _tells_window(found: LinkMeasurement) -> bool:
    """Where one connection fills the path, its window is only known to be no smaller."""
    return found.window_limited or found.window_bytes > WINDOW_BYTES


def links_yaml(measurements: Iterable[LinkMeasurement], indent: int = 0) -> str:
    """The `links:` section."""
    lines = ["links:"]
    for found in measurements:
        link = to_link(found)
        lines += [f"  {line}" for line in _comments(found)]
        lines.append(f"  - between: [{', '.join(link.between)}]")
        values = {
            "latency_ms": link.latency_ms,
            "pair_gbps": link.pair_gbps,
            "window_bytes": link.window_bytes,
            "trunk_gbps": link.trunk_gbps,
        }
        lines += [f"    {key}: {value}" for key, value in values.items() if value is not None]
    return "".join(" " * indent + line + "\n" for line in lines)


def _comments(found: LinkMeasurement) -> list[str]:
    rtt = found.rtt
    when = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(found.at))
    there, back = (", ".join(f"{g.streams}: {g.bps / 1e9:.3g}" for g in way) for way in (found.sweep, found.back))
    lines = [
        f"# measured {when}; RTT ms min {rtt.min_s * 1e3:.2f}, median {rtt.median_s * 1e3:.2f}, "
        f"p95 {rtt.p95_s * 1e3:.2f}, jitter {rtt.jitter_s * 1e3:.2f}",
        f"# Gbit/s by streams: {there}; {found.streams} fill it"
        + ("" if found.window_limited else f"; the window is at least {found.window_bytes} bytes"),
        f"# the other way: {back}" + (", less than there" if _less(found.back_bps, found.there_bps) else ""),
    ]
    if found.together_bps:
        alone, together = (
            " + ".join(f"{bps / 1e9:.3g}" for bps in rates) for rates in (found.alone_bps, found.together_bps)
        )
        lines.append(f"# pairs alone {alone}, together {together}: the cap is of the {found.cap}")
    else:
        lines.append("# one node pair only: whether a trunk caps several is not known")
    return lines


def with_links(text: str, measurements: Sequence[LinkMeasurement], where: str = "cluster file") -> str:
    """A cluster file (or a job with its cluster inline) with new links; every other character stays."""
    try:
        root = yaml.compose(text)
    except yaml.YAMLError as error:
        raise _bad(where, f"is not YAML ({error})", "Fix it first") from None
    cluster = _value(root, "cluster") or root
    if not isinstance(cluster, yaml.MappingNode):
        raise _bad(where, "holds no cluster", "Name the file that has `datacenters`")
    if cluster.flow_style:
        raise _bad(where, "writes its cluster in one line, {...}", "Write one key a line, or use --out")
    indent = cluster.value[0][0].start_mark.column if cluster.value else 0
    section = links_yaml(measurements, indent)
    for key, value in cluster.value:
        if key.value == "links":
            start = key.start_mark.index - key.start_mark.column
            return text[:start] + section + text[_end(text, value) :]
    end = _end(text, cluster)
    gap = "" if not end or text[end - 1] == "\n" else "\n"
    return text[:end] + gap + section + text[end:]


def write_links(path: Path, measurements: Sequence[LinkMeasurement]) -> None:
    path.write_text(with_links(path.read_text(), measurements, str(path)))


def drift(assumed: Mapping[Pair, Route | Link], measured: Iterable[LinkMeasurement]) -> list[str]:
    """Sentences for every assumption that no longer holds; nothing where all do."""
    warnings: list[str] = []
    for found in measured:
        now = to_link(found)
        if not found.window_limited:
            now = now.model_copy(update={"window_bytes": None})
        name = " - ".join(now.between)
        then = assumed.get(frozenset(now.between))
        if then is None:
            warnings.append(f"{name}: measured, but the plan has no such link")
            continue
        warnings += [f"{name}: {text}" for text in _changes(then, now)]
    return warnings


def _changes(then: Route | Link, now: Link) -> Iterable[str]:
    if then.latency_ms is not None and now.latency_ms is not None:
        allowed_ms = TOLERANCE * then.latency_ms + LATENCY_SLACK_MS
        if abs(now.latency_ms - then.latency_ms) > allowed_ms:
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
    """Where a block's own lines end: comments and blank lines after it belong to what follows."""
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
    return SpecError(where=where, key="links", value=None, rule=rule, remedy=remedy)
