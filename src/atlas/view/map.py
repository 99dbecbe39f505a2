"""A plan on a schematic map: datacenters laid out by distance, stages inside them, links coloured by load, beside the
plans that were not chosen, and why. One HTML page without scripts and without network requests.

Takes the plain scene that `planner.report` makes; `view.places` says where each datacenter is drawn.
"""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from atlas.view.chart import front_svg, page_text, theme
from atlas.view.page import asset
from atlas.view.places import FEW, PAGE, MapPlaces, Picture, map_places
from atlas.view.table import seconds

ROOM = 170
"""A shorter link of a live map has room for its load only; one of half this length, for no text."""
CHAR = 7.4
"""Mean width of a character of a label."""
ALONG = (0.5, 0.42, 0.58, 0.34, 0.66)
"""Where on its link a label may be, best first."""
SHOWN = 12
"""Plans in the table."""
LOADS = ((0.1, "#56b4e9", "under 10 %"), (0.5, "#009e73", "under 50 %"), (0.85, "#e69f00", "under 85 %"))
"""By load of a link: the share below which it has this colour, and the text of the legend."""
FULL = ("#d55e00", "85 % or more")
GROUPS = ("#0072b2", "#cc79a7", "#8c6d1f", "#009e73", "#d55e00", "#56b4e9")
"""Colours of groups of pipelines."""


Plain = Mapping[str, Any]
"""A scene, or a plan, a datacenter or a link of it."""
Places = Mapping[str, tuple[float, float]]
"""By datacenter: x and y in pixels."""


def plan_page(scene: Plain, *, notes: Sequence[str] = ()) -> str:
    """The page as text."""
    places = map_places(scene)
    # Families where the scene has them, else the winner and the next plans.
    drawn = scene.get("families") or scene["plans"]
    labels = [_tab(k, plan["row"], "families" in scene) for k, plan in enumerate(drawn)]
    first = next((k for k, plan in enumerate(drawn) if not plan["row"]["lost"]), 0)
    style = theme() + asset("map.css") + asset("mapsvg.css")
    style += "".join(
        f"#t{k}:checked~.tabs label[for=t{k}]{{background:var(--accent);color:#fff;border-color:var(--accent)}}"
        f"#t{k}:focus-visible~.tabs label[for=t{k}]{{outline:2px solid var(--ink);outline-offset:2px}}"
        f"#t{k}:checked~.maps #m{k}{{display:block}}\n"
        for k in range(len(drawn))
    )
    inputs = "".join(
        f'<input type="radio" name="t" id="t{k}"{" checked" if k == first else ""}>' for k in range(len(drawn))
    )
    tabs = "".join(f'<label for="t{k}">{html.escape(label)}</label>' for k, label in enumerate(labels))
    maps = "".join(
        f'<figure id="m{k}"><div class="wide">{map_svg(scene, plan, places)}</div>{_caption(plan)}</figure>'
        for k, plan in enumerate(drawn)
    )
    front = ""
    if scene["priced"]:
        chart = front_svg(scene["rows"], scene["front"], title="")
        front = f'<h2>Time and cost</h2><div class="wide">{chart}</div>'
    said = "".join(f"<p>{html.escape(note)}</p>" for note in notes)
    edges = "".join(f"<li>{html.escape(text)}</li>" for text in scene.get("break_even", ()))
    edges = f"<h2>Break-even points</h2><ul>{edges}</ul>" if edges else ""
    title = f"{scene['title']}: the plan"
    body = (
        f'<p class="soft">{html.escape(title)} <span class="badge">simulated</span></p>'
        f"<h1>{html.escape(scene.get('verdict') or title)}</h1>"
        f'<section>{inputs}<div class="tabs">{tabs}</div><div class="maps">{maps}</div></section>'
        f'<div class="notes">{said}</div>{edges}'
        f'<h2>The chosen plan and the others</h2><p class="soft">{html.escape(scene["told"])}</p>{_table(scene)}{front}'
    )
    return page_text(title, style, body)


def _tab(k: int, row: Plain, by_family: bool) -> str:
    name = row["kind"] if by_family else f"plan {k + 1}" if k else "winner"
    return f"{name} · {seconds(row['iteration_s'])}"


# ---- one map ---------------------------------------------------------------------------------------------------
def map_svg(scene: Plain, plan: Plain, places: MapPlaces, picture: Picture = PAGE) -> str:
    """Datacenters, the links in use, and which stages each holds."""
    names = [dc["name"] for dc in scene["datacenters"]]
    place = dict(zip(names, places.at, strict=True))
    few = len(names) <= FEW
    body = [f'<path class="coast" d="{places.coast}"/>', _idle(scene, names, places.at)]
    links = sorted(plan["links"], key=lambda link: bool(link["pipeline"]))
    drawn = _Drawing(plan, place, picture.radius[not few], one_line=not picture.legend)
    taken = [box for dc in scene["datacenters"] for box in _dc_boxes(dc, drawn)]
    body += [_link(link, place, few, picture.line, taken) for link in links]
    body += [_dc(dc, drawn) for dc in scene["datacenters"]]
    top, bottom = 0.0, float(picture.height)
    if picture.legend:
        low, high = min(y for _, y in places.at), max(y for _, y in places.at)
        top, bottom = low - 72, high + 110
        used = {frozenset((link["a"], link["b"])) for link in plan["links"]}
        pairs = {frozenset((names[i], names[j])) for i in range(len(names)) for j in range(i) if scene["joined"][i][j]}
        body.append(_legend(bottom, plan, few and bool(pairs - used)))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 {top:.0f} {picture.width} {bottom - top:.0f}" role="img" '
        f'aria-label="map of datacenters and links">{"".join(body)}</svg>'
    )


def _idle(scene: Plain, names: Sequence[str], at: Sequence[tuple[float, float]]) -> str:
    """Links that carry nothing, where there are few enough datacenters."""
    if len(names) > FEW:
        return ""
    lines = ""
    for i in range(len(names)):
        for j in range(i):
            if scene["joined"][i][j]:
                (x1, y1), (x2, y2) = at[i], at[j]
                lines += f'<path class="idle" d="M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}"/>'
    return lines


def load_color(load: float) -> str:
    return next((color for limit, color, _ in LOADS if load < limit), FULL[0])


class _Drawing(NamedTuple):
    """What all datacenters of one map have in common."""

    plan: Plain
    place: Places
    radius: float
    one_line: bool
    """Whether the name and the stages of a datacenter share a line."""


class _Box(NamedTuple):
    """Of a text or a disc, in pixels."""

    left: float
    top: float
    right: float
    bottom: float

    def meets(self, other: _Box) -> bool:
        return (
            self.left < other.right and other.left < self.right and self.top < other.bottom and other.top < self.bottom
        )


def _dc_boxes(dc: Plain, drawn: _Drawing) -> list[_Box]:
    """Where `_dc` draws the disc and the name."""
    (x, y), stages = drawn.place[dc["name"]], _stages(dc["name"], drawn.plan) or "not used"
    under, radius = _under(dc["name"], drawn), drawn.radius
    length, lines = max(len(dc["name"]), len(stages)), 2
    if drawn.one_line:
        length, lines = len(dc["name"]) + (1 + len(stages) if len(drawn.place) <= 4 else 0), 1
    half = CHAR * length / 2
    name = _Box(x - half, y + under - 11, x + half, y + under + 4 + 13 * (lines - 1))
    return [_Box(x - radius, y - radius, x + radius, y + radius), name]


def _placed(
    words: Sequence[str], ends: tuple[tuple[float, float], tuple[float, float]], line: int, taken: list[_Box]
) -> str:
    """A label on the middle of its link, or moved along it to where it covers no other text; else nothing: the link's
    tooltip and the list beside a live map have the figures."""
    (x1, y1), (x2, y2) = ends
    half = CHAR * max(map(len, words), default=0) / 2
    for share in ALONG if half else ():
        x, y = x1 + share * (x2 - x1), y1 + share * (y2 - y1)
        first = y + 4 - line * (len(words) - 1) - 6 * (len(words) > 1)
        box = _Box(x - half, first - 11, x + half, first + line * (len(words) - 1) + 4)
        if not any(box.meets(other) for other in taken):
            taken.append(box)
            return "".join(
                f'<text class="load" x="{x:.1f}" y="{first + line * k:.1f}">{html.escape(text)}</text>'
                for k, text in enumerate(words)
            )
    return ""


def _link(link: Plain, place: Places, few: bool, line: int, taken: list[_Box]) -> str:
    """Solid where pipelines cross, dashed where groups only exchange gradients."""
    (x1, y1), (x2, y2) = place[link["a"]], place[link["b"]]
    color = load_color(link["load"])
    usd = link.get("usd_per_hour", 0.0)
    prior = ", a prior" if link.get("prior") else ""
    hint = (
        f"{link['a']} - {link['b']}: {100 * link['load']:.0f} % of {link['gbps']:.3g} Gbit/s each way, "
        f"{link['gb']:.3g} GB an iteration, {link['latency_ms']:.3g} ms one way{prior}"
        + (f", ${usd:,.2f} an hour" if usd else "")
        + ("" if link["pipeline"] else ", gradients between groups")
    )
    dash = "" if link["pipeline"] else ' stroke-dasharray="2 7"'
    width = 3 + 5 * min(1.0, link["load"]) if link["pipeline"] else 2.2
    length = math.hypot(x2 - x1, y2 - y1)
    label = f"{100 * link['load']:.0f}%" if few or link["pipeline"] else ""
    words = [label]
    if few and "gbit_s" in link and length < ROOM:
        words = [label if length > ROOM / 2 else ""]
    elif few and "gbit_s" in link:  # of a run: what it sends now
        words = [f"{link['gbit_s']:.3g} of {link['gbps']:.3g} Gbit/s", f"{label} load · {link['latency_ms']:.3g} ms"]
    elif few:
        words = [f"{link['latency_ms']:.3g} ms · {link['gbps']:.3g} Gbit/s{' (prior)' if prior else ''}"]
        words.append(f"{label} load" + (f" · ${usd:,.0f}/hour" if usd else ""))
    ends = (x1, y1), (x2, y2)
    texts = _placed(words, ends, line, taken) or _placed([label], ends, line, taken)
    return (
        f'<g><title>{html.escape(hint)}</title><path d="M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}" stroke="{color}" '
        f'stroke-width="{width:.1f}" stroke-linecap="round"{dash}/>{texts}</g>'
    )


def _dc(dc: Plain, drawn: _Drawing) -> str:
    """A disc with the GPUs in use, a ring for their share, and the name on the side that has no link."""
    plan, place, radius, one_line = drawn
    (x, y), used = place[dc["name"]], int(plan["gpus"].get(dc["name"], 0))
    under = _under(dc["name"], drawn)
    share = used / dc["gpus"]
    turn = 2 * math.pi * share
    color = _owner(dc["name"], plan)
    ring = (
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" fill="none" style="stroke:{color};fill:none"/>' if used else ""
    )
    if 0 < share < 0.995:
        ring = (
            f'<path class="ring" d="M{x:.1f} {y - radius:.1f}A{radius} {radius} 0 {int(share > 0.5)} 1 '
            f'{x + radius * math.sin(turn):.1f} {y - radius * math.cos(turn):.1f}" stroke="{color}"/>'
        )
    stages = _stages(dc["name"], plan)
    price = f", ${dc['usd_per_gpu_hour']:g} an hour each" if dc["usd_per_gpu_hour"] else ""
    hint = f"{dc['name']}: {used:,} of {dc['gpus']:,} {dc['gpu']}{price}. {stages}"
    label, count = stages or "not used", f"{used:,}" if used < 1000 or not one_line else f"{used / 1000:.2g}k"
    words = "</text>"
    if one_line and len(place) <= 4:
        words = f'<tspan class="small" dx="5">{html.escape(label)}</tspan></text>'
    elif not one_line:
        words = f'</text><text class="small" x="{x:.1f}" y="{y + under + 13:.1f}">{html.escape(label)}</text>'
    return (
        f'<g class="{"dc" if used else "dc off"}"><title>{html.escape(hint)}</title>'
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}"/>{ring}'
        f'<text class="count" x="{x:.1f}" y="{y + 4:.1f}">{count}</text>'
        f'<text class="name" x="{x:.1f}" y="{y + under:.1f}">{html.escape(dc["name"])}{words}</g>'
    )


def _under(name: str, drawn: _Drawing) -> float:
    """How far below its middle a datacenter has its name; negative: above it."""
    plan, place, radius, one_line = drawn
    above = _leaves_downwards(name, plan, place) and not (one_line and place[name][1] < 50)
    return -radius - (7 if one_line else 20) if above else radius + 14


def _leaves_downwards(name: str, plan: Plain, place: Places) -> bool:
    """Whether a pipeline's link runs steeply downwards from here, through the place of the name, and none upwards."""
    links = [link for link in plan["links"] if link["pipeline"] and name in (link["a"], link["b"])]
    ends = [link["a"] if link["b"] == name else link["b"] for link in links]
    x, y = place[name]
    slopes = [(place[end][1] - y) / max(abs(place[end][0] - x), 1.0) for end in ends]
    return any(slope > 0.6 for slope in slopes) and not any(slope < -0.6 for slope in slopes)


def _owner(name: str, plan: Plain) -> str:
    for k, places in enumerate(plan["groups"]):
        if any(dc == name for dc, _ in places):
            return GROUPS[k % len(GROUPS)]
    return GROUPS[0]


def _stages(name: str, plan: Plain) -> str:
    """`stages 0-3`."""
    for places in plan["groups"]:
        first = 0
        for dc, count in places:
            if dc == name:
                return f"stage {first}" if count == 1 else f"stages {first}–{first + count - 1}"
            first += count
    return ""


def _legend(bottom: float, plan: Plain, has_idle: bool) -> str:
    """Only what this map shows."""
    colors = {load_color(link["load"]) for link in plan["links"]}
    parts = [(color, text) for color, text in [*((c, t) for _, c, t in LOADS), FULL] if color in colors]
    items = "".join(
        f'<path d="M{12 + 112 * k} {bottom - 14:.0f}h22" stroke="{color}" stroke-width="5"/>'
        f'<text class="key" x="{40 + 112 * k}" y="{bottom - 10:.0f}">{text}</text>'
        for k, (color, text) in enumerate(parts)
    )
    if parts:
        items = f'<text class="key" x="12" y="{bottom - 32:.0f}">load of a link, busier direction</text>{items}'
    words = ["number: GPUs in use", "ring: their share, one colour per group"]
    words += ["dots: gradients between groups"] if any(not link["pipeline"] for link in plan["links"]) else []
    words += ["thin dashes: a link that is not used"] if has_idle else []
    text = " · ".join(words)
    return f'{items}<text class="key" x="{PAGE.width - 12}" y="{bottom - 32:.0f}" text-anchor="end">{text}</text>'


# ---- words -----------------------------------------------------------------------------------------------------
def _caption(plan: Plain) -> str:
    """The caption of a map."""
    row = plan["row"]
    money = f", ${row['usd_per_iteration']:,.4g} an iteration" if row["usd_per_iteration"] else ""
    lost = f" Not chosen: {row['lost']}." if row["lost"] else ""
    most_s, part = max((row["parts_s"].get(part, 0.0), name) for part, (_, name) in PARTS.items())
    share = f" {100 * most_s / row['iteration_s']:.0f} % of its critical path is {part}."
    return (
        f"<figcaption><b>{html.escape(row['where'])}</b> — {html.escape(row['how'])}, {row['num_gpus']:,} GPUs, "
        f"{html.escape(seconds(row['iteration_s']))} an iteration, {row['tokens_per_s']:,.0f} tokens/s"
        f"{money}.{html.escape(lost)}{share}</figcaption>"
    )


PARTS = {
    "compute": ("#0072b2", "computing"),
    "wan": ("#d55e00", "the WAN"),
    "sync": ("#9a86c4", "gradient sync"),
    "step": ("#7b858f", "the optimizer"),
    "wait": ("#d3d8dc", "waiting"),
}
"""By part of a critical path: colour and name."""
LETTERS = (
    "tp: GPUs that share each layer · pp: stages of a pipeline · dp: pipelines, in brackets cells x pipelines of a "
    "cell that take turns on the WAN · b: sequences in a microbatch"
)


def _table(scene: Plain) -> str:
    """One row for each plan, with its critical path as a bar."""
    longest = max(row["iteration_s"] for row in scene["rows"][:SHOWN])
    head = "<tr><th>stages in</th><th>parallelism</th><th class=n>GPUs</th><th class=n>iteration</th>"
    head += (
        "<th class=n>$/iteration</th>" if scene["priced"] else ""
    ) + "<th>critical path</th><th>why not chosen</th></tr>"
    lines = ""
    for k, row in enumerate(scene["rows"][:SHOWN]):
        bar = "".join(
            f'<i style="width:{100 * row["parts_s"].get(part, 0.0) / longest:.2f}%;background:{color}" '
            f'title="{name} {row["parts_s"].get(part, 0.0):.3g} s"></i>'
            for part, (color, name) in PARTS.items()
        )
        cost = f"<td class=n>{row['usd_per_iteration']:,.4g}</td>" if scene["priced"] else ""
        lines += (
            f"<tr{' class=best' if k == 0 else ''}><td class=where>{html.escape(row['where'])}</td>"
            f"<td>{html.escape(row['how'])}</td><td class=n>{row['num_gpus']:,}</td>"
            f"<td class=n>{html.escape(seconds(row['iteration_s']))}</td>{cost}"
            f'<td><div class="bar">{bar}</div></td><td>{html.escape(row["lost"] or "chosen")}</td></tr>'
        )
    keys = " ".join(f'<span><i style="background:{color}"></i>{name}</span>' for color, name in PARTS.values())
    return (
        f'<div class="wide"><table>{head}{lines}</table></div><p class="keys">{keys}</p><p class="soft">{LETTERS}</p>'
    )
