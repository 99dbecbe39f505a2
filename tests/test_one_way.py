"""From a job file to a page, a traced run: nothing is parsed, priced, simulated or analysed twice."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import FrameType

import atlas
import atlas.api
from atlas.view import write_page

SRC = Path(atlas.__file__).parent
TINY = SRC.parents[1] / "examples" / "tiny.yaml"
ONCE = {
    "spec/document.py": ["parse_yaml"],
    "cost/arrange.py": ["arrange"],
    "evaluate.py": ["prepare", "evaluate"],
    "ir/assemble.py": ["check"],
    "sim/lower.py": ["lower"],
    "sim/simulate.py": ["run", "timeline"],
    "ir/analysis.py": ["summary", "link_utilization", "bubbles", "critical_path"],
    "view/page.py": ["groups"],
}


def test_nothing_is_done_twice_between_the_job_file_and_the_page(tmp_path: Path) -> None:
    calls: Counter[tuple[str, str]] = Counter()

    def count(frame: FrameType, event: str, _: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(SRC):
            calls[str(path.relative_to(SRC)), frame.f_code.co_name] += 1

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        simulation = atlas.simulate(TINY, "1f1b")
        simulation.table()
        write_page(tmp_path / "page.html", [simulation.best.timeline])
        simulation.figure()
    finally:
        sys.setprofile(before)
    assert {(file, name): calls[file, name] for file, names in ONCE.items() for name in names} == {
        (file, name): 1 for file, names in ONCE.items() for name in names
    }
