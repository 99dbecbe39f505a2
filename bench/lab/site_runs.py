"""Runs of `atlas train --dc`, a launcher in each of the sites of `lab.sites`: several runs at a time, followed to their
end, with who listens where and how late the emulated paths were.

Devices are paced, slowly, and paths are long, so that a step waits for the WAN and not for the cores of this host.
"""

from __future__ import annotations

import contextlib
import json
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from free_ports import free_port
from multi_dc_runs import hashes

from atlas.wan.emulator.paths import PathSpec

from .sites import DNAT, MASQUERADE, PORTS, PUBLIC, Sites

KINDS = {"east": PUBLIC, "west": DNAT, "south": MASQUERADE}
PATH = PathSpec(latency_s=0.040, pair_bps=100e6, window_bytes=None)
GPU_TFLOPS = 0.01
"""A forward of a microbatch holds a device for 5 ms, which is longer than the arithmetic takes on a core."""
SAVE_EVERY, FIRST_COUNTED = 50, 10
RENDEZVOUS = 7700
LIMIT_S = 280.0
BLOCK_S = 5.0
CUT_S = 7.0
"""Longer than a sender waits for answers (`TransportSettings.stall_s`): all streams are replaced, by the side that can
dial."""
ATLAS = [sys.executable, "-m", "atlas"]


def job_text(datacenters: Sequence[str]) -> str:
    peak = {"bf16_tflops": GPU_TFLOPS, "fp32_tflops": GPU_TFLOPS}
    gpu = {**peak, "memory_gib": 80, "memory_gbytes_per_s": 2000, "peer_gbps": 2400}
    return yaml.dump(
        {
            "name": "real-sites",
            "model": {"layers": 6, "hidden": 64, "heads": 2, "vocab": 300, "seq_len": 64},
            "cluster": {
                "wan": {"latency_ms": PATH.latency_s * 1e3, "pair_gbps": 0.1},
                "gpus": {"slow": gpu},
                "datacenters": [{"name": dc, "nodes": 2, "gpus_per_node": 1, "gpu": "slow"} for dc in datacenters],
            },
            "precision": "fp32",
            "microbatch": 2,
            "num_microbatches": 4,
            "pp": len(datacenters),
            "pipelines_per_cell": 2,
        }
    )


class Block(NamedTuple):
    """A few seconds of a run."""

    began: float
    """Unix time."""
    ended: float
    late: str
    """Why the emulator was not in time; empty: it was."""


@dataclass
class SiteRun:
    """One run, in `base`. Without sites: on loopback."""

    base: Path
    sites: Sites | None
    num_steps: int
    processes: dict[str, subprocess.Popen[Any]] = field(default_factory=dict)
    listening: list[tuple[str, int]] = field(default_factory=list)
    """By site: the addresses and ports on which anything listened."""
    blocks: list[Block] = field(default_factory=list)

    @contextlib.contextmanager
    def started(self) -> Iterator[SiteRun]:
        rendezvous = f"127.0.0.1:{free_port()}"
        if self.sites is not None:
            rendezvous = f"{self.sites.sites['east'].gateway.address}:{RENDEZVOUS}"
        with contextlib.ExitStack() as stack:
            for dc in KINDS:
                self._start(dc, rendezvous, stack)
            yield self

    def _start(self, dc: str, rendezvous: str, stack: contextlib.ExitStack) -> None:
        folder, site = self.base / dc, None if self.sites is None else self.sites.sites[dc]
        folder.mkdir(parents=True)
        (folder / "plan.yaml").write_text(job_text(list(KINDS)))
        command = [*ATLAS, "train", "plan.yaml", "--dc", dc, "--schedule", "atlas", "--no-bar", "--device", "paced"]
        command += ["--data", "shipped", "--learning-rate", "0.003", "--steps", str(self.num_steps)]
        command += ["--save-every", str(SAVE_EVERY), "--checkpoints", "saves", "--rendezvous", rendezvous]
        command += ["--log", "steps"]
        if site is not None:
            command += ["--listen", site.listen, "--advertise", site.advertise, "--ports", f"{PORTS[0]}-{PORTS[1]}"]
            command += ["--certs", str(self.base.parent / "ca")]
        log = stack.enter_context((folder / "log").open("w"))
        popen = subprocess.Popen if site is None else site.popen
        process = popen(command, cwd=folder, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        self.processes[dc] = process
        stack.callback(end, process)

    @property
    def is_running(self) -> bool:
        return any(process.poll() is None for process in self.processes.values())

    @property
    def has_failed(self) -> bool:
        return any(process.poll() for process in self.processes.values())

    @property
    def steps(self) -> list[dict[str, Any]]:
        """What `--log` wrote so far."""
        file = self.base / "east" / "steps"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def counted(self, began: float = 0.0, ended: float = float("inf")) -> list[float]:
        """Seconds of the steps that ended in a span of time, without the first ones."""
        rows = [row for row in self.steps if row["step"] > FIRST_COUNTED and began < row["time"] <= ended]
        return [row["iteration_s"] for row in rows]

    @property
    def iteration_s(self) -> float:
        return statistics.median(self.counted())

    @property
    def weights(self) -> Mapping[str, str]:
        """After the first save."""
        return hashes({dc: self.base / dc / "saves" for dc in KINDS}, min(SAVE_EVERY, self.num_steps))

    @property
    def restarts(self) -> int:
        return (self.base / "east" / "log").read_text().count("Restart ")

    def note(self, began: float) -> None:
        """Record a block that ends now, and who listens."""
        if self.sites is None:
            return
        late = self.sites.net.lateness.reason()
        self.sites.net.reset_lateness()
        self.blocks.append(Block(began, time.time(), late or ""))
        for site in self.sites.sites.values():
            self.listening += site.listening()

    def require_done(self) -> None:
        if any(process.poll() != 0 for process in self.processes.values()):
            texts = "\n".join(f"{dc}: {(self.base / dc / 'log').read_text()[-2000:]}" for dc in KINDS)
            raise RuntimeError(f"the launchers ended with {[p.poll() for p in self.processes.values()]}:\n{texts}")


def end(process: subprocess.Popen[Any]) -> None:
    """A launcher; its workers end with it."""
    if process.poll() is None:
        process.send_signal(signal.SIGKILL)
    process.wait()


def train(*runs: SiteRun, cut: bool = False) -> None:
    """Start all runs at once and follow them to their ends. `cut`: the masqueraded site is cut off for a while."""
    with contextlib.ExitStack() as stack:
        for run in runs:
            stack.enter_context(run.started())
        began, deadline = time.time(), time.monotonic() + LIMIT_S
        while any(run.is_running for run in runs):
            if time.monotonic() > deadline or any(run.has_failed for run in runs):
                break
            time.sleep(0.25)
            if cut and runs[0].sites is not None and len(runs[0].steps) > FIRST_COUNTED:
                cut = False
                runs[0].sites.sites["south"].cut(CUT_S)
            if time.time() - began > BLOCK_S:
                for run in runs:
                    run.note(began)
                began = time.time()
        for run in runs:
            run.require_done()
