from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from browsers import chromium, new_page
from view_samples import job

from atlas.cli import main
from atlas.errors import AtlasError
from atlas.ir.analysis import best_first, bubbles, verdict
from atlas.ir.store import joined
from atlas.ir.timeline import Timeline
from atlas.view.page import page_html, write_page

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


def test_the_fastest_comes_first_unless_sources_differ() -> None:
    slow, fast = job(), job(sharing=True, name="atlas")
    assert best_first([slow, fast]) == [fast, slow]
    assert verdict([fast, slow]).startswith("atlas is the fastest: ")
    assert f"{slow.iteration_ns / fast.iteration_ns:.2f}x over 1f1b" in verdict([fast, slow])
    measured = replace(fast, source="measured")
    assert best_first([slow, measured]) == [slow, measured]
    assert "1f1b simulated" in verdict([slow, measured])
    assert "largest loss is" in verdict([slow])


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
    with chromium() as found:
        yield found


def opened(browser: Any, path: Path, scheme: str = "light") -> tuple[Any, list[str]]:
    page = new_page(browser, viewport={"width": 1400, "height": 900}, color_scheme=scheme)
    complaints: list[str] = []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto(path.as_uri())
    page.wait_for_selector("html[data-ready=yes]")
    page.wait_for_function("window.atlas.frames.length > 0")
    return page, complaints


def cpu_clock(page: Any) -> Callable[[], float]:
    """Reads the CPU time of the page's thread, in seconds: other load on the host does not count."""
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable", {"timeDomain": "threadTicks"})

    def read() -> float:
        metrics = session.send("Performance.getMetrics")["metrics"]
        return next(float(row["value"]) for row in metrics if row["name"] == "TaskDuration")

    return read


def long_job(num_iterations: int) -> Timeline:
    """The same iteration many times, one after another."""
    one = job(2, 3, 6)
    length = one.makespan_ns
    names = ("op_start_ns", "op_end_ns", "transfer_ready_ns", "transfer_start_ns", "transfer_sent_ns")
    names += ("transfer_arrive_ns",)
    return joined(
        [replace(one, **{name: getattr(one, name) + k * length for name in names}) for k in range(num_iterations)]
    )


def shot(page: Any, name: str) -> None:
    """Set ATLAS_SHOTS=/some/folder to keep the screenshots."""
    folder = os.environ.get("ATLAS_SHOTS")
    if folder:
        page.screenshot(path=str(Path(folder) / name))


@pytest.mark.browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_testbed_page_opens_with_both_schedules_on_one_axis(browser: Any, tmp_path: Path, scheme: str) -> None:
    both = [job(4, 3, 12), job(4, 3, 12, sharing=True, name="atlas")]
    write_page(tmp_path / "p.html", both, title="Testbed", notes=["twelve workers"])
    page, complaints = opened(browser, tmp_path / "p.html", scheme)
    assert page.locator("#table tbody tr").count() == 2
    assert page.locator("#sources .badge").all_inner_texts() == ["SIMULATED"]
    ends = page.evaluate("atlas.view.schedules.map(s => atlas.toX(s.makespan))")
    assert ends[0] < ends[1] < 1400, "the fastest comes first"
    assert page.locator("#notes .verdict").inner_text().startswith("atlas is the fastest: ")
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


def settled(page: Any) -> None:
    page.evaluate("() => new Promise(r => requestAnimationFrame(() => setTimeout(r, 0)))")


@pytest.mark.browser
def test_a_long_run_opens_at_one_step_with_marks(browser: Any, tmp_path: Path) -> None:
    timeline = long_job(12)
    write_page(tmp_path / "p.html", [timeline])
    page, complaints = opened(browser, tmp_path / "p.html")
    t0, t1, extent = page.evaluate("[atlas.view.t0, atlas.view.t1, atlas.view.extent]")
    assert t1 - t0 < 1.1 * timeline.iteration_ns < 0.2 * extent
    ends = page.evaluate("atlas.view.schedules[0].steps")
    assert ends == (timeline.iteration_ends_ns - timeline.op_start_ns.min()).tolist()
    assert any(abs(end - t1) < 0.02 * (t1 - t0) for end in ends)
    shot(page, "test-one-step.png")
    page.keyboard.press("0")
    settled(page)
    assert page.evaluate("atlas.view.t1 - atlas.view.t0") == pytest.approx(extent)
    page.keyboard.press("1")
    settled(page)
    assert page.evaluate("atlas.view.t1 - atlas.view.t0") < 1.1 * timeline.iteration_ns
    assert complaints == []
    page.close()


@pytest.mark.browser
def test_a_long_run_beside_a_short_one_opens_where_both_are_drawn(browser: Any, tmp_path: Path) -> None:
    short = job()
    write_page(tmp_path / "p.html", [short, long_job(12)])
    page, complaints = opened(browser, tmp_path / "p.html")
    assert page.evaluate("atlas.view.t0") < short.makespan_ns / 2
    assert complaints == []
    page.close()


@pytest.mark.browser
def test_a_click_pins_a_span_a_search_finds_an_op_and_a_range_has_statistics(browser: Any, tmp_path: Path) -> None:
    both = [job(4, 3, 12), job(4, 3, 12, sharing=True, name="atlas")]
    write_page(tmp_path / "p.html", both)
    page, complaints = opened(browser, tmp_path / "p.html")
    page.keyboard.press("/")
    page.keyboard.type("2B7")
    page.keyboard.press("Enter")
    settled(page)
    assert page.locator("#found").inner_text() == "1 of 8"  # four pipelines, two schedules
    assert page.locator("#pin h2").inner_text() == "2B7"
    page.keyboard.press("Enter")
    assert page.locator("#found").inner_text() == "2 of 8"
    page.locator("#search").fill("9Z9")
    page.keyboard.press("Enter")
    assert page.locator("#found").inner_text() == "no such op"
    page.keyboard.press("Escape")
    page.keyboard.press("Escape")
    assert page.locator("#pin").is_hidden()

    x, y = page.evaluate(
        """() => { const s = atlas.view.schedules[0], box = atlas.rowBox(s, 0), i = s.ptr[0];
                   const canvas = document.getElementById('plot').getBoundingClientRect();
                   return [canvas.x + atlas.toX((s.start[i] + s.end[i]) / 2), canvas.y + box.y + box.h / 2]; }"""
    )
    page.mouse.click(x, y)
    assert page.locator("#pin h2").inner_text() == "0F0"
    page.mouse.move(900, 700)
    assert page.locator("#pin h2").inner_text() == "0F0", "it stays while the pointer moves"

    canvas = page.locator("#plot").bounding_box()
    page.mouse.move(canvas["x"] + 169, canvas["y"] + 10)
    page.mouse.down()
    page.mouse.move(canvas["x"] + canvas["width"] - 11, canvas["y"] + 10, steps=4)
    page.mouse.up()
    rows = page.evaluate("atlas.inspected.range.rows")
    best = min(both, key=lambda timeline: timeline.iteration_ns)
    assert [row["name"] for row in rows] == ["atlas", "1f1b"]
    share = best.utilization * best.makespan_ns / page.evaluate("atlas.inspected.range.b - atlas.inspected.range.a")
    assert rows[0]["busy"] == pytest.approx(share, rel=0.02)
    assert rows[0]["ops"] == best.program.num_ops - 4, "all but those that start at 0, left of the range"
    assert page.locator("#range tr").count() == 3
    shot(page, "test-range-pin.png")
    assert complaints == []
    page.close()


@pytest.mark.browser
def test_two_runs_beside_each_other_share_rows_and_time(browser: Any, tmp_path: Path) -> None:
    write_page(tmp_path / "p.html", [job(4, 3, 12), job(4, 3, 12, sharing=True, name="atlas")])
    page, complaints = opened(browser, tmp_path / "p.html")
    before = page.evaluate("atlas.view.rowHeight")
    page.keyboard.press("v")
    settled(page)
    left, right = page.evaluate("atlas.view.schedules.map(s => atlas.toX(0, s))")
    assert right > left + 400
    for worker in (0, 5, 11):
        heights = page.evaluate("w => atlas.view.schedules.map(s => atlas.rowBox(s, s.rowOfWorker[w]).y)", worker)
        assert heights[0] == heights[1], "also below links, of which the two have different numbers"
    assert page.evaluate("atlas.view.rowHeight") > before, "half as many rows have twice the room"
    x, y = page.evaluate(
        """() => { const s = atlas.view.schedules[1], box = atlas.rowBox(s, 0), i = s.ptr[0];
                   const canvas = document.getElementById('plot').getBoundingClientRect();
                   return [canvas.x + atlas.toX((s.start[i] + s.end[i]) / 2, s), canvas.y + box.y + box.h / 2]; }"""
    )
    page.mouse.move(x, y)
    assert "1f1b" in page.locator("#tip").inner_text()
    assert page.evaluate(COUNT_COLOURS) > 20
    shot(page, "test-beside.png")
    page.keyboard.press("v")
    settled(page)
    assert page.evaluate("atlas.view.rowHeight") == before
    assert complaints == []
    page.close()


@pytest.mark.browser
def test_runs_of_other_shapes_are_not_put_beside_each_other(browser: Any, tmp_path: Path) -> None:
    write_page(tmp_path / "p.html", [job(4, 3, 12), job(2, 3, 12, name="other")])
    page, _ = opened(browser, tmp_path / "p.html")
    assert page.locator("#beside").is_hidden()
    assert page.locator("#one").is_hidden()
    page.close()


@pytest.mark.browser
def test_512_workers_zoom_smoothly(browser: Any, tmp_path: Path, record_property: Any) -> None:
    both = [job(8, 64, 128, 4), job(8, 64, 128, 4, sharing=True, name="atlas")]
    write_page(tmp_path / "p.html", both, title="512 workers")
    page, complaints = opened(browser, tmp_path / "p.html")
    shot(page, "test-512-folded.png")
    cpu_s = cpu_clock(page)
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
        began_s = cpu_s()
        median, p95 = page.evaluate(zoom)
        cpu_ms = 1e3 * (cpu_s() - began_s) / 60
        record_property(f"frame_ms folded={folded} rows={height}", [median, p95, cpu_ms])
        print(f"512 workers x 2, folded={folded}, rows of {height} px: median frame {median:.1f} ms, p95 {p95:.1f} ms")
        assert cpu_ms < SMOOTH_MS
    shot(page, "test-512-rows.png")
    assert complaints == []
    page.close()


@pytest.mark.browser
def test_a_plan_page_fits_a_narrow_screen_in_light_and_dark(browser: Any, tmp_path: Path) -> None:
    job_file = Path(__file__).parents[2] / "examples" / "three-dcs.yaml"
    assert main(["plan", str(job_file), "--tries", "0", "--no-break-even", "--page", str(tmp_path / "plan.html")]) == 0
    backgrounds = set()
    for scheme in ("light", "dark"):
        page = new_page(browser, viewport={"width": 400, "height": 800}, color_scheme=scheme)
        page.goto((tmp_path / "plan.html").as_uri())
        assert page.evaluate("document.documentElement.scrollWidth") <= 400
        backgrounds.add(page.evaluate("getComputedStyle(document.body).backgroundColor"))
        page.close()
    assert len(backgrounds) == 2
