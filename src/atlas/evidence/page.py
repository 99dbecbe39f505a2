"""The metrics of several data points as one HTML page without scripts and without network requests."""

from __future__ import annotations

import html
from collections.abc import Sequence

from atlas.evidence.data_point import DataPoint
from atlas.evidence.metric import Metric
from atlas.view.chart import page_text, theme

STYLE = """
body { max-width: 1100px; }
table { border-collapse: collapse; margin: 0.6em 0 1.6em; font-variant-numeric: tabular-nums; }
th, td { padding: 3px 14px 3px 0; text-align: left; border-bottom: 1px solid #8884; vertical-align: top; }
td.n, th.n { text-align: right; }
td.why { opacity: 0.75; font-size: 0.88em; }
.wide { overflow-x: auto; }
"""


def metrics_page(points: Sequence[DataPoint], *, against: bool = False) -> str:
    """One column per data point; with `against`, the ratio of the first to the last."""
    title = " and ".join(point.name for point in points)
    body = [f"<h1>Metrics of {html.escape(title)}</h1>"]
    body.append("<ul>" + "".join(f"<li>{html.escape(_about(point))}</li>" for point in points) + "</ul>")
    body.append("<h2>CCL-Bench's metrics, by its definitions</h2>")
    body.append(metrics_table(points, [point.ccl for point in points], against=against))
    body.append("<h2>Atlas's metrics</h2>")
    body.append(metrics_table(points, [point.own for point in points], against=against))
    notes = [f"{point.name}: {finding}" for point in points for finding in point.findings]
    if notes:
        body.append("<h2>Checks</h2><ul>" + "".join(f"<li>{html.escape(note)}</li>" for note in notes) + "</ul>")
    return page_text(f"Metrics: {title}", theme() + STYLE, "".join(body))


def _about(point: DataPoint) -> str:
    card = point.found.card
    words = f"{point.name}: {point.source}, {len(point.ranks)} traces"
    description = "" if card is None else (card.text("description") or "").strip()
    return f"{words}. {description}" if description else f"{words}."


def metrics_table(points: Sequence[DataPoint], metrics: Sequence[Sequence[Metric]], *, against: bool = False) -> str:
    """A table of some metrics, with unit and definition."""
    names = "".join(
        f'<th class="n">{html.escape(point.name)}<br><small>{point.source}</small></th>' for point in points
    )
    ratio = '<th class="n">ratio</th>' if against else ""
    lines = [f"<tr><th>metric</th>{names}<th>unit</th>{ratio}<th>definition</th></tr>"]
    for row in zip(*metrics, strict=True):
        cells = "".join(_cell(metric) for metric in row) + f"<td>{row[0].unit}</td>"
        if against:
            first, last = row[0].value, row[-1].value
            cells += f'<td class="n">{first / last:.3f}x</td>' if first is not None and last else '<td class="n">–</td>'
        why = html.escape(row[0].definition)
        reasons = dict.fromkeys(metric.reason for metric in row if metric.value is None)
        why += "".join(f"<br>No value: {html.escape(reason)}." for reason in reasons)
        lines.append(f'<tr><td>{row[0].name}</td>{cells}<td class="why">{why}</td></tr>')
    return f'<div class="wide"><table>{"".join(lines)}</table></div>'


def _cell(metric: Metric) -> str:
    if metric.value is None:
        return f'<td class="n" title="{html.escape(metric.reason)}">–</td>'
    return f'<td class="n">{metric.value:.6g}</td>'
