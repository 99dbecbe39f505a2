"""Photonic rails in a run: circuits are waited for, the weights are the same, and a switch that fails ends the run with
its name or leaves the circuits as they are."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atlas.cost.table import Circuits, Costs, kind_costs, uniform_costs
from atlas.errors import AtlasError, WorkerError
from atlas.fabric.circuit_plan import Circuit
from atlas.fabric.switch import EmulatedSwitch, Switch, SwitchError
from atlas.ir.analysis import bubbles
from atlas.ir.assemble import assemble, repeated, with_optimizer
from atlas.ir.program import Kind, Layout, Op, Program
from atlas.launch.checkpoint_folders import find_checkpoints, first_step
from atlas.launch.emulate import Emulation, EmulationSettings, emulate
from atlas.launch.rails import RailControl, RailCosts, RailSettings
from atlas.launch.supervisor import RestartPolicy, run_with_restarts
from atlas.launch.worker_processes import WorkerGroup
from atlas.runtime.assignment import stand_in
from atlas.runtime.topology import all_roles
from atlas.schedules.classic import one_f_one_b
from atlas.sim import simulate

MS = 1_000_000
LIMIT_S = 120.0
"""Of a change, and of a wait for an error: far more than a busy host needs."""
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


def play(delay_ms: float | None, *, provision: bool = True, steps: int = 3, zero: int = 0, **rails: Any) -> Emulation:
    program, costs = case(delay_ms, provision=provision)
    if costs.circuits is not None:
        costs = replace(costs, circuits=replace(costs.circuits, until_step=zero > 0))
    settings = EmulationSettings(steps, rails=RailSettings(deadline_s=LIMIT_S, **rails))
    return emulate(program, costs, replace(SMALL, zero=zero), settings)


@pytest.fixture(scope="module")
def electrical() -> Emulation:
    return play(None)


@pytest.mark.parametrize(
    ("delay_ms", "provision"), [pytest.param(0, True, marks=pytest.mark.slow), (50, True), (50, False)]
)
def test_circuits_are_waited_for_and_the_weights_are_the_same(
    electrical: Emulation, delay_ms: float, provision: bool
) -> None:
    run = play(delay_ms, provision=provision)
    assert run.losses == electrical.losses
    assert all(np.array_equal(run.weights[name], electrical.weights[name]) for name in electrical.weights)
    assert run.rails is not None
    assert run.rails.num_changes == 3 * 4, "of each step: two hops, two rings"
    program, costs = case(delay_ms, provision=provision)
    predicted = simulate(repeated(program, 3), costs)
    # More on a busy machine; bench/fabric.py has the bar.
    assert run.timeline.iteration_ns >= 0.98 * predicted.iteration_ns
    if delay_ms:
        assert bubbles(run.timeline).total_ns["fabric"] > 0
        require_circuits(run)


def test_with_zero_1_hops_come_back_after_the_exchange_of_weights(electrical: Emulation) -> None:
    run = play(20, zero=1)
    assert run.losses == electrical.losses
    assert all(np.array_equal(run.weights[name], electrical.weights[name]) for name in electrical.weights)
    require_circuits(run, last=Kind.STEP)


def test_a_program_with_several_sums_on_a_worker_is_refused() -> None:
    program, costs = case(None)
    orders = [program.ops(worker) for worker in range(program.num_workers)]
    twice = assemble("twice", Layout(2, 6, 3, program.rank_dc), [
        [op for s in (rank, rank + 3) for op in (Op(Kind.F, s, 0), Op(Kind.B, s, 0), Op(Kind.SYNC, s, 0))]
        for rank in range(len(orders) // 2)
    ])  # fmt: skip
    with pytest.raises(AtlasError, match="several SYNC on one worker"):
        emulate(twice, costs, SMALL)


def require_circuits(run: Emulation, last: Kind = Kind.SYNC) -> None:
    """Nothing was sent, and no SYNC began, before its circuits carried data; none was removed with bytes on it.
    `last`: what ends the use of a ring."""
    timeline, program = run.timeline, run.timeline.program
    number = np.arange(program.num_transfers).reshape(program.transfer_shape)
    rank = program.op_worker % program.num_ranks
    assert run.rails is not None
    for row in run.rails.rows:
        i = row["iteration"]
        slots = slice(i * program.num_microbatches, (i + 1) * program.num_microbatches)
        syncs, ends = ((program.kind == kind) & np.isin(rank, row["ranks"]) for kind in (Kind.SYNC, last))
        if row["to"] == "hop":
            through = number[:, row["pipeline"], 0, slots].ravel()
            assert (timeline.transfer_start_ns[through] >= row["end_ns"]).all()
            assert (timeline.op_end_ns[ends & (program.microbatch == i - 1)] <= row["start_ns"]).all()
        else:
            through = number[:, :, 0, slots].ravel()
            assert (timeline.transfer_arrive_ns[through] <= row["start_ns"]).all()
            assert (timeline.op_start_ns[syncs & (program.microbatch == i)] >= row["end_ns"]).all()


# ---- switches and controllers that fail ------------------------------------------------------------------------------
class Recorded(WorkerGroup):
    """Workers that only record what they are told."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(names)
        self.told: list[tuple[str, list[int]]] = []

    def send(self, name: str, message: dict[str, Any]) -> None:
        self.told.append((name, message["circuits"]))

    def exit_reason(self, name: str) -> str:
        return "ended"


class Deadly(EmulatedSwitch):
    """Ends the thread that calls it."""

    async def apply(self, circuits: Sequence[Circuit]) -> None:
        if self.num_changes >= self.fails_at:
            raise SystemExit(1)
        await super().apply(circuits)


class Broken(EmulatedSwitch):
    async def apply(self, circuits: Sequence[Circuit]) -> None:
        raise KeyError("no such port")


def broken(make: Callable[[], Switch], deadline_s: float = LIMIT_S) -> AtlasError:
    """What ends a run with such a switch."""
    program, costs = case(1)
    roles = all_roles(program, 1)
    workers = Recorded([role.name for role in roles])
    settings = RailSettings(make_switch=lambda dc, delay_s: make(), deadline_s=deadline_s)
    with RailControl(workers, roles, [RailCosts(costs.circuits, costs.compute_ns)], range(2), settings) as rails:
        rails.begin(time.monotonic_ns())
        with pytest.raises(AtlasError) as caught:
            workers.wait_for("result", LIMIT_S)
    return caught.value


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("late", "the switch was late: the circuits were not ready within 0.2 s"),
        ("refuses", "refused: the switch is in maintenance"),
        ("no-change", "acknowledged 1 circuits that it does not have"),
    ],
)
def test_a_switch_that_fails_ends_the_run_with_a_named_error(fault: Any, said: str) -> None:
    error = broken(lambda: EmulatedSwitch(0.001, fault=fault), 0.2 if fault == "late" else LIMIT_S)
    assert isinstance(error, SwitchError)
    assert str(error).startswith("east: change ")
    assert said in str(error)


@pytest.mark.parametrize("make", [Deadly, Broken])
def test_a_controller_that_dies_ends_the_run_with_a_named_error(make: type[EmulatedSwitch]) -> None:
    error = broken(lambda: make(0.001))
    assert isinstance(error, WorkerError), "a restart may help"
    assert "the controller of the circuits" in str(error)


@pytest.mark.slow
def test_a_run_goes_on_from_its_checkpoint_after_its_controller_died(electrical: Emulation, tmp_path: Path) -> None:
    program, costs = case(10)
    attempts: list[str] = []

    def attempt() -> Emulation:
        found = find_checkpoints(str(tmp_path), program.rank_dc, every=1)
        make = EmulatedSwitch if attempts else lambda delay_s: Deadly(delay_s, fails_at=6)
        settings = EmulationSettings(
            3 - first_step(found),
            save=found,
            rails=RailSettings(make_switch=lambda dc, delay_s: make(delay_s)),
        )
        return emulate(program, costs, SMALL, settings)

    run = run_with_restarts(attempt, lambda: 0, RestartPolicy(1, 0.0), attempts.append)
    assert len(attempts) == 1
    assert "the controller of the circuits ended" in attempts[0]
    assert run.losses == electrical.losses[-len(run.losses) :]
    assert len(run.losses) < 3, "the first step was saved"
    assert all(np.array_equal(run.weights[name], electrical.weights[name]) for name in electrical.weights)


def test_with_a_fallback_the_circuits_stay_as_they_are_and_nothing_waits() -> None:
    program, costs = case(1)
    roles = all_roles(program, 1)
    workers = Recorded([role.name for role in roles])
    switch = EmulatedSwitch(0.001, fault="refuses", fails_at=1)
    settings = RailSettings(fallback=True, make_switch=lambda dc, delay_s: switch, deadline_s=LIMIT_S)
    with RailControl(workers, roles, [RailCosts(costs.circuits, costs.compute_ns)], range(1), settings) as rails:
        rails.begin(time.monotonic_ns())
        deadline = time.monotonic() + LIMIT_S
        while len(workers.told) < 4 and time.monotonic() < deadline:
            time.sleep(0.001)
        report = rails.report()
    assert sorted(workers.told) == [("p0.s0", [0, 1]), ("p0.s1", [0, 0]), ("p1.s0", [0, 1]), ("p1.s1", [0, 0])]
    assert report is not None
    assert report.num_changes == 1
    assert "in maintenance" in report.failed
