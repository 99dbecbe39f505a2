"""Workers that torchrun or Slurm start on several hosts join the service of their datacenter, with certificates."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import httpx2 as httpx
import pytest
from free_ports import free_port

from atlas.wan.security.certs import make_ca, make_node

pytestmark = pytest.mark.slow  # four processes that import torch
JOB = """
name: joined
model: {layers: 4, hidden: 64, heads: 2, vocab: 300, seq_len: 64}
cluster:
  gpus:
    slow:
      { bf16_tflops: 0.02, fp32_tflops: 0.02, memory_gib: 16, memory_gbytes_per_s: 100, peer_gbps: 100,
        calibration: { matrix_efficiency: 0.9, memory_efficiency: 0.9, peer_efficiency: 0.9, layer_floor_us: 30000,
                       fused_attention: true } }
  datacenters:
    - {name: east, nodes: 2, gpus_per_node: 1, gpu: slow}
precision: fp32
microbatch: 1
num_microbatches: 4
pp: 2
pipelines_per_cell: 1
"""
LIMIT_S = 300.0
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")


def until(holds: Callable[[], object], why: Callable[[], str]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < deadline, why()
        time.sleep(0.1)


class Commands:
    """Processes in a folder, each with a log; all ended afterwards."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder, self._stack = folder, stack

    def start(self, name: str, *words: str, **env: str) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **env}
        with (self.folder / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, *words], cwd=self.folder, env=environment, stdout=log, stderr=log
            )
        self._stack.callback(process.wait)
        self._stack.callback(process.kill)
        return process

    @property
    def logs(self) -> str:
        return "\n".join(f"{file.name}: {file.read_text()[-1500:]}" for file in self.folder.glob("*.log"))


@pytest.mark.parametrize("launcher", ["torchrun", "slurm"])
def test_workers_of_several_hosts_join_with_the_runs_certificates(tmp_path: Path, launcher: str) -> None:
    (tmp_path / "job.yaml").write_text(JOB)
    make_ca(tmp_path / "certs")
    make_node(tmp_path / "certs", "east")
    train = ["-m", "atlas", "train", "job.yaml", "--dc", "east", "--device", "paced", "--data", "shipped"]
    train += ["--steps", "100000", "--no-bar", "--rendezvous", f"127.0.0.1:{free_port()}", "--certs", "certs"]
    train += ["--filler", "bubbletea", "--filler-folder", "meet"]
    port = free_port()
    with ExitStack() as stack:
        commands = Commands(tmp_path, stack)
        if launcher == "torchrun":
            launchers = [commands.start("train", *TORCHRUN, *train, "--checkpoints", "saved")]
        else:  # as srun starts them, one on each host
            launchers = [
                commands.start(f"train {node}", *train, "--checkpoints", f"saved-{node}", "--runs", f"runs-{node}",
                               SLURM_NODEID=node, SLURM_NNODES="2")
                for node in "01"
            ]  # fmt: skip
        commands.start(
            "service", "-m", "bubbletea.cli", "serve", "job.yaml", "--dc", "east", "--device", "paced", "--folder",
            "meet", "--certs", "certs", "--port", str(port), "--stages", "1", "--name", "tiny",
        )  # fmt: skip

        def lanes() -> int:
            try:
                return int(httpx.get(f"http://127.0.0.1:{port}/health", timeout=60).json()["lanes"])
            except httpx.HTTPError:
                return 0

        until(lambda: lanes() == 2 or any(one.poll() is not None for one in launchers), lambda: commands.logs)
        ask = {"model": "tiny", "prompt": "Tell me", "max_tokens": 2, "deadline_s": 60}

        def is_answered() -> bool:
            return httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=ask, timeout=90).status_code == 200

        until(is_answered, lambda: commands.logs)
        assert not any(one.poll() is not None for one in launchers), commands.logs
        assert "Traceback" not in commands.logs, commands.logs
        for one in launchers:
            one.send_signal(signal.SIGTERM)  # torchrun ends its launchers
        until(lambda: all(one.poll() is not None for one in launchers), lambda: commands.logs)
