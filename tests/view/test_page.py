from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from view_samples import job

from atlas.cli import main
from atlas.errors import AtlasError
from atlas.ir.analysis import bubbles
from atlas.view.page import page_html, write_page

CHROMIUM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), ""
)
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
COUNT_COLOURS = """() => {
    const canvas = document.getElementById('plot'), context = canvas.getContext('2d');
    const pixels = new Uint32Array(context.getImageData(0, 0, canvas.width, canvas.height).data.buffer);
    return new Set(pixels).size;
}"""
SMOOTH_MS = 33.0
"""A frame at thirty pictures a second."""


def test_the_page_needs_no_network_and_escapes_names(tmp_path: Path) -> None:
    nasty = "</script><img src=x onerror=alert(1)>"
    write_page(tmp_path / "half.html", [job()], title="\ud800")
    write_page(tmp_path / "p.html", [job(name=nasty)], title=nasty, notes=[nasty])
    page = (tmp_path / "p.html").read_text()
    assert "<img" not in page
    assert not re.search(r"(src|href)\s*=\s*[\"']?\s*(https?:)?//", page)
    assert "default-src 'none'" in page
    header = re.search(r'id="header">(.*?)</script>', page)
    assert header is not None
    assert json.loads(header.group(1))["schedules"][0]["name"] == nasty


def test_a_page_without_timelines_is_an_atlas_error() -> None:
    with pytest.raises(AtlasError, match="at least one timeline"):
        page_html([])


def test_a_page_that_cannot_be_made_leaves_the_old_file(tmp_path: Path) -> None:
    (tmp_path / "p.html").write_text("old")
    with pytest.raises(AtlasError):
        write_page(tmp_path / "p.html", [])
    assert (tmp_path / "p.html").read_text() == "old"


def test_a_page_takes_a_few_bytes_per_op() -> None:
    timeline = job(4, 32, 64, 4)
    assert len(page_html([timeline])) < 60_000 + 10 * timeline.program.num_events


# ---- in a real browser ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if not CHROMIUM:
        pytest.skip("chromium is not installed: apt-get install chromium")
    with api.sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield found
        found.close()


def opened(browser: Any, path: Path, scheme: str = "light") -> tuple[Any, list[str]]:
    page = browser.new_page(viewport={"width": 1400, "height": 900}, color_scheme=scheme)
    complaints: list[str] = []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto(path.as_uri())
    page.wait_for_selector("html[data-ready=yes]", timeout=20_000)
    page.wait_for_function("window.atlas.frames.length > 0")
    return page, complaints


def shot(page: Any, name: str) -> None:
    """Set ATLAS_SHOTS=/some/folder to keep the screenshots."""
    folder = os.environ.get("ATLAS_SHOTS")
    if folder:
        page.screenshot(path=str(Path(folder) / name))


@pytest.mark.browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_testbed_page_opens_with_both_schedules_on_one_axis(browser: Any, tmp_path: Path, scheme: str) -> None:
    both = [job(4, 3, 12), job(4, 3, 12, sharing=True, name="atlas")]
    write_page(tmp_path / "p.html", both, title="Testbed", notes="twelve workers")
    page, complaints = opened(browser, tmp_path / "p.html", scheme)
    assert page.locator("#table tbody tr").count() == 2
    assert page.locator("#sources .badge").all_inner_texts() == ["SIMULATED"]
    ends = page.evaluate("atlas.view.schedules.map(s => atlas.toX(s.makespan))")
    assert ends[1] < ends[0] < 1400
    colours = page.evaluate(COUNT_COLOURS)
    assert colours > 20, "the plot is empty"
    shot(page, f"test-testbed-{scheme}.png")
    assert complaints == []
    page.close()


@pytest.mark.browser
def test_the_tooltip_names_an_op_and_the_cause_of_a_bubble(browser: Any, tmp_path: Path) -> None:
    timeline = job(4, 3, 12)
    write_page(tmp_path / "p.html", [timeline])
    page, complaints = opened(browser, tmp_path / "p.html")

    def tip_at(worker: int, at_ns: float) -> str:
        x, y = page.evaluate(
            """([worker, t]) => { const s = atlas.view.schedules[0], box = atlas.rowBox(s, s.rowOfWorker[worker]);
                                  const canvas = document.getElementById('plot').getBoundingClientRect();
                                  return [canvas.x + atlas.toX(t), canvas.y + box.y + box.h / 2]; }""",
            [worker, at_ns],
        )
        page.mouse.move(x, y)
        return str(page.locator("#tip").inner_text())

    for op in (0, 1, 40, 100, 200):
        middle = (int(timeline.op_start_ns[op]) + int(timeline.op_end_ns[op])) / 2
        text = tip_at(int(timeline.program.op_worker[op]), middle)
        assert text.splitlines()[0] == str(timeline.program.op(op))
        assert timeline.program.worker_name(int(timeline.program.op_worker[op])) in text
    wan = next(b for b in (bubbles(timeline)[i] for i in range(len(bubbles(timeline)))) if b.cause.name == "WAN")
    text = tip_at(wan.worker, (wan.start_ns + wan.end_ns) / 2)
    assert text.startswith("waiting: WAN")
    assert str(timeline.program.op(wan.op)) in text
    assert complaints == []
    page.close()


@pytest.mark.browser
def test_wheel_drag_and_keys_move_the_view(browser: Any, tmp_path: Path) -> None:
    write_page(tmp_path / "p.html", [job(4, 3, 12)])
    page, complaints = opened(browser, tmp_path / "p.html")

    def window() -> tuple[float, float]:
        page.evaluate("() => new Promise(r => requestAnimationFrame(() => setTimeout(r, 0)))")
        t0, t1 = page.evaluate("[atlas.view.t0, atlas.view.t1]")
        return t0, t1

    whole = window()
    page.mouse.move(700, 600)
    page.mouse.wheel(0, -600)
    near = window()
    assert near[1] - near[0] < 0.8 * (whole[1] - whole[0])
    page.mouse.down()
    page.mouse.move(500, 600, steps=3)
    page.mouse.up()
    assert window()[0] > near[0]
    page.keyboard.press("w")
    assert window()[1] - window()[0] < near[1] - near[0]
    page.keyboard.press("0")
    assert window() == whole
    rows = page.evaluate("atlas.view.total")
    page.get_by_text("collapse").click()
    assert page.evaluate("atlas.view.total") < rows
    page.keyboard.press("c")
    page.locator("#theme").click()
    window()
    shot(page, "test-folded-path.png")
    assert complaints == []
    page.close()


@pytest.mark.browser
def test_512_workers_zoom_smoothly(browser: Any, tmp_path: Path, record_property: Any) -> None:
    both = [job(8, 64, 128, 4), job(8, 64, 128, 4, sharing=True, name="atlas")]
    write_page(tmp_path / "p.html", both, title="512 workers")
    page, complaints = opened(browser, tmp_path / "p.html")
    shot(page, "test-512-folded.png")
    zoom = """async () => { const took = [];
        for (let i = 0; i < 60; i++) {
            const before = atlas.frames.length;
            atlas.zoomAt(atlas.view.extent * 0.4, i < 30 ? 0.85 : 1 / 0.85);
            await new Promise(r => requestAnimationFrame(() => setTimeout(r, 0)));
            took.push(atlas.frames[atlas.frames.length - 1]);
        }
        took.sort((a, b) => a - b); return [took[30], took[57]]; }"""
    for folded, height in ((True, 6), (False, 6), (False, 3)):
        page.evaluate("([folded, height]) => { atlas.foldAll(folded); atlas.setRowHeight(height); }", [folded, height])
        median, p95 = page.evaluate(zoom)
        record_property(f"frame_ms folded={folded} rows={height}", [median, p95])
        print(f"512 workers x 2, folded={folded}, rows of {height} px: median frame {median:.1f} ms, p95 {p95:.1f} ms")
        assert median < SMOOTH_MS
    shot(page, "test-512-rows.png")
    assert complaints == []
    page.close()


@pytest.mark.browser
def test_a_plan_page_fits_a_narrow_screen_in_light_and_dark(browser: Any, tmp_path: Path) -> None:
    job_file = Path(__file__).parents[2] / "examples" / "three-dcs.yaml"
    assert main(["plan", str(job_file), "--tries", "0", "--page", str(tmp_path / "plan.html")]) == 0
    backgrounds = set()
    for scheme in ("light", "dark"):
        page = browser.new_page(viewport={"width": 400, "height": 800}, color_scheme=scheme)
        page.goto((tmp_path / "plan.html").as_uri())
        assert page.evaluate("document.documentElement.scrollWidth") <= 400
        backgrounds.add(page.evaluate("getComputedStyle(document.body).backgroundColor"))
        page.close()
    assert len(backgrounds) == 2
