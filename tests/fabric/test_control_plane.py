"""The control plane: the list of changes, switches that work and that fail, RESTCONF, and a rehearsal in real time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from optical_switch import Device, running

from atlas.cli import main
from atlas.cost.table import Circuits, Costs, kind_costs, uniform_costs
from atlas.fabric.circuit_plan import circuit_plan
from atlas.fabric.rehearsal import rehearse_fabric
from atlas.fabric.restconf import RESOURCE, RestconfSwitch
from atlas.fabric.switch import EmulatedSwitch, SwitchError
from atlas.ir.assemble import repeated, with_optimizer
from atlas.ir.program import Layout, Program
from atlas.schedules.classic import one_f_one_b

MS = 1_000_000


def case(delay_ms: float, *, provision: bool = True, iterations: int = 2) -> tuple[Program, Costs]:
    program = repeated(with_optimizer(one_f_one_b(Layout.even(2, 3, 3, 1))), iterations)
    kinds = kind_costs(forward_ns=8 * MS, backward_ns=16 * MS, sync_ns=20 * MS, step_ns=4 * MS)
    costs = uniform_costs(2, 3, kinds, lan_ns=2 * MS, lan_latency_ns=MS // 50)
    switching = Circuits((True,) * 3, (round(delay_ms * MS),) * 3, (provision,) * 3)
    return program, replace(costs, circuits=switching)


def test_the_list_of_changes_names_triggers_and_circuits() -> None:
    program, costs = case(1)
    plan = circuit_plan(program, costs.circuits)
    first_hop = plan[0].row()
    assert first_hop["circuits"] == [["p0.s0/1", "p0.s1/0"]]
    assert first_hop["after"] == []
    ring = next(change for change in plan if change.what.to == "ring" and change.what.ranks == (0,))
    assert ring.circuits == (("p0.s0/1", "p1.s0/0"), ("p1.s0/1", "p0.s0/0"))
    assert ring.after == ("0F2 on p0.s0 (dc0)", "1B2 on p0.s1 (dc0)", "0F2 on p1.s0 (dc0)", "1B2 on p1.s1 (dc0)")
    second = next(change for change in plan if change.what.to == "hop" and change.what.iteration == 1)
    assert {text.split()[0] for text in second.after} == {"0SYNC0", "1SYNC0"}
    assert circuit_plan(program, None) == []


@pytest.mark.parametrize("provision", [True, False])
def test_a_rehearsal_takes_as_long_as_predicted(provision: bool) -> None:
    program, costs = case(30, provision=provision)
    found = rehearse_fabric(program, costs, {"dc0": EmulatedSwitch(0.03)})
    assert found.num_changes == len(circuit_plan(program, costs.circuits))
    assert found.measured_s >= 0.98 * found.predicted_s  # a busy machine may be slower; bench/fabric.py has the bar


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("late", "the switch was late: the circuits were not ready within 0.2 s"),
        ("refuses", "refused: the switch is in maintenance"),
        ("no-change", "acknowledged [12] circuits that it does not have"),
    ],
)
def test_a_switch_that_fails_ends_the_run_with_a_named_error(fault: Any, said: str) -> None:
    program, costs = case(1)
    deadline_s = 0.2 if fault == "late" else 30.0  # only the late one must be waited for
    with pytest.raises(SwitchError, match=f"dc0: change .*{said}"):
        rehearse_fabric(program, costs, {"dc0": EmulatedSwitch(0.001, fault=fault, fails_at=5)}, deadline_s=deadline_s)


def test_with_a_fallback_the_run_goes_on_with_the_circuits_as_they_are() -> None:
    program, costs = case(1)
    switch = EmulatedSwitch(0.001, fault="refuses", fails_at=5)
    found = rehearse_fabric(program, costs, {"dc0": switch}, fallback=True)
    assert found.failed is not None
    assert switch.num_changes < len(circuit_plan(program, costs.circuits))


JOB = """
model: {layers: 8, hidden: 1024, heads: 16, seq_len: 1024}
cluster:
  datacenters:
    - {name: east, nodes: 6, gpus_per_node: 1, gpu: H200, fabric: {kind: photonic, reconfigure_ms: 1, fallback: ring}}
num_microbatches: 3
pp: 3
pipelines_per_cell: 2
"""


def test_the_command_lists_changes_and_rehearses_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "job.yaml").write_text(JOB)
    job = str(tmp_path / "job.yaml")
    assert main(["fabric", job, "--circuits", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["changes"]
    assert {row["to"] for row in rows} == {"hop", "ring"}
    assert main(["fabric", job, "--circuits"]) == 0
    assert "p0.s0/1 - p0.s1/0" in capsys.readouterr().out
    assert main(["fabric", job, "--rehearse", "2"]) == 0
    assert "circuit changes" in capsys.readouterr().out
    assert main(["fabric", job, "--rehearse", "2", "--fault", "refuses"]) == 0
    assert "refused" in capsys.readouterr().out
    assert (
        main(
            [
                "fabric",
                job,
                "--rehearse",
                "2",
                "--fault",
                "no-change",
                "--set",
                "cluster.datacenters.east.fabric.fallback=none",
            ]
        )
        == 2
    )
    assert "acknowledged" in capsys.readouterr().err
    assert main(["fabric", job, "--circuits", "--set", "cluster.datacenters.east.fabric.kind=rail"]) == 0
    assert "No circuits change" in capsys.readouterr().out


def test_a_port_has_one_circuit() -> None:
    with pytest.raises(SwitchError, match="port a/0 is in two circuits"):
        asyncio.run(EmulatedSwitch(0.0).apply([("a/0", "b/0"), ("a/0", "c/0")]))


# ---- RESTCONF --------------------------------------------------------------------------------------------------------
@pytest.fixture
def device() -> Iterator[tuple[str, type[Device]]]:
    with running() as found:
        yield found


def test_restconf_replaces_the_circuits_of_the_ports(device: tuple[str, type[Device]]) -> None:
    root, kind = device
    switch = RestconfSwitch(root)

    async def change() -> set[tuple[str, str]]:
        await switch.apply([("a/1", "b/0"), ("c/1", "d/0")])
        await switch.apply([("a/1", "c/0")])
        return await switch.circuits()

    assert asyncio.run(change()) == {("c/1", "d/0"), ("a/1", "c/0")}
    assert set(kind.seen) == {f"/restconf/data/{RESOURCE}"}


@pytest.mark.parametrize(
    ("mode", "said"),
    [
        ("refuses", "refused: another user holds the lock"),
        ("no-change", "the switch was late"),
        ("garbage", "the answer is not a list of cross-connects"),
    ],
)
def test_restconf_errors_are_named(device: tuple[str, type[Device]], mode: str, said: str) -> None:
    root, kind = device
    kind.mode = mode
    program, costs = case(1, iterations=1)
    deadline_s = 0.3 if mode == "no-change" else 30.0  # only the silent one must be waited for
    with pytest.raises(SwitchError, match=said):
        rehearse_fabric(program, costs, {"dc0": RestconfSwitch(root)}, deadline_s=deadline_s)


def test_a_switch_out_of_reach_is_named() -> None:
    program, costs = case(1, iterations=1)
    with pytest.raises(SwitchError, match="cannot be reached"):
        rehearse_fabric(program, costs, {"dc0": RestconfSwitch("http://127.0.0.1:9/restconf")})
    with pytest.raises(SwitchError, match="is not an address of a switch"):
        RestconfSwitch("ftp://x")
