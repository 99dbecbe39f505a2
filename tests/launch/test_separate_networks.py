"""Every datacenter in its own network namespace and its own directory tree, nothing shared, launched by `--dc`, with
certificates; one of them is lost with its directory, and the others go on. And four runs of bench/faults.py."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from multi_dc_runs import LIMIT_S, job_text, losses_alone, write_job

from atlas.errors import AtlasError
from atlas.wan.emulator.paths import PathSpec
from atlas.wan.security.certs import make_ca, make_node

THREE = ("east", "west", "south")
NUM_STEPS = 10
FAULTS = Path(__file__).parents[2] / "bench" / "faults.py"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="network namespaces need root on Linux")
def test_separate_datacenters_continue_when_one_is_lost(tmp_path: Path) -> None:
    from atlas.wan.emulator.namespace_net import NamespaceNet

    job = write_job(tmp_path / "plan", *THREE, tight=True)
    alone = losses_alone(job, NUM_STEPS)
    make_ca(tmp_path / "ca")
    for dc in THREE:
        make_node(tmp_path / "ca", dc)
    path = PathSpec(latency_s=0.005, window_bytes=None)
    try:
        net = NamespaceNet({("east", "west"): path, ("west", "south"): path, ("east", "south"): path})
    except (AtlasError, OSError) as error:
        pytest.skip(f"no network namespaces here: {error}")
    with net:
        trees = {dc: launch(net, dc, tmp_path) for dc in THREE}
        east, west, south = (trees[dc][1] for dc in THREE)
        deadline = time.monotonic() + LIMIT_S
        while not list((tmp_path / "east").glob("saves/of-south/step-00000002-a0/*.part.json")):
            assert time.monotonic() < deadline, logs(tmp_path)
            assert east.poll() is None, logs(tmp_path)
            time.sleep(0.02)
        south.send_signal(signal.SIGKILL)
        south.wait()
        shutil.rmtree(tmp_path / "south")
        assert east.wait(LIMIT_S) == 0, logs(tmp_path)
        assert west.wait(LIMIT_S) == 0, logs(tmp_path)
    assert "datacenter south is lost" in logs(tmp_path)
    told = {line["step"]: line["loss"] for line in map(json.loads, (tmp_path / "east/steps").read_text().splitlines())}
    assert sorted(told) == list(range(1, NUM_STEPS + 1))
    assert all(abs(told[step] - loss) <= 1e-5 * loss for step, loss in alone.items()), (told, alone)


def launch(net: Any, dc: str, base: Path) -> tuple[Path, subprocess.Popen[bytes]]:
    """A launcher on its node, with a tree that holds its own plan, certificates and checkpoints."""
    tree = base / dc
    (tree / "certs").mkdir(parents=True)
    for name in ("ca.pem", f"{dc}.pem", f"{dc}.key"):
        shutil.copy2(base / "ca" / name, tree / "certs" / name)
    (tree / "plan.yaml").write_text(job_text(*THREE, tight=True))
    command = [sys.executable, "-m", "atlas", "train", "plan.yaml", "--dc", dc, "--no-bar", "--device", "cpu"]
    command += ["--data", "shipped", "--learning-rate", "0.003", "--steps", str(NUM_STEPS), "--save-every", "2"]
    command += ["--rendezvous", f"{net.address('east')}:7700", "--listen", net.address(dc), "--certs", "certs"]
    command += ["--checkpoints", "saves", "--grace", "1.5", "--auto-replan", "--log", "steps"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with (base / f"{dc}.log").open("w") as log:
        return tree, net.node(dc).popen(command, cwd=tree, env=env, stdout=log, stderr=subprocess.STDOUT)


def logs(base: Path) -> str:
    return "\n".join(f"{path.name}: {path.read_text()}" for path in sorted(base.glob("*.log")))


# ---- four of the forty -----------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def faults() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_faults", FAULTS)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def wanted(faults: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    weights: dict[str, str] = faults.run_case(
        "none", 0, tmp_path_factory.mktemp("faults") / "undisturbed", apart=False
    )["weights"]
    return weights


@pytest.mark.parametrize(
    ("event", "seed"),
    [
        ("kill", 11),
        pytest.param("cut", 12, marks=pytest.mark.slow),
        ("disk", 13),
        pytest.param("crash", 14, marks=pytest.mark.slow),
    ],
)
def test_the_weights_are_those_of_the_undisturbed_run(
    event: str, seed: int, faults: ModuleType, wanted: dict[str, str], tmp_path: Path
) -> None:
    found = faults.run_case(event, seed, tmp_path / event, apart=False)
    assert found["weights"] == wanted
    assert found["starts"] == (2 if event == "kill" else 1)  # a cut path and a full disk cost no restart
