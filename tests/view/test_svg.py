from __future__ import annotations

import sys
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import pytest
from view_samples import job

from atlas.errors import AtlasError, MissingExtraError
from atlas.view.svg import Figure, svg_text


def test_a_figure_is_valid_xml_with_any_names(tmp_path: Path) -> None:
    odd = job(name="\x1b[31m \x01 \ud800")  # names from a damaged file
    Figure(job(name='<b>"x"&'), job(sharing=True, name="turns"), odd, title="a < b & c").save(tmp_path / "a.svg")
    root = ET.parse(tmp_path / "a.svg").getroot()
    texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "a < b & c" in texts
    assert '<b>"x"&' in texts
    assert any("simulated" in (text or "") for text in texts)
    assert "waiting: WAN" in texts


def test_workers_beyond_max_rows_are_counted_not_drawn() -> None:
    figure = svg_text([job(8, 4, 4, 2)], max_rows=4)
    assert "… 14 more" in figure
    assert figure.count(">p0.s0<") == 1
    assert ">p7.s3<" not in figure


def test_the_figure_of_a_long_run_is_a_small_file() -> None:
    assert len(svg_text([job(1, 4, 600, 2)])) < 400_000


def test_a_figure_without_timelines_is_an_atlas_error() -> None:
    with pytest.raises(AtlasError, match="at least one timeline"):
        svg_text([])


def test_a_run_of_zero_seconds_is_drawn() -> None:
    timeline = job(1, 2, 2, 2)
    assert "0.000 s" in svg_text(
        [replace(timeline, op_start_ns=timeline.op_start_ns * 0, op_end_ns=timeline.op_end_ns * 0)]
    )


def test_a_name_in_png_gives_a_png(tmp_path: Path) -> None:
    pytest.importorskip("resvg_py")
    Figure(job(1, 2, 2, 2)).save(tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_without_resvg_the_error_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "resvg_py", None)
    with pytest.raises(MissingExtraError, match=r"\[png\]"):
        Figure(job(1, 2, 2, 2)).save(tmp_path / "a.png")
    assert not list(tmp_path.iterdir())
