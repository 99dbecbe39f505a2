"""Varuna: its own list op by op, and the makespans of its own event simulator."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from atlas.cost.table import kind_costs, uniform_costs
from atlas.ir.assemble import assemble, check
from atlas.ir.program import Kind, Layout, Memory, Op
from atlas.schedules.setting import Setting
from atlas.schedules.varuna import list_keys, variants, varuna
from atlas.sim import simulate

MS = 1_000_000
LISTS = [
    "F0 F1 F2 F3 F4 F5 F6 F7 R0 B0 R1 B1 R2 B2 R3 B3 R4 B4 R5 B5 R6 B6 R7 B7",
    "F0 F1 F2 F3 F4 F5 R0 B0 R1 B1 R2 B2 F6 F7 R3 B3",  # and so on: R and B of 4 to 7
    "F0 F1 F2 R0 B0 R1 B1 R2 B2 F3 F4 F5",  # and so on
    "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7",
]
"""P=4, M=8, as far as the shared notes write it out."""


def written_down(num_stages: int, num_mb: int) -> list[list[Op]]:
    """Each stage's list, before any forward is pulled ahead."""
    keys = list_keys(Layout.even(1, num_stages, num_mb, 1), Memory(num_mb), True)
    kinds, never = (Kind.F, Kind.R, Kind.B), np.iinfo(np.int64).max
    lists = []
    for stage, row in enumerate(keys):
        places = [(int(row[k, m]), Op(kinds[k], stage, m)) for k, m in np.argwhere(row != never).tolist()]
        lists.append([op for _, op in sorted(places)])
    return lists


def test_the_lists_of_four_stages_and_eight_microbatches_are_varunas_op_by_op():
    lists = written_down(4, 8)
    check(assemble("varuna", Layout.even(1, 4, 8, 1), lists))
    for order, expected in zip(lists, LISTS, strict=True):
        found = [f"{op.kind.name}{op.microbatch}" for op in order]
        assert found[: len(expected.split())] == expected.split()
    assert [str(op) for op in lists[1][16:]] == [f"1{k}{m}" for m in range(4, 8) for k in "RB"]


@pytest.mark.parametrize(("num_stages", "num_mb"), [(2, 4), (3, 9), (6, 12)])
def test_what_was_recomputed_is_finished_before_anything_else_and_the_last_stage_never_recomputes(
    num_stages: int, num_mb: int
):
    lists = written_down(num_stages, num_mb)
    check(assemble("varuna", Layout.even(1, num_stages, num_mb, 1), lists))
    for stage, order in enumerate(lists):
        for k, op in enumerate(order):
            if op.kind == Kind.R:
                assert order[k + 1] == op._replace(kind=Kind.B)
        assert any(op.kind == Kind.R for op in order) == (stage < num_stages - 1)


@pytest.mark.parametrize(("wan_ms", "measured_s"), [(400, 8.12), (800, 9.31), (1200, 10.72)])
def test_makespans_are_those_of_varunas_own_simulator_within_five_per_cent(wan_ms: int, measured_s: float):
    layout = Layout.even(1, 4, 16, 2)
    costs = uniform_costs(
        1, 4, kind_costs(forward_ns=100 * MS, backward_ns=200 * MS, recompute_ns=100 * MS),
        lan_ns=10 * MS, wan_boundaries=(1,), wan_ns=wan_ms * MS,
    )  # fmt: skip
    costs = replace(costs, links=tuple(replace(link, servers=4) for link in costs.links))
    _, played = variants(layout, costs, Memory(16), True)[0]
    assert played.makespan_ns / 1e9 == pytest.approx(measured_s, rel=0.05)


@pytest.mark.parametrize("cap", [3, 6])
def test_the_frozen_varuna_keeps_to_its_memory_and_is_never_slower_than_it_was_played(cap: int):
    layout = Layout.even(2, 3, 9, 3)
    costs = uniform_costs(
        2, 3, kind_costs(forward_ns=60, backward_ns=120, recompute_ns=60), wan_boundaries=(0, 1), wan_ns=240,
        wan_latency_ns=40,
    )  # fmt: skip
    setting = Setting(layout, costs, None, Memory(cap), recompute=True)
    program = varuna(setting)
    check(program)
    assert program.peak_in_flight <= cap
    fastest = min(played.makespan_ns for _, played in variants(layout, costs, Memory(cap), True))
    # A frozen recompute no longer waits for its gradient: the baseline is at least as strong as Varuna itself.
    assert simulate(program, costs).makespan_ns <= fastest
