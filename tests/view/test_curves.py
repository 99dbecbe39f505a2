from __future__ import annotations

import math
import xml.etree.ElementTree as ET
from itertools import pairwise
from pathlib import Path

import pytest

from atlas.errors import AtlasError
from atlas.view.chart import INK, SERIES, SOFT, curves_svg, theme, write_curves

LINES = {"1F1B <many>": [(10, 2.0), (20, 4.0)], "Atlas": [(10, 1.0), (20, math.nan), (40, 1.5)]}


@pytest.mark.parametrize("log", [False, True])
def test_every_line_is_named_where_it_ends(log: bool) -> None:
    root = ET.fromstring(curves_svg(LINES, "latency (ms)", "time (s)", "Time & place", log_x=log, log_y=log))
    texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    axes = {"latency (ms) (log scale)", "time (s) (log scale)"} if log else {"latency (ms)", "time (s)"}
    assert {"1F1B <many>", "Atlas", "Time & place", *axes} <= set(texts)


def test_names_of_close_lines_do_not_overlap() -> None:
    root = ET.fromstring(curves_svg({f"line {k}": [(0, 1), (1, 1)] for k in range(6)}, "x", "y", "t"))
    heights = sorted(
        float(e.attrib["y"]) for e in root.iter("{http://www.w3.org/2000/svg}text") if (e.text or "").startswith("line")
    )
    assert all(b - a >= 13 for a, b in pairwise(heights))


def test_the_suffix_chooses_html_or_svg_and_an_empty_chart_is_an_atlas_error(tmp_path: Path) -> None:
    write_curves(tmp_path / "c.html", LINES, "x", "y", "a title")
    write_curves(tmp_path / "c.svg", LINES, "x", "y", "a title")
    assert (tmp_path / "c.html").read_text().startswith("<!doctype html>")
    assert (tmp_path / "c.svg").read_text().startswith("<svg")
    with pytest.raises(AtlasError, match="no point"):
        curves_svg({"a": [(-1, 2)]}, "x", "y", "t", log_x=True)


def test_a_page_has_dark_colours_for_those_of_a_chart(tmp_path: Path) -> None:
    write_curves(tmp_path / "c.html", LINES, "x", "y", "a <title>")
    page = (tmp_path / "c.html").read_text()
    assert theme() in page
    assert "<title>a &lt;title&gt;</title>" in page
    assert "prefers-color-scheme: dark" in theme()
    for color in (INK, SOFT, SERIES[0]):
        assert f'[fill="{color}"]' in theme()
        assert f'fill="{color}"' in page.split("</style>")[1]
