"""The live page in a real browser: what it shows is what the API says, while the run goes on."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browsers import chromium, new_page
from ui_samples import TINY, paths_of, report_steps, saved_run

from atlas.evaluate import evaluate
from atlas.launch.report import ReportChoice, RunReport
from atlas.spec import load_job
from atlas.ui.run_files import PageFacts, write_facts
from atlas.ui.serve import ServedPage

pytestmark = pytest.mark.browser
VALUES = """() => Object.fromEntries([...document.querySelectorAll('.card')]
    .map(card => [card.id, +card.querySelector('b').dataset.value]))"""
PAINT = "() => performance.getEntriesByName('first-contentful-paint').map(e => e.startTime)[0]"
UNNAMED = """() => [...document.querySelectorAll('button, input, select')].filter(e => !e.closest('[hidden]')
    && !(e.textContent.trim() || e.getAttribute('aria-label') || (e.labels && e.labels.length))).map(e => e.id)"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedPage]:
    folder = tmp_path_factory.mktemp("run")
    saved_run(folder)
    with ServedPage(str(folder)) as page:
        yield page


def opened(
    browser: Any, url: str, width: int = 1280, height: int = 720, scheme: str = "light"
) -> tuple[Any, list[str]]:
    page = new_page(browser, viewport={"width": width, "height": height}, color_scheme=scheme)
    complaints: list[str] = []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto(url)
    page.wait_for_selector("html[data-ready=yes]")
    return page, complaints


def test_the_figures_on_the_page_are_those_of_the_api(browser: Any, served: ServedPage) -> None:
    page, complaints = opened(browser, served.url)
    with urllib.request.urlopen(f"{served.url}api/state") as reply:
        state = json.load(reply)
    shown, last = page.evaluate(VALUES), state["last"]
    assert shown == {
        "card-iteration": last["iteration_s"],
        "card-tokens": last["tokens_per_s"],
        "card-loss": last["loss"],
        "card-busy": state["run"]["utilization"],
        "card-mfu": last["mfu"],
        "card-wan": state["links"][0]["load"],
    }
    assert page.locator("#status").inner_text() == "ended · step 5 of 5"
    assert page.locator("#said").inner_text() == state["verdict"]
    assert page.locator("#events li").count() == len(state["events"])
    assert page.evaluate("atlas.view.schedules.map(s => s.source)") == ["simulated", "emulated"]
    assert "gradient on the WAN" in page.locator("#legend").inner_text()
    assert page.evaluate("atlas.view.schedules.map(s => s.name)") == ["predicted: 1f1b", "measured: 1f1b"]
    assert page.evaluate(UNNAMED) == []
    paints = [page.evaluate(PAINT)]
    for _ in range(2):
        page.reload()
        page.wait_for_selector("html[data-ready=yes]")
        paints.append(page.evaluate(PAINT))
    assert min(paints) < 1000
    assert complaints == []
    page.close()


@pytest.mark.parametrize("scheme", ["dark"])
def test_a_phone_shows_all_of_it_without_scrolling_sideways(browser: Any, served: ServedPage, scheme: str) -> None:
    page, complaints = opened(browser, served.url, 390, 844, scheme)
    assert page.evaluate("document.documentElement.dataset.theme") == scheme
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    page.keyboard.press("x")
    page.wait_for_selector("#answer[data-kind]")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert complaints == []
    page.close()


def test_the_pinned_span_and_the_range_are_whole_beside_each_other(browser: Any, served: ServedPage) -> None:
    page, complaints = opened(browser, served.url)
    page.fill("#search", "1F3")
    page.press("#search", "Enter")
    page.wait_for_selector("#pin:not([hidden])")
    plot = page.locator("#plot").bounding_box()
    page.mouse.move(plot["x"] + 350, plot["y"] + 8)
    page.mouse.down()
    page.mouse.move(plot["x"] + 500, plot["y"] + 8, steps=3)
    page.mouse.up()
    page.wait_for_selector("#range:not([hidden])")
    assert "computing" in page.locator("#range").inner_text()
    stage = page.locator("#stage").bounding_box()
    for name in ("#pin", "#range"):
        box = page.locator(name).bounding_box()
        assert box["y"] >= stage["y"]
        assert box["y"] + box["height"] <= stage["y"] + stage["height"]
    assert complaints == []
    page.close()


def test_every_figure_of_a_card_is_seen_whole(browser: Any) -> None:
    cards = [{"label": "time to first token", "unit": "s", "value": 0.249}, {"label": "waiting", "value": 3.0}]
    cards += [{"label": "bubbles filled", "unit": "%", "value": 30.44}]
    cards += [{"label": "prefilled", "unit": "tokens/s", "value": 1.5e4}]
    with ServedPage(str(TINY)) as served:
        served.run.set_service(cards)
        page, _ = opened(browser, served.url)
        texts = page.locator("#cards b").all_inner_texts()
        assert texts[-4:] == ["0.249 s", "3", "30.4 %", "15.0 k"]
        wide = "[...document.querySelectorAll('.card b, .card h2')].filter(e => e.scrollWidth > e.clientWidth)"
        assert page.evaluate(f"{wide}.map(e => e.textContent)") == []
        assert page.evaluate("document.querySelector('#cards').scrollWidth") <= 1280
        page.close()


def test_a_running_page_follows_the_run(browser: Any, tmp_path: Path) -> None:
    job = load_job(TINY)
    write_facts(tmp_path, PageFacts(job.name, steps=9, device="paced"), job)
    with ServedPage(str(tmp_path)) as served, RunReport(ReportChoice(bar=False, page=paths_of(tmp_path)), 9) as report:
        page, complaints = opened(browser, served.url)
        assert page.locator("#status").inner_text().partition(":")[0] in ("not running", "running")
        report_steps(report, job, 1, 3)
        page.wait_for_function("() => atlas.view.schedules.length === 2")
        assert "step 3 of 9" in page.locator("#status").inner_text()
        page.evaluate("atlas.show(1e7, 2e7)")
        report_steps(report, job, 4, 1)
        report.note("west was lost", kind="warning")
        page.wait_for_function("() => document.getElementById('events').textContent.includes('west was lost')")
        page.wait_for_function(
            "() => atlas.view.schedules[1].firstStep === 4 || atlas.view.schedules[1].firstStep === 2"
        )
        assert page.evaluate("[atlas.view.t0, atlas.view.t1]") == [1e7, 2e7], "the window stays where the user put it"
        assert complaints == []
        page.close()


def test_what_if_by_keyboard_ends_with_the_figures_of_simulate(browser: Any, served: ServedPage) -> None:
    page, complaints = opened(browser, served.url)
    page.keyboard.press("x")
    page.wait_for_selector("#slider-bandwidth")
    page.focus("#slider-bandwidth")
    for _ in range(4):
        page.keyboard.press("ArrowRight")
    page.focus("#slider-microbatches")
    page.keyboard.press("ArrowRight")
    page.wait_for_function("() => document.querySelector('#answer').dataset.kind === 'unsearched'")
    page.wait_for_function("() => document.querySelector('#answer').dataset.kind === 'searched'")
    job = load_job(TINY, ["cluster.wan.pair_gbps=10", "num_microbatches=9"])
    row = evaluate(job, "1f1b").row()
    for key in ("iteration_s", "tokens_per_s", "utilization", "mfu", "peak_gib"):
        assert float(page.locator(f"#answer-{key}").get_attribute("data-value")) == row[key]
    assert page.evaluate("atlas.view.schedules.map(s => s.name)") == ["what if: 1f1b", "now: 1f1b"]
    page.click("#copy")
    page.wait_for_function("() => document.getElementById('done').dataset.command")
    command = page.evaluate("document.getElementById('done').dataset.command")
    assert "--set cluster.wan.pair_gbps=10 --set num_microbatches=9" in command
    with page.expect_download() as download:
        page.click("#save")
    assert load_job(download.value.path()).num_microbatches == 9
    page.keyboard.press("x")
    page.wait_for_function("() => atlas.view.schedules[1].source === 'emulated'")
    assert complaints == []
    page.close()


@pytest.mark.parametrize("scheme", ["light", pytest.param("dark", marks=pytest.mark.slow)])
def test_axe_finds_nothing_serious(browser: Any, served: ServedPage, scheme: str) -> None:
    axe = Path(pytest.importorskip("axe_core_python").__file__).with_name("axe.min.js").read_text()
    page, _ = opened(browser, served.url, scheme=scheme)

    def findings() -> list[str]:
        page.evaluate(f"{axe};0")
        return [f"{one['impact']} {one['id']}" for one in page.evaluate("axe.run()")["violations"]]

    assert findings() == []
    page.keyboard.press("x")
    page.wait_for_selector("#answer[data-kind]")
    assert findings() == []
    page.close()
