"""`atlas report`: one self-contained HTML page of a run, or of several side by side.

No scripts, no network requests. Says of every run whether its times are simulated, emulated or measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from atlas.evidence.one_step import middle_iteration
from atlas.evidence.page import STYLE as TABLE_STYLE
from atlas.evidence.page import metrics_table
from atlas.evidence.run_summary import PARTS, RunFigure, RunSummary
from atlas.view.chart import curves_svg, page_text, theme
from atlas.view.svg import svg_text

COLORS = ("#0072b2", "#d55e00", "#e69f00", "#cc79a7", "#9aa3ab", "#c9cfd4")
"""Of `PARTS`."""
LEAST_SHARE = 0.005
"""Smaller shares of the time, which would be shown as 0 %, are left out."""
MAX_POINTS = 400
"""Of a line in a chart: longer logs are thinned."""
STYLE = f"""{TABLE_STYLE}
.verdict {{ font-size: 1.15em; margin: 0.4em 0 1em; }}
.badge {{ font-size: 0.75em; font-weight: 700; text-transform: uppercase; letter-spacing: .05em; border-radius: 3px;
  padding: 1px 6px; background: var(--badge); color: var(--badge-ink); }}
.best {{ background: var(--best); font-weight: 650; }}
.share {{ display: flex; height: 22px; border-radius: 3px; overflow: hidden; max-width: 760px; }}
.share i {{ display: block; height: 100%; }}
.legend {{ display: flex; flex-wrap: wrap; gap: 2px 16px; margin: 6px 0 18px; font-size: 0.9em; }}
.legend i {{ display: inline-block; width: 13px; height: 11px; border-radius: 2px; margin-right: 5px; }}
.picture svg {{ background: #fff; border-radius: 4px; }}
pre, code {{ white-space: pre-wrap; overflow-wrap: anywhere; }}
h2 {{ margin: 1.5em 0 0.4em; font-size: 1.15em; }}
"""


def report_page(runs: Sequence[RunSummary], title: str = "") -> str:
    """One column per run."""
    title = title or " and ".join(run.name for run in runs)
    parts = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="verdict">{escape(verdict(runs))}</p>',
        "<h2>Figures</h2>",
        _figures(runs),
        "<h2>Where the workers' time goes</h2>",
        _shares(runs),
        _curves(runs),
        _pictures(runs),
        "<h2>How it ran</h2>",
        _about(runs),
        _metrics(runs),
        _notes(runs),
    ]
    return page_text(f"Report: {title}", theme() + STYLE, "".join(parts))


def verdict(runs: Sequence[RunSummary]) -> str:
    """One or two sentences that can be quoted."""
    timed = [(run.figures["iteration"].value, run) for run in runs if run.figures["iteration"].value]
    if not timed:
        return "No run has a step time."
    seconds, best = min(timed, key=lambda pair: pair[0] or 0.0)
    rate = best.figures.get("tokens per second", RunFigure()).value
    words = f"{best.name}: {_number(seconds)} s an iteration ({best.source})"
    words += f", {rate:,.0f} tokens/s" if rate else ""
    largest = max(((share, part) for part, share in best.shares.items() if part != PARTS[0]), default=None)
    if best.shares:
        words += f"; accelerators compute {100 * best.shares[PARTS[0]]:.0f} % of the time"
    if largest is not None and largest[0] > LEAST_SHARE:
        words += f", and the largest loss is {largest[1]} ({100 * largest[0]:.0f} %)"
    if len(timed) > 1 and len({run.workload for _, run in timed}) > 1:
        others = [f"{run.name}: {_number(other)} s ({run.source})" for other, run in timed if run is not best]
        words += f". Not comparable, because they are other workloads: {', '.join(others)}"
    elif len(timed) > 1:
        others = [
            f"{(other or 0.0) / (seconds or 1.0):.2f}x over {run.name} ({run.source})"
            for other, run in timed
            if run is not best
        ]
        words += f". It is the fastest: {', '.join(others)}"
    return words + "."


def _figures(runs: Sequence[RunSummary]) -> str:
    heads = "".join(f'<th class="n">{escape(run.name)}<br>{_badge(run.source)}</th>' for run in runs)
    lines = [f"<tr><td></td>{heads}</tr>"]
    for label in dict.fromkeys(label for run in runs for label in run.figures):
        row = [run.figures.get(label, RunFigure()) for run in runs]
        if all(figure.value is None for figure in row):
            continue
        best = _best(row) if len({(run.source, run.workload) for run in runs}) == 1 else None
        cells = "".join(
            f'<td class="n{" best" if figure.value is not None and figure.value == best else ""}">{_shown(figure)}</td>'
            for figure in row
        )
        lines.append(f"<tr><td>{escape(label)}</td>{cells}</tr>")
    return f'<div class="wide"><table>{"".join(lines)}</table></div>'


def _best(row: Sequence[RunFigure]) -> float | None:
    values = [figure.value for figure in row if figure.value is not None]
    better = next((figure.better for figure in row if figure.better), "")
    if len(values) < 2 or not better or min(values) == max(values):
        return None
    return min(values) if better == "low" else max(values)


def _shown(figure: RunFigure) -> str:
    return f"{_number(figure.value)} {escape(figure.unit)}".strip() if figure.value is not None else "–"


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.4g}"


def _shares(runs: Sequence[RunSummary]) -> str:
    rows = []
    for run in runs:
        if not run.shares:
            continue
        bars = "".join(
            f'<i style="width:{100 * run.shares.get(part, 0.0):.2f}%;background:{color}" '
            f'title="{part}: {100 * run.shares.get(part, 0.0):.1f} %"></i>'
            for part, color in zip(PARTS, COLORS, strict=True)
        )
        words = ", ".join(f"{part} {100 * share:.0f} %" for part, share in run.shares.items() if share >= LEAST_SHARE)
        label = escape(f"{run.name}: {words}")
        rows.append(f'<p>{label}</p><div class="share" role="img" aria-label="{label}">{bars}</div>')
    legend = "".join(
        f'<span><i style="background:{color}"></i>{part}</span>' for part, color in zip(PARTS, COLORS, strict=True)
    )
    return "".join(rows) + f'<div class="legend">{legend}</div>' if rows else "<p>Not known.</p>"


def _curves(runs: Sequence[RunSummary]) -> str:
    charts = []
    for key, label, title in (("loss", "loss", "Loss"), ("iteration_s", "seconds", "Time of each step")):
        series = {run.name: points for run in runs if len(points := _points(run, key)) > 1}
        if key == "iteration_s":
            series |= {f"{run.name}, predicted": p for run in runs if len(p := _points(run, "predicted_s")) > 1}
        if series:
            chart = curves_svg(series, "step", label, title)
            charts.append(f'<div class="wide">{chart}</div>')
    return "".join(charts)


def _points(run: RunSummary, key: str) -> list[tuple[float, float]]:
    found = [(float(step["step"]), float(step[key])) for step in run.steps if isinstance(step.get(key), int | float)]
    return found[:: max(1, -(-len(found) // MAX_POINTS))]


def _pictures(runs: Sequence[RunSummary]) -> str:
    timelines = [middle_iteration(run.timeline) for run in runs if run.timeline is not None]
    if not timelines:
        return ""
    picture = svg_text(timelines, max_rows=12)
    words = "One iteration of each run, on one time axis. Hatched areas are idle; the colour says why."
    return f'<h2>One iteration</h2><p>{words}</p><div class="wide picture">{picture}</div>'


def _about(runs: Sequence[RunSummary]) -> str:
    labels = dict.fromkeys(label for run in runs for label, _ in run.about)
    heads = "".join(f"<th>{escape(run.name)}</th>" for run in runs)
    lines = [f"<tr><td></td>{heads}</tr>"]
    for label in labels:
        cells = "".join(f"<td>{escape(dict(run.about).get(label, '–'))}</td>" for run in runs)
        lines.append(f"<tr><td>{escape(label)}</td>{cells}</tr>")
    return f'<div class="wide"><table>{"".join(lines)}</table></div>'


def _metrics(runs: Sequence[RunSummary]) -> str:
    points = [run.point for run in runs if run.point is not None]
    if not points:
        return ""
    own = metrics_table(points, [point.own for point in points])
    ccl = metrics_table(points, [point.ccl for point in points])
    return f"<h2>Atlas's metrics</h2>{own}<h2>CCL-Bench's metrics, by its definitions</h2>{ccl}"


def _notes(runs: Sequence[RunSummary]) -> str:
    sources = {
        "simulated": "Simulated times come from the simulator: nothing ran.",
        "emulated": "Emulated times come from real processes, sockets and gradients over an emulated WAN.",
        "measured": "Measured times come from a run on the hardware that is named.",
        "run": "Times of a run without a timeline come from its step log.",
        "trace": "Traces without a source come from a profiler of another system.",
    }
    notes = [sources[source] for source in dict.fromkeys(run.source for run in runs) if source in sources]
    notes += [note for run in runs for note in run.notes]
    return "<h2>Notes</h2><ul>" + "".join(f"<li>{escape(note)}</li>" for note in notes) + "</ul>"


def _badge(source: str) -> str:
    return f'<span class="badge">{escape(source)}</span>'
