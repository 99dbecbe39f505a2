"""Photonic rails in a run: circuits are waited for, the weights are the same, and a switch that fails ends the run with
its name or leaves the circuits as they are."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atlas.cost.table import Circuits, Costs, kind_costs, uniform_costs
from atlas.errors import WorkerError
from atlas.fabric.circuit_plan import Circuit
from atlas.fabric.switch import EmulatedSwitch, SwitchError
from atlas.ir.analysis import Cause, bubbles
from atlas.ir.assemble import repeated, with_optimizer
from atlas.ir.program import Kind, Layout, Program
from atlas.launch.checkpoint_folders import find_checkpoints
from atlas.launch.emulate import Emulation, EmulationSettings, emulate
from atlas.launch.rails import RailSettings
from atlas.launch.supervisor import RestartPolicy, run_with_restarts
from atlas.runtime.assignment import stand_in
from atlas.schedules.classic import one_f_one_b
from atlas.sim import simulate

MS = 1_000_000
SMALL = stand_in(width=16, length=8, microbatch=2)


def case(delay_ms: float | None, *, provision: bool = True) -> tuple[Program, Costs]:
    """Two pipelines over two datacenters; the first has two stages. None: no photonic rails."""
    program = with_optimizer(one_f_one_b(Layout(2, 3, 3, ("east", "east", "west"))))
    kinds = kind_costs(forward_ns=4 * MS, backward_ns=8 * MS, sync_ns=10 * MS, step_ns=2 * MS)
    costs = uniform_costs(2, 3, kinds, wan_boundaries=(1,), lan_ns=MS, wan_ns=MS, wan_latency_ns=2 * MS)
    if delay_ms is None:
        return program, costs
    switching = Circuits((True, True, False), (round(delay_ms * MS),) * 3, (provision,) * 3)
    return program, replace(costs, circuits=switching)


def play(delay_ms: float | None, *, provision: bool = True, steps: int = 3, **rails: Any) -> Emulation:
    program, costs = case(delay_ms, provision=provision)
    return emulate(program, costs, SMALL, EmulationSettings(steps, rails=RailSettings(**rails)))


@pytest.fixture(scope="module")
def electrical() -> Emulation:
    return play(None)


@pytest.mark.parametrize(("delay_ms", "provision"), [(0, True), (50, True), (50, False)])
def test_circuits_are_waited_for_and_the_weights_are_the_same(
    electrical: Emulation, delay_ms: float, provision: bool
) -> None:
    run = play(delay_ms, provision=provision)
    assert run.losses == electrical.losses
    assert all(np.array_equal(run.weights[name], electrical.weights[name]) for name in electrical.weights)
    assert run.rails is not None
    assert run.rails.num_changes == 3 * 4  # of each step: two hops, two rings
    program, costs = case(delay_ms, provision=provision)
    predicted = simulate(repeated(program, 3), costs)
    print(predicted.iteration_ns / 1e6, run.timeline.iteration_ns / 1e6, [r for r in run.rails.rows], sep="\n")
    assert run.timeline.iteration_ns >= 0.98 * predicted.iteration_ns  # a busy machine may be slower
