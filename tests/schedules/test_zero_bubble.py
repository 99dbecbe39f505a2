"""Zero bubble: the figures of the authors' own greedy scheduler, P=4, M=16, F=B=W=100."""

from __future__ import annotations

import pytest

from atlas.cost.table import kind_costs, uniform_costs
from atlas.ir.assemble import check, repeated
from atlas.ir.program import Kind, Layout, Memory
from atlas.schedules.setting import Setting
from atlas.schedules.zero_bubble import zero_bubble
from atlas.sim import simulate

COSTS = uniform_costs(1, 4, kind_costs(forward_ns=100, input_ns=100, weight_ns=100))


def of_memory(times: int) -> Setting:
    """`times` the memory of 1F1B: a forward takes two units, each half of the backward gives one back."""
    memory = Memory(times * 4 * 2, (2, 0, 0, 0, 0, 0, 0, 0, 0), (0, 0, 2, 1, 1, 0, 0, 0, 0))
    return Setting(Layout.even(1, 4, 16, 1), COSTS, None, memory)


@pytest.mark.parametrize(("times", "period"), [(1, 5100), (2, 4800)])
def test_the_period_is_that_of_the_authors_scheduler_or_better(times: int, period: int):
    program = zero_bubble(of_memory(times))
    check(program)
    assert program.memory == of_memory(times).memory
    assert simulate(program, COSTS).makespan_ns <= 5100
    for iterations in (2, 5):
        assert simulate(repeated(program, iterations), COSTS).iteration_ns <= period


def test_every_backward_is_split_and_there_is_no_bubble_left_at_twice_the_memory():
    program = zero_bubble(of_memory(2))
    assert not (program.kind == Kind.B).any()
    assert (program.kind == Kind.W).sum() == 4 * 16
    many = simulate(repeated(program, 8), COSTS)
    assert many.iteration_ns == 16 * 300  # what a stage computes: nothing else


def test_the_same_setting_gives_the_same_order():
    one, other = zero_bubble(of_memory(1)), zero_bubble(of_memory(1))
    assert [one.ops(w) for w in range(4)] == [other.ops(w) for w in range(4)]
