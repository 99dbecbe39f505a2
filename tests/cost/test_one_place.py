"""A link rule, a GPU type or a memory rule is changed in one place, and `simulate`, `plan` and `whatif` all follow; so
do the estimate and the floor by which a search chooses what it simulates.

These tests change exactly one name of `atlas.cost` or `atlas.spec` and run the commands as a user does. The tests of
closed forms compare what the planner computes for many candidates at once with what the simulator has for one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from atlas.cli import main
from atlas.cost import cluster_arrays
from atlas.cost.arrange import arrange
from atlas.cost.cluster_arrays import GIB
from atlas.cost.memory import WorkerMemory, memory_rule, worker_memory
from atlas.cost.price import can_share, layout_of, price
from atlas.cost.table import Costs, lower_bound
from atlas.ir.assemble import with_optimizer
from atlas.ir.program import Kind
from atlas.planner.candidate import Candidate
from atlas.planner.estimate import Estimate, estimate
from atlas.planner.estimated_candidates import depths, entry_of, single_groups, variants, worker_setups
from atlas.planner.judge import judge, simulate_group
from atlas.planner.objective import Objective
from atlas.planner.space import KEEPABLE, space_of
from atlas.sim.simulate import simulate
from atlas.spec import GPUS, Job, load_job, override

KEEP = [word for key in KEEPABLE for word in ("--keep", key)]


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """Two datacenters with one pipeline across them."""
    path = tmp_path / "job.yaml"
    _write(path, "A100-40")
    return path


def _write(path: Path, gpu: str) -> None:
    data = {
        "name": "one-place",
        "model": {"layers": 4, "hidden": 2048, "heads": 16, "vocab": 32_000, "seq_len": 1024},
        "cluster": {
            "wan": {"latency_ms": 5.0, "pair_gbps": 5.0},
            "datacenters": [{"name": name, "nodes": 2, "gpus_per_node": 1, "gpu": gpu} for name in ("east", "west")],
        },
        "num_microbatches": 4,
        "pp": 2,
        "pipelines_per_cell": 2,
        "efficiency": 0.5,
        "placement": [{"dc": "east", "stages": 1}, {"dc": "west", "stages": 1}],
    }
    path.write_text(yaml.safe_dump(data))


def _figures(job: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, dict[str, Any]]:
    """The seconds and the fullest GPU that each command reports."""
    simulated = _run(["simulate", str(job), "--schedule", "1f1b", "--tcp", "many", "--json"], capsys)[0]
    planned = _run(["plan", str(job), *KEEP, "--tries", "0", "--json"], capsys)["plan"]["predicted"]
    asked = _run(["whatif", str(job), "--no-marginals", "--json"], capsys)["now"]
    every = {"simulate": simulated, "plan": planned, "whatif": asked}
    figures = {name: {key: one[key] for key in ("iteration_s", "peak_gib")} for name, one in every.items()}
    return figures | _searched(load_job(job))


def _searched(job: Job) -> dict[str, dict[str, float]]:
    """What a search for a job that keeps all its choices goes by, in seconds; nothing where the job does not fit."""
    entries, _, _ = single_groups(space_of(job, keep=KEEPABLE), cluster_arrays.cluster_arrays(job), Objective())
    return {
        name: {"iteration_s": seconds}
        for entry in entries
        for name, seconds in (("estimate", entry.iteration_s), ("floor", entry.floor))
    }


def _run(words: list[str], capsys: pytest.CaptureFixture[str]) -> Any:
    assert main(words) == 0, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


def test_a_link_rule(job: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    before = _figures(job, capsys)
    whole = cluster_arrays.path_bps
    monkeypatch.setattr(cluster_arrays, "path_bps", lambda *words: whole(*words) / 4)
    after = _figures(job, capsys)
    for name in before:
        assert after[name]["iteration_s"] > 1.2 * before[name]["iteration_s"], name


def test_a_rule_of_the_network_inside_a_datacenter(
    job: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both stages are in one datacenter."""
    alone = {"pipelines_per_cell": 1, "placement": [{"dc": "east", "stages": 2}]}
    job.write_text(yaml.safe_dump({**yaml.safe_load(job.read_text()), **alone}))
    before = _figures(job, capsys)
    whole = cluster_arrays.share_of_node
    monkeypatch.setattr(cluster_arrays, "share_of_node", lambda *words: whole(*words) / 100)
    after = _figures(job, capsys)
    for name in before:
        assert after[name]["iteration_s"] > 1.2 * before[name]["iteration_s"], name


def test_a_gpu_type(job: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    before = _figures(job, capsys)
    old = GPUS["A100-40"]
    slow = {"bf16_tflops": old.bf16_tflops / 10, "memory_gbytes_per_s": old.memory_gbytes_per_s / 10}
    monkeypatch.setitem(GPUS, "NEW-GPU", old.model_copy(update=slow))
    _write(job, "NEW-GPU")
    after = _figures(job, capsys)
    for name in before:
        assert after[name]["iteration_s"] > 2 * before[name]["iteration_s"], name


def test_a_memory_rule(job: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    before = _figures(job, capsys)
    static = WorkerMemory.static.fget
    assert static is not None
    monkeypatch.setattr(WorkerMemory, "static", property(lambda self: static(self) + 3 * GIB))
    after = _figures(job, capsys)
    for name in ("simulate", "plan", "whatif"):
        assert after[name]["peak_gib"] == pytest.approx(before[name]["peak_gib"] + 3), name
    monkeypatch.setattr(WorkerMemory, "static", property(lambda self: static(self) + 300 * GIB))
    for words in (["simulate", str(job)], ["plan", str(job)], ["whatif", str(job)]):
        assert main(words) == 2, words
        assert "GiB" in capsys.readouterr().err
    assert not _searched(load_job(job))


def test_the_search_knows_how_many_microbatches_fit(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without recompute a microbatch is held whole from its forward to its backward."""
    loaded = load_job(job, ["recompute=false"])
    before, workers = _searched(loaded), worker_memory(loaded, arrange(loaded))
    spare = min(worker.free - 1.5 * worker.kept for worker in workers)
    static = WorkerMemory.static.fget
    assert static is not None
    monkeypatch.setattr(WorkerMemory, "static", property(lambda self: static(self) + spare))
    after = _searched(loaded)
    for name in before:
        assert after[name]["iteration_s"] > 1.2 * before[name]["iteration_s"], name


# ---- closed forms --------------------------------------------------------------------------------------------------
CHANGES = {
    "caps": [],
    "a trunk": ["cluster.wan.trunk_gbps=6"],
    "a slow network": ["cluster.datacenters.east.net_gbps=4", "cluster.datacenters.west.net_gbps=12"],
    "several GPUs in a node": ["cluster.datacenters.east.gpus_per_node=4", "cluster.datacenters.west.gpus_per_node=2"],
    "tied embeddings": ["model.tied_embeddings=true"],
}


def _estimates(job: Job) -> Iterator[tuple[Estimate, int, Candidate]]:
    """Some candidates of every depth: the estimates of a batch, the row in it, and the candidate."""
    space, cluster = space_of(job), cluster_arrays.cluster_arrays(job)
    for setup in worker_setups(space, cluster):
        for depth in depths(space, cluster, setup):
            batch = variants(space, setup, depth)
            if batch is not None and depth > 1:
                found = estimate(space, cluster, setup.model, batch)
                for v in np.flatnonzero(found.fits)[::2].tolist():
                    yield found, v, entry_of(space, cluster, batch, found, v, 0.0, 0.0).candidate


def _priced(job: Job, candidate: Candidate) -> list[Costs]:
    """Without turns on the WAN, and with them where pipelines may take them."""
    one = candidate.job(job)
    found = arrange(one)
    sharings = (False, True) if candidate.sharing and can_share(one, layout_of(one, arrangement=found)) else (False,)
    return [price(one, tcp=candidate.tcp, sharing=sharing, arrangement=found) for sharing in sharings]


@pytest.mark.parametrize("name", [*CHANGES, "photonic rails"])
def test_a_transfer_takes_as_long_in_the_search_as_in_the_simulator(job: Path, name: str) -> None:
    loaded, compared = load_job(job) if name in CHANGES else on_rails(job, {}, {}), 0
    changed = override(loaded, ["layers_per_stage=", "placement=", *CHANGES.get(name, [])])
    for found, v, candidate in _estimates(changed):
        costs = _priced(changed, candidate)
        ways = [(one.before_ns + one.work_ns + one.latency_ns)[0, 0] / 1e9 for one in costs]
        assert found.floors.way_s[v] == pytest.approx(np.min(ways, axis=0), abs=5e-9), candidate
        loads = [
            one.work_ns[0, 0] / 1e9 * turns for one, turns in zip(costs, (1, costs[0].num_pipelines), strict=False)
        ]
        wan = found.floors.load_s[v] > 0
        assert found.floors.load_s[v][wan] == pytest.approx(np.min(loads, axis=0)[wan], abs=5e-8), candidate
        compared += 1
    assert compared > 5


@pytest.mark.parametrize("name", CHANGES)
def test_the_floor_of_the_search_is_close_to_the_lower_bound(job: Path, name: str) -> None:
    changed, ratios = override(load_job(job), ["layers_per_stage=", "placement=", *CHANGES[name]]), []
    for found, v, candidate in _estimates(changed):
        one = candidate.job(changed)
        rule, num_mb = memory_rule(one, arrange(one)), one.num_microbatches
        bounds = (
            lower_bound(costs, num_mb, rule, recompute=one.recompute, closing=True)
            for costs in _priced(changed, candidate)
        )
        ratios.append(float(found.floor_s(np.array([v]))[0]) / min(bound.ns for bound in bounds) * 1e9)
    assert max(ratios) < 1.001
    assert float(np.median(ratios)) > 0.95


@pytest.mark.parametrize("runtime", ["megatron", "torch"])
def test_a_worker_that_sends_itself_is_held_as_long_in_the_search(job: Path, runtime: str) -> None:
    changed, compared = override(load_job(job), ["layers_per_stage=", "placement=", f"runtime={runtime}"]), 0
    for found, v, candidate in _estimates(changed):
        (costs,) = _priced(changed, candidate)
        busy_ns = costs.compute_ns[0][:, [Kind.F, Kind.R, Kind.B]]
        if not changed.recompute:
            busy_ns[:, 1] = 0
        busy_ns[-1, 1] = 0
        period_s = busy_ns.sum(axis=1).max() / 1e9
        if found.period_s[v] < 1.2 * period_s:  # memory is not short
            # The closed form counts the latency of a network inside a datacenter, 20 us each way, as work.
            assert found.period_s[v] == pytest.approx(period_s, abs=81e-6), candidate
            compared += 1
    assert compared > 5


RAILS = {
    "asked early": ({}, {}),
    "asked late": ({}, {"provision": False}),
    "with ZeRO-1": ({"zero": 1}, {}),
    "with ZeRO-1, asked late": ({"zero": 1}, {"provision": False}),
    "in one datacenter": ({"placement": [{"dc": "east", "stages": 4}]}, {"provision": False}),
    "without hops": ({"pp": 2, "cells": 2, "placement": [{"dc": name, "stages": 1} for name in ("east", "west")]}, {}),
}
"""Changes of the job, and of its fabrics."""


@pytest.mark.parametrize("name", RAILS)
def test_a_candidate_waits_for_its_circuits_as_long_as_its_simulation(job: Path, name: str) -> None:
    loaded = on_rails(job, *RAILS[name])
    space, cluster = space_of(loaded, keep=KEEPABLE), cluster_arrays.cluster_arrays(loaded)
    for entry in single_groups(space, cluster, Objective())[0]:
        group = simulate_group(entry.candidate.job(loaded), entry.candidate)
        assert group.costs.circuits is not None
        whole = simulate(with_optimizer(group.timeline.program), group.costs)
        judged_s = judge(space, cluster, entry.candidate).figures.iteration_s
        assert judged_s == pytest.approx(whole.makespan_ns / 1e9, abs=1e-8)


def on_rails(path: Path, changes: dict[str, Any], fabric: dict[str, Any]) -> Job:
    """The job on photonic rails: stages of eight GPUs, four in each pipeline, two in each datacenter."""
    data = yaml.safe_load(path.read_text())
    for dc in data["cluster"]["datacenters"]:
        dc |= {"nodes": 8, "gpus_per_node": 8, "gpu": "H200"}
        dc |= {"fabric": {"kind": "photonic", "reconfigure_ms": 50.0, **fabric}}
    data |= {"tp": 8, "pp": 4, "placement": [{"dc": name, "stages": 2} for name in ("east", "west")], **changes}
    path.write_text(yaml.safe_dump(data))
    return load_job(path)
