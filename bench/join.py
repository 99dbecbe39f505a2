"""A run over two datacenters with two hosts each, and BubbleTea services that come and go beside it.

Every launcher (`atlas train --dc NAME --node I/2 --filler bubbletea`) and every service (`bubbletea serve PLAN --dc
NAME`) is a process of its own, with mutual TLS. In nine periods the services are absent (A),
there under load (B), killed with -9 (A), back on other ports (B), ended (A), and so on. The run is compared with the
same training without a filler.

    python bench/join.py             about nine minutes; the services start a minute after training
    python bench/join.py --quick     fewer iterations and periods, no minute

How the cost is measured. The figure of a period is the median of its iterations. Each period with services is
compared with the mean of the two periods around it, so that a slow drift of the host cancels; the cost is the mean of
these ratios. The spread of the periods without services is the expected difference between the largest and the smallest
of three, computed from the standard deviation of all of them (1.69 times it, for a normal distribution). The range of
three measured periods is not used, because it differs by a factor of two from run to run. The clients have the
lowest priority, since they would be on other machines.

The bars: weights and optimizer state equal to the bit; an iteration with services longer by at most the spread, and by
at most 1 % (0.3 % on 16 cores or more); requests answered in every datacenter, the first at most 10 s after a service
listens.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack, suppress
from itertools import chain, pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "launch"))
from common.report import Report
from free_ports import free_port
from multi_dc_runs import hashes

from atlas.priority import lower_priority
from atlas.wan.security.certs import make_ca, make_node

JOB = """
name: join
model: {layers: 4, hidden: 64, heads: 2, vocab: 300, seq_len: 64}
cluster:
  gpus:
    slow:
      { bf16_tflops: 0.02, fp32_tflops: 0.02, memory_gib: 16, memory_gbytes_per_s: 100, peer_gbps: 100,
        calibration: { matrix_efficiency: 0.9, memory_efficiency: 0.9, peer_efficiency: 0.9, layer_floor_us: 30000,
                       fused_attention: true } }
  wan: {latency_ms: 5, pair_gbps: 1}
  datacenters:
    - {name: east, nodes: 2, gpus_per_node: 1, gpu: slow}
    - {name: west, nodes: 2, gpus_per_node: 1, gpu: slow}
precision: fp32
microbatch: 1
num_microbatches: 6
pp: 4
pipelines_per_cell: 1
"""
DATACENTERS = ("east", "west")
PERIODS = "ABABABABA"
RANGE_OF_THREE = 1.69
"""The expected range of three draws from a normal distribution, in standard deviations."""
SETTLE = 4
"""Iterations after a change that do not count."""
LIMIT_S, LATE_S = 120.0, 60.0
"""For anything that is waited for; from the first iterations to the first services."""
LONGER_PERCENT, CORES, MANY_CORES_PERCENT = 1.0, 16, 0.3
"""Most that services may add to an iteration; and with so many cores or more."""


class Run:
    """Four launchers."""

    def __init__(self, folder: Path, steps: int, *flags: str, certs: Path) -> None:
        self.folder, self.log = folder, folder / "steps.jsonl"
        folder.mkdir()
        (folder / "job.yaml").write_text(JOB)
        port, self.launchers = free_port(), list[subprocess.Popen[bytes]]()
        for dc in DATACENTERS:
            for node in range(2):
                name = f"{dc}-{node}"
                log = ["--log", str(self.log)] if name == "east-0" else []
                self.launchers.append(
                    started(
                        folder / f"{name}.log",
                        *("-m", "atlas", "train", str(folder / "job.yaml"), "--dc", dc, "--node", f"{node}/2"),
                        *("--device", "paced", "--data", "shipped", "--steps", str(steps), "--no-bar"),
                        *("--rendezvous", f"127.0.0.1:{port}", "--certs", str(certs)),
                        *("--checkpoints", str(folder / name), "--runs", str(folder / "runs" / name), *log, *flags),
                    )
                )

    @property
    def iterations_s(self) -> list[float]:
        with suppress(FileNotFoundError):
            return [json.loads(line)["iteration_s"] for line in self.log.read_text().splitlines()]
        return []

    def after(self, count: int) -> list[float]:
        """The next iterations, when there are so many."""
        first = len(self.iterations_s)
        until(lambda: len(self.iterations_s) >= first + count or self.has_ended, "iterations", 4 * LIMIT_S)
        return self.iterations_s[first : first + count]

    @property
    def has_ended(self) -> bool:
        return any(launcher.poll() is not None for launcher in self.launchers)

    def wait(self) -> None:
        for launcher in self.launchers:
            if launcher.wait(600):
                raise RuntimeError(
                    f"a launcher failed: {[log.read_text()[-500:] for log in self.folder.glob('*.log')]}"
                )

    def weights(self, steps: int) -> dict[str, str]:
        return hashes({str(f): f for f in self.folder.glob("*-[01]")}, steps)


def started(log: Path, *command: str) -> subprocess.Popen[bytes]:
    with log.open("wb") as out:
        return subprocess.Popen([sys.executable, *command], cwd=log.parent, stdout=out, stderr=out)


def until(holds: Callable[[], object], what: str, limit_s: float = LIMIT_S) -> None:
    deadline = time.monotonic() + limit_s
    while not holds():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {limit_s:g} s")
        time.sleep(0.05)


class Service:
    """One datacenter's, with a client that asks again whenever it is answered."""

    def __init__(self, folder: Path, datacenter: str, certs: Path, budget: float) -> None:
        self.datacenter, self.port = datacenter, free_port()
        self.url, self.began_s, self.first_s, self.num_answers = f"http://127.0.0.1:{self.port}", 0.0, 0.0, 0
        self._over = threading.Event()
        self.process = started(
            folder / f"service-{datacenter}-{self.port}.log",
            *("-m", "bubbletea.cli", "serve", str(folder / "job.yaml"), "--dc", datacenter, "--device", "paced"),
            *("--folder", str(folder / "meet"), "--port", str(self.port), "--certs", str(certs), "--stages", "1"),
            *("--chunk", "128", "--drain", "1", "--slowdown", str(budget)),
        )
        self._client = threading.Thread(target=self._ask, daemon=True)
        self._client.start()

    def _ask(self) -> None:
        lower_priority()
        prompt = list(range(100))
        body = json.dumps({"model": "tiny", "prompt": prompt, "max_tokens": 1, "deadline_s": 60}).encode()
        headers = {"content-type": "application/json"}
        while not self._over.is_set():
            try:
                asked = urllib.request.Request(f"{self.url}/v1/completions", body, headers)
                self.began_s = self.began_s or self._listens()
                with urllib.request.urlopen(asked, timeout=60) as response:
                    json.load(response)
                self.first_s = self.first_s or time.monotonic() - self.began_s
                self.num_answers += 1
            except (urllib.error.URLError, OSError):
                self._over.wait(0.1)

    def _listens(self) -> float:
        with suppress(urllib.error.HTTPError), urllib.request.urlopen(f"{self.url}/health", timeout=5):
            pass
        return time.monotonic()

    def end(self, *, kill: bool) -> None:
        self._over.set()
        if kill:
            self.process.kill()
        else:
            self.process.terminate()
        self.process.wait(30)
        self._client.join(70)


Periods = dict[str, list[list[float]]]


def disturbed(
    folder: Path, periods: str, num_each: int, late_s: float, certs: Path, budget: float
) -> tuple[Run, Periods, list[Service]]:
    """The run with services in every second period, the first after `late_s`; the times by period; the services."""
    steps = len(periods) * (num_each + SETTLE) * 4 + int(10 * late_s)  # more than needed: it is stopped
    times: Periods = {"A": [], "B": []}
    services: list[Service] = []
    with ExitStack() as stack:
        flags = ("--filler", "bubbletea", "--filler-folder", str(folder / "meet"))
        run = Run(folder, steps, *flags, certs=certs)
        stack.callback(lambda: [launcher.kill() for launcher in run.launchers])
        until(lambda: len(run.iterations_s) > SETTLE or run.has_ended, "the first iterations")
        began_s = time.monotonic()
        for period, kind in enumerate(periods):
            time.sleep(max(0.0, began_s + late_s - time.monotonic()) if period == 1 else 0.0)
            now = [Service(folder, dc, certs, budget) for dc in DATACENTERS] if kind == "B" else []
            services += now
            until(lambda now=now: all(one.num_answers for one in now) or run.has_ended, "answers")  # type: ignore[misc]
            run.after(SETTLE)
            times[kind].append(run.after(num_each))
            for one in now:
                one.end(kill=period == 1)
        run.launchers[0].terminate()  # saves after the step, in all datacenters
        for launcher in run.launchers:
            launcher.wait(120)
    return run, times, services


def cost_and_spread(times: Periods) -> tuple[float, float]:
    """Shares of an iteration."""
    without, within = ([statistics.median(period) for period in times[kind]] for kind in "AB")
    ratios = [one / statistics.mean(around) for one, around in zip(within, pairwise(without), strict=True)]
    return statistics.mean(ratios) - 1, RANGE_OF_THREE * statistics.stdev(without) / statistics.mean(without)


def measure(periods: str, num_each: int, late_s: float) -> int:
    report = Report("BubbleTea beside a run over two datacenters", "the same run without services")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        certs = folder / "certs"
        make_ca(certs)
        for dc in DATACENTERS:
            make_node(certs, dc)
        run, times, services = disturbed(folder / "with", periods, num_each, late_s, certs, 0.005)
        steps = len(run.iterations_s)
        plain = Run(folder / "without", steps, certs=certs)
        plain.wait()
        same = run.weights(steps) == plain.weights(steps)
        report.figure("steps", steps, "")
        longer, spread = (100 * share for share in cost_and_spread(times))
        report.figure("iteration without services", statistics.median(chain(*times["A"])) * 1e3, "ms")
        report.figure("spread of periods without services", spread, "%")
        most = MANY_CORES_PERCENT if (os.cpu_count() or 1) >= CORES else LONGER_PERCENT
        report.figure("iteration with services, longer by", longer, "%", at_most=most)
        report.figure("the same, less the spread of periods without services", longer - spread, "%", at_most=0)
        report.figure("weights and optimizer state equal to the bit (1: yes)", float(same), "", at_least=1)
        for one in services:
            report.figure(f"answers, {one.datacenter}", one.num_answers, "", at_least=1)
            report.figure(f"first answer, {one.datacenter}", one.first_s, "s", at_most=10.0)
    return report.finish()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer iterations and periods")
    return measure(PERIODS[:5], 12, 0.0) if parser.parse_args().quick else measure(PERIODS, 18, LATE_S)


if __name__ == "__main__":
    sys.exit(main())
