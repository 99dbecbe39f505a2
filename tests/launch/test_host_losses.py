"""The unit of loss is a host: a spare takes its place, or fewer pipelines continue with the same batches; a host that
returns is taken back at a checkpoint."""

from __future__ import annotations

import os
import re
import shutil
import signal
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from free_ports import free_port
from multi_dc_runs import LIMIT_S, Run, TrackedAgent, hashes, require_losses_of, run_datacenters, train_options

from atlas.cli import main
from atlas.errors import AtlasError
from atlas.launch.fewer_hosts import trained_on
from atlas.launch.prepared_job import PreparedJob, copy_targets, prepare_job
from atlas.launch.rendezvous import AgentName
from atlas.launch.worker_processes import WorkerMessage, WorkerProcesses
from atlas.runtime.checkpoint.manifest import complete_ids
from atlas.runtime.checkpoint.store import LocalStore
from atlas.spec import Job, load_job

NUM_STEPS = 40
"""Workers do not wait for the launchers: on a busy host they are steps ahead of what a test sees."""
SETTINGS = train_options(NUM_STEPS, save_every=2, grace_s=20, patience_s=120)
HOSTS = ("east 0/2", "east 1/2")


def hosts_job(folder: Path, **changes: Any) -> Job:
    """Two pipelines of one stage on two hosts of one datacenter."""
    job = {
        "name": "hosts",
        "model": {"layers": 4, "hidden": 32, "heads": 2, "vocab": 300, "seq_len": 32},
        "cluster": {"datacenters": [{"name": "east", "nodes": 2, "gpus_per_node": 1}]},
        "precision": "fp32",
        "microbatch": 2,
        "num_microbatches": 4,
        "pp": 1,
        "cells": 2,
        "pipelines_per_cell": 1,
        **changes,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "job.yaml").write_text(yaml.dump(job))
    return load_job(folder / "job.yaml")


def folders_of(base: Path, *names: str) -> dict[str, Path]:
    return {name: base / name.replace("/", "-") for name in names}


class HostLoss:
    """Loses a host and its disk, once, when a step is done."""

    def __init__(self, part: int, folder: Path, at_step: int = 5) -> None:
        self.part, self.folder, self.at_step = part, folder, at_step

    def step(self, run: Run, step: int) -> None:
        if step == self.at_step:
            self.at_step = -1
            TrackedAgent.running[f"east/site{self.part}"].vanish()
            shutil.rmtree(self.folder, ignore_errors=True)  # its last files may appear meanwhile


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[int, float], dict[str, str]]:
    """Losses by step, and hashes of the last weights."""
    base = tmp_path_factory.mktemp("undisturbed")
    run = run_datacenters(hosts_job(base), {"east": base / "east"}, SETTINGS)
    return run.losses, hashes({"east": base / "east"}, NUM_STEPS)


def test_a_spare_takes_the_place_of_a_lost_host_with_the_same_weights(
    undisturbed: tuple[dict[int, float], dict[str, str]], tmp_path: Path
) -> None:
    job = hosts_job(tmp_path)
    folders = folders_of(tmp_path / "struck", *HOSTS, "east spare")
    loss = HostLoss(1, folders["east 1/2"])
    run = run_datacenters(job, folders, SETTINGS, state=tmp_path / "state", on_step=loss.step)
    assert {name for name, code in run.codes.items() if code == 0} == {*folders, "coordinator"} - {"east 1/2"}, (
        run.said,
        run.errors,
    )
    (line,) = [line for line in run.said if "A spare takes its place" in line]
    assert re.fullmatch(
        r"host east/1 is lost: out of reach for \d+ s\. A spare takes its place: [\d.]+ s an iteration, as "
        r"before \(simulated\)",
        line,
    )
    assert run.starts == 2
    assert run.losses == undisturbed[0]
    left = {name: folder for name, folder in folders.items() if name != "east 1/2"}
    assert hashes(left, NUM_STEPS) == undisturbed[1]


def test_fewer_pipelines_go_on_and_the_run_grows_back_when_the_host_returns(
    undisturbed: tuple[dict[int, float], dict[str, str]], tmp_path: Path
) -> None:
    job, alone = hosts_job(tmp_path), undisturbed[0]
    options = train_options(NUM_STEPS, save_every=2, grace_s=0.5, patience_s=120)
    folders = folders_of(tmp_path / "hosts", *HOSTS)
    loss, returned = HostLoss(1, folders["east 1/2"], at_step=3), list[Run]()
    port = free_port()

    def again() -> None:
        returned.append(
            run_datacenters(job, folders, options, launchers=["east 1/2"], port=port, state=None, apart=True)
        )

    thread, pids = threading.Thread(target=again), dict[str, int]()

    def start(run: Run, found: Mapping[str, int]) -> None:
        pids.clear()
        pids.update(found)

    def step(run: Run, number: int) -> None:
        loss.step(run, number)
        if number >= 6 and run.starts == 2 and thread.ident is None:
            before = TrackedAgent.running["east/site1"]
            (left,) = pids.values()
            os.kill(left, signal.SIGSTOP)  # or the run could end before the host is back
            thread.start()
            while TrackedAgent.running["east/site1"] is before and thread.is_alive():
                time.sleep(0.02)
            os.kill(left, signal.SIGCONT)

    run = run_datacenters(job, folders, options, state=tmp_path / "state", on_start=start, on_step=step, port=port)
    thread.join(LIMIT_S)
    assert run.codes["coordinator"] == 0, (run.errors, run.said)
    assert returned[0].codes == {"east 1/2": 0}, returned[0].errors
    lost = [line for line in run.said if line.startswith("host east/1 is lost: out of reach for 0.5 s. 1 of 2")]
    assert len(lost) == 1, run.said
    assert "1 of 2 pipelines continues, with 8 microbatches in place of 4" in lost[0]
    assert "(simulated)" in lost[0]
    back = [line for line in run.said if line.startswith("host east/1 is back: all hosts are connected")]
    assert len(back) == 1, run.said
    require_losses_of(run, NUM_STEPS)
    assert all(abs(loss - alone[n]) <= 1e-5 * loss for n, loss in run.losses.items()), (run.losses, alone)


# ---- what is trained without some hosts ------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> PreparedJob:
    cluster = {
        "wan": {"latency_ms": 5, "pair_gbps": 1},
        "datacenters": [{"name": dc, "nodes": 4, "gpus_per_node": 1} for dc in ("east", "west")],
    }
    changes = {"cluster": cluster, "pp": 2, "cells": 4, "num_microbatches": 3}
    return prepare_job(hosts_job(tmp_path_factory.mktemp("plan"), **changes), SETTINGS)


HOSTS_OF = {"east": 4, "west": 4}


@pytest.mark.parametrize(
    ("lost", "pipelines", "microbatches"),
    [((), 4, 3), ((("east", 0),), 3, 4), ((("east", 0), ("west", 3)), 3, 4), ((("west", 1), ("west", 3)), 2, 6)],
)
def test_the_batch_stays_the_same(
    full: PreparedJob, lost: tuple[tuple[str, int], ...], pipelines: int, microbatches: int
) -> None:
    found = trained_on(full, HOSTS_OF, frozenset(lost), SETTINGS)
    program = found.prepared.program
    assert (found.prepared.job.cells * program.num_pipelines, program.num_microbatches) == (pipelines, microbatches)
    assert not found.asks
    assert found.prepared.program.rank_dc == full.program.rank_dc


def test_a_plan_with_one_pipeline_over_all_hosts_is_replanned_and_then_the_datacenter_is_left_out(
    full: PreparedJob,
) -> None:
    whole = frozenset(("west", part) for part in range(4))
    found = trained_on(full, HOSTS_OF, whole, SETTINGS)
    assert (found.asks, found.prepared.datacenters, found.lost) == (True, ["east"], whole)
    one = prepare_job(full.job.model_copy(update={"cells": 1, "pp": 4}), SETTINGS)
    hosts = {"east": 2, "west": 2}
    found = trained_on(one, hosts, frozenset({("east", 1)}), SETTINGS)
    assert found.asks
    assert found.what.startswith("On the remaining hosts: ")
    with pytest.raises(AtlasError, match="no datacenter is left"):
        trained_on(full, HOSTS_OF, frozenset((dc, part) for dc in HOSTS_OF for part in range(4)), SETTINGS)


def test_copies_go_to_the_next_datacenter_or_to_the_next_host_with_another_disk() -> None:
    east, west = ([AgentName(dc, part, 2) for part in range(2)] for dc in ("east", "west"))
    own = {agent.node: agent.node for agent in (*east, *west)}
    assert copy_targets(["east", "west"], [*east, *west], own)["east/site1"] == "west/site1"
    assert copy_targets(["east"], east, own) == {"east/site0": "east/site1", "east/site1": "east/site0"}
    assert copy_targets(["east"], east, dict.fromkeys(own, "one folder")) == {}


def test_one_worker_of_a_launcher_deletes_old_saves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    send, prunes = WorkerProcesses.send, dict[str, bool]()

    def noted(self: WorkerProcesses, name: str, message: WorkerMessage) -> None:
        if "assignment" in message:
            prunes[name] = message["assignment"]["save"]["prunes"]
        send(self, name, message)

    monkeypatch.setattr(WorkerProcesses, "send", noted)
    run = run_datacenters(hosts_job(tmp_path), {"east": tmp_path / "east"}, train_options(12, save_every=2))
    assert run.codes == {"east": 0}
    assert prunes == {"p0.s0": True, "p1.s0": False}
    kept = [id.step for id in complete_ids([LocalStore(tmp_path / "east" / "own")])]
    assert kept[-3:] == [8, 10, 12]
    assert len(kept) <= 4  # the other worker may complete the last save after the old ones were deleted


def test_a_spare_has_no_number_and_a_datacenter_of_the_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hosts_job(tmp_path)
    words = ["train", str(tmp_path / "job.yaml"), "--device", "cpu", "--spare"]
    assert main([*words, "--dc", "east", "--node", "1/4"]) == 2
    assert "a spare has no number until it replaces a host. Leave out --node" in capsys.readouterr().err
    assert main([*words, "--dc", "north"]) == 2
    assert "--dc north: the plan has no worker there" in capsys.readouterr().err
