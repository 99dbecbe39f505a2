"""The bar on Sailor's own files, where they are at hand (../shared/data, never copied); bench/planner_sailor.py has
all of it, with CPU and memory.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from atlas.planner.objective import Objective
from atlas.sailor.check import check
from atlas.sailor.inputs import read_inputs
from atlas.sailor.money import money
from atlas.sailor.search import search

DATA = Path(__file__).parents[3] / "shared" / "data" / "sailor"
pytestmark = pytest.mark.skipif(not DATA.is_dir(), reason=f"{DATA} is not there")


@pytest.mark.parametrize(
    ("model", "trace", "bar_s"),
    [
        ("OPT-350", "2r_16", 9.42),
        ("OPT-350", "2r_96_32", 3.20),
        ("OPT-350", "5z_32", 2.42),
        ("GPT-Neo-2.7", "2r_32", 30.0),
        ("GPT-Neo-2.7", "5z_32", 13.61),
    ],
)
def test_plans_on_sailors_files_meet_the_bar(model: str, trace: str, bar_s: float) -> None:
    inputs = read_inputs(DATA, DATA / "traces" / f"{trace}.csv", model, ["A100-40"])
    found = search(inputs)
    check(inputs, found.plan)
    assert found.verdict.iteration_s <= bar_s


def test_there_is_a_cheapest_plan_that_is_fast_enough() -> None:
    inputs = read_inputs(DATA, DATA / "traces" / "2r_32.csv", "GPT-Neo-2.7", ["A100-40"])
    found = search(inputs, Objective("cost", min_tokens_per_s=0.03))
    fastest = search(inputs)
    assert found.verdict.iteration_s * 0.03 <= 1
    assert found.verdict.iteration_s > fastest.verdict.iteration_s
    assert found.score < 2.6


@pytest.mark.parametrize("share", [1.0, 1.1, 1.3])
def test_a_limit_on_money_that_the_cheapest_plan_keeps_has_a_plan(share: float) -> None:
    inputs = read_inputs(DATA, DATA / "traces" / "5z_32.csv", "GPT-Neo-2.7")
    cheapest = search(inputs, Objective("cost"))
    found = search(inputs, Objective(max_usd_per_iteration=share * cheapest.score))
    assert money(inputs, found.plan, found.verdict).total_usd <= share * cheapest.score * (1 + 1e-9)
    assert found.verdict.iteration_s <= cheapest.verdict.iteration_s
