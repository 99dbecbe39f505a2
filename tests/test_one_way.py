"""From a job file to a page, a traced run: few files are visited, and nothing is parsed, priced or analysed twice."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import FrameType

import pytest

import atlas
from atlas import load_job, simulate
from atlas.sim.simulate import compiled_engine

SRC = Path(atlas.__file__).parent
TINY = SRC.parents[1] / "examples" / "tiny.yaml"
MAX_FILES = 20
ONCE = {
    "spec/document.py": ["parse_yaml"],
    "cost/arrange.py": ["arrange"],
    "cost/memory.py": ["worker_memory", "memory_rule", "max_layers"],
    "cost/price.py": ["price"],
    "evaluate.py": ["prepare", "evaluate"],
    "ir/assemble.py": ["check"],
    "sim/lower.py": ["lower"],
    "sim/simulate.py": ["simulate", "reference"],
    "ir/analysis.py": ["summary", "link_utilization", "bubbles", "critical_path"],
    "view/page.py": ["page_html", "groups"],
}


@pytest.fixture(scope="module")
def calls() -> Counter[tuple[str, str]]:
    """By file and function: how often it was called on the way from the job file to the table and the page."""
    found: Counter[tuple[str, str]] = Counter()

    def count(frame: FrameType, event: str, _: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(SRC):
            found[str(path.relative_to(SRC)), frame.f_code.co_name] += 1

    compiled_engine.cache_clear()  # other tests may have loaded it; a small job does not
    before = sys.getprofile()
    sys.setprofile(count)
    try:
        simulation = simulate(load_job(TINY), "1f1b")
        simulation.table()
        page = simulation.page()
    finally:
        sys.setprofile(before)
    assert "<title>tiny</title>" in page
    return found


def test_one_microbatch_visits_few_files_between_the_job_file_and_the_page(calls: Counter[tuple[str, str]]) -> None:
    visited = {file for file, _ in calls}
    assert len(visited) <= MAX_FILES, sorted(visited)


def test_nothing_is_done_twice_between_the_job_file_and_the_page(calls: Counter[tuple[str, str]]) -> None:
    once = [(file, name) for file, names in ONCE.items() for name in names]
    assert {call: calls[call] for call in once} == dict.fromkeys(once, 1)
