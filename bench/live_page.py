"""The live page in Chromium, and what-if by hand: first paint, frames a second while panning a run of 512 workers, the
time of an answer, answers against `atlas simulate --json`, and training with a page open.

    python bench/live_page.py [--quick]

Needs playwright and Debian's chromium for the parts in a browser.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import random
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common.report import Report

from atlas.cli import main as atlas_main
from atlas.evaluate import evaluate
from atlas.evidence.write_card import job_text
from atlas.ir.store import save_timeline
from atlas.spec import load_job
from atlas.ui.run_model import RunModel
from atlas.ui.serve import ServedPage
from atlas.ui.whatif import WhatIfDesk

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
MAX_PAINT_MS, MIN_FRAMES, MAX_SMALL_S, MAX_LARGE_S = 1000.0, 30.0, 0.3, 2.0
NUM_FRAMES = 120
PAN = """num => new Promise(done => {
    const { view } = atlas, span = view.extent / 6; let n = 0, began = 0;
    const step = now => {
        began = began || now;
        if (n === num) return done(1000 * num / (now - began));
        const at = (view.extent - span) * (0.5 + 0.5 * Math.sin(n++ / 19));
        atlas.show(at, at + span); requestAnimationFrame(step);
    };
    requestAnimationFrame(step);
})"""
MANY = ["pipelines_per_cell=43", *(f"cluster.datacenters.{dc}.nodes=172" for dc in ("west", "central", "east"))]
LARGE = ["cells=43", *(f"cluster.datacenters.dc{k}.nodes=2100" for k in range(1, 6))]


@contextlib.contextmanager
def browser() -> Iterator[Any]:
    """None where there is none."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    try:
        from playwright.sync_api import sync_playwright
    except ModuleNotFoundError:
        chromium = None
    if chromium is None:
        yield None
        return
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
        yield found
        found.close()


def opened(chrome: Any, url: str, complaints: list[str]) -> Any:
    page = chrome.new_page(viewport={"width": 1280, "height": 720})
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto(url)
    page.wait_for_selector("html[data-ready=yes]", timeout=60_000)
    return page


def in_the_browser(report: Report, chrome: Any) -> None:
    complaints: list[str] = []
    with ServedPage(str(EXAMPLES / "three-dcs.yaml")) as served:
        paints = []
        for _ in range(5):
            page = opened(chrome, served.url, complaints)
            paints.append(page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime"))
            page.close()
        report.figure("first paint, worst of 5", max(paints), "ms", at_most=MAX_PAINT_MS)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "512.timeline"
        timeline = evaluate(load_job(EXAMPLES / "three-dcs.yaml", MANY), "1f1b").single
        save_timeline(file, timeline)
        with ServedPage(str(file)) as served:
            page = opened(chrome, served.url, complaints)
            for name, folded in (("every worker a row", "false"), ("folded", "true")):
                page.evaluate(f"atlas.foldAll({folded})")
                rate = max(page.evaluate(PAN, NUM_FRAMES) for _ in range(2))
                report.figure(
                    f"panning {timeline.program.num_workers} workers, {name}", rate, "frames/s", at_least=MIN_FRAMES
                )
            page.close()
    report.figure("console messages", len(complaints), "", at_most=0)


# ---- what-if -------------------------------------------------------------------------------------------------------
def posted(url: str, data: dict[str, Any]) -> tuple[float, dict[str, Any]]:
    body = json.dumps(data).encode()
    request = urllib.request.Request(f"{url}api/whatif/quick", body, {"Content-Type": "application/json"})
    began = time.perf_counter()
    with urllib.request.urlopen(request) as reply:
        found: dict[str, Any] = json.load(reply)
    return time.perf_counter() - began, found


def quick_answers(report: Report, name: str, file: Path, at_most_s: float) -> None:
    """Other links: the order stays. Another shape: it has to be built."""
    with ServedPage(str(file)) as served:
        posted(served.url, {})
        links = [posted(served.url, {"bandwidth": 2 ** (k / 4), "latency": 2 ** (-k / 4)}) for k in range(-8, 9)]
        assert {found["kind"] for _, found in links} == {"frozen"}
        gpus = links[0][1]["row"]["num_gpus"]
        worst = max(seconds for seconds, _ in links)
        report.figure(f"what-if, {name} ({gpus} GPUs), other links, slowest", worst, "s", at_most=at_most_s)
        base = served.run.model
        assert base is not None
        more = base.case.job.num_microbatches
        shapes = [posted(served.url, {"microbatches": more + k, "schedule": "1f1b"}) for k in (1, 2)]
        worst = max(seconds for seconds, _ in shapes)
        report.figure(f"what-if, {name}, other shape, slowest", worst, "s", at_most=at_most_s)


def random_setting(rng: random.Random, base: int, *, searched: bool) -> dict[str, Any]:
    return {
        "bandwidth": 2 ** rng.choice([-2, -1, -0.25, 0, 0.5, 1.75, 3]),
        "latency": 2 ** rng.choice([-3, -1, 0, 0.75, 2]),
        "pipelines": rng.randint(1, 4),
        "cells": rng.randint(1, 3),
        "microbatches": rng.randint(2, base + 4),
        "schedule": rng.choice(["atlas", "zero-bubble"] if searched else ["gpipe", "1f1b", "1f1b-eager", "varuna"]),
    }


def equal_to_simulate(report: Report, num: int) -> None:
    rng, different = random.Random(18), 0
    files = ("tiny.yaml", "three-dcs.yaml", "two-sites.yaml")
    desks = {name: WhatIfDesk(RunModel(load_job(EXAMPLES / name), "1f1b"), str(EXAMPLES / name)) for name in files}
    for k in range(num):
        name = "tiny.yaml" if k % 12 == 0 else rng.choice(files)
        desk = desks[name]
        answer = desk.search(random_setting(rng, min(12, desk.base.microbatches), searched=k % 12 == 0))
        text = io.StringIO()
        with contextlib.redirect_stdout(text):
            atlas_main(shlex.split(answer["command"])[1:])
        (row,) = json.loads(text.getvalue())
        different += {**row, "engine_s": 0} != {**answer["row"], "engine_s": 0}
    report.figure(f"what-if settings, of {num}, that differ from atlas simulate --json", different, "", at_most=0)


# ---- training with a page open -------------------------------------------------------------------------------------
def trained_s(chrome: Any, folder: Path, *, page: bool) -> float:
    """The median iteration of an emulated run."""
    words = [sys.executable, "-m", "atlas", "train", str(EXAMPLES / "tiny.yaml"), "--emulate", "--steps", "12"]
    words += [
        "--no-bar",
        "--log",
        str(folder / "log.jsonl"),
        "--runs",
        str(folder / "run"),
        *(["--ui"] if page else []),
    ]
    (folder / "log.jsonl").unlink(missing_ok=True)
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    shown = None
    for line in process.stderr:
        if page and "the page is at " in line:
            shown = opened(chrome, line.partition("the page is at ")[2].partition(";")[0], [])
    process.wait()
    if shown is not None:
        shown.close()
    steps = [json.loads(line)["iteration_s"] for line in (folder / "log.jsonl").read_text().splitlines()]
    return statistics.median(steps[2:])


def beside_training(report: Report, chrome: Any) -> None:
    with tempfile.TemporaryDirectory() as text:
        times = [trained_s(chrome, Path(text), page=bool(k % 2)) for k in range(5)]
    plain, watched = times[0::2], times[1::2]
    spread = max(plain) / min(plain) - 1
    report.figure("training without a page, spread of 3 runs", 100 * spread, "%")
    off = statistics.median(watched) / statistics.median(plain) - 1
    report.figure("training with a page open over without, less the spread", 100 * (off - spread), "%", at_most=0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer settings, no training")
    args = parser.parse_args()
    report = Report("The live page", "atlas simulate --json, and runs without a page")
    quick_answers(report, "GPT-A", EXAMPLES / "testbed" / "gpt-a-20ms.yaml", MAX_SMALL_S)
    with tempfile.TemporaryDirectory() as folder:
        large = Path(folder) / "large.yaml"
        large.write_text(job_text(load_job(EXAMPLES / "paper-5-dcs.yaml", LARGE)))
        quick_answers(report, "five datacenters", large, MAX_LARGE_S)
    equal_to_simulate(report, 12 if args.quick else 50)
    with browser() as chrome:
        if chrome is None:
            for line in ("first paint, worst of 5", "panning 516 workers"):
                report.void(line, "no chromium, or playwright is not installed")
        else:
            in_the_browser(report, chrome)
            if not args.quick:
                beside_training(report, chrome)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
