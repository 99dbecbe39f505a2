"""Whether `bubbletea serve PLAN --slowdown X` keeps its limit: iteration times of training with and without requests.

It starts the service and the training, lets training run without requests, then loads the service with prompts of one
length, and compares the iteration times that the workers report.

    python bench/serve_slowdown.py            # prompts of 512 and of 4,000 tokens
    python bench/serve_slowdown.py --quick    # fewer iterations

The bar, for the median iteration and for the mean: the slowdown is at most the limit plus the measurement error, two
standard errors. Where this error is above 1 %, other work disturbed the run, and nothing was measured.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from common.report import Report

from bubbletea.bench import BenchLoad, bench

ROOT = Path(__file__).parent.parent
PROMISED = 0.005
MAX_ERROR = 0.01
CLIENTS = 16
SETTLE = 3
"""Iterations that do not count: the first of all, and the first ones under load, from which the throttle learns."""


def metrics(url: str) -> dict[str, float]:
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as response:
        text = response.read().decode()
    found: dict[str, float] = {}
    for name, value in re.findall(r"^([a-z:_]+)(?:\{[^}]*\})? ([0-9.e+-]+)$", text, re.MULTILINE):
        found[name] = found.get(name, 0.0) + float(value)
    return found


class Watch:
    """The length of each iteration, from a counter of how many there were and how long all of them took."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._count, self._sum = 0.0, 0.0

    def next_s(self, deadline_s: float) -> float:
        """Waits for the end of the next one."""
        while time.monotonic() < deadline_s:
            now = metrics(self.url)
            count = now.get("bubbletea:training_iteration_seconds_count", 0.0)
            total = now.get("bubbletea:training_iteration_seconds_sum", 0.0)
            if count > self._count:
                mean_s = (total - self._sum) / (count - self._count)
                self._count, self._sum = count, total
                return mean_s
            time.sleep(0.1)
        raise TimeoutError("training does not go on")


class Command:
    """`bubbletea serve` and `atlas train --filler bubbletea`, as a user starts them."""

    def __init__(self, promised: float, folder: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as sock:
            port = sock.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        run = ["examples/tiny.yaml", "--slower", "3"]
        serve = ["--slowdown", str(promised), "--port", str(port), "--drain", "1", "--folder", folder]
        train = ["--emulate", "--steps", "1000000", "--no-bar", "--filler", "bubbletea", "--filler-folder", folder]
        self._processes = [
            subprocess.Popen([sys.executable, "-m", *command], cwd=ROOT, stdout=subprocess.DEVNULL)
            for command in (["bubbletea.cli", "serve", *run, *serve], ["atlas", "train", *run, *train])
        ]

    def __enter__(self) -> Command:
        deadline = time.monotonic() + 180
        while time.monotonic() < deadline:
            try:
                urllib.request.urlopen(f"{self.url}/health", timeout=5).close()
            except (urllib.error.URLError, OSError):
                time.sleep(0.2)
            else:
                return self
        self.__exit__()
        raise TimeoutError("the workers did not come")

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def load(url: str, length: int, over: threading.Event) -> None:
    """Prompts of one length without end: each client asks again when it is answered or may."""
    number = 0
    while not over.is_set():
        number += 1
        asked = BenchLoad(url, "tiny", CLIENTS, CLIENTS, prompt_tokens=(length, length), max_tokens=4, seed=number)
        report = asyncio.run(bench(asked))
        refused = [outcome.retry_s for outcome in report.outcomes if outcome.retry_s is not None]
        over.wait(min([*refused, 1.0]) if len(refused) == CLIENTS else 0.0)


def median_error(seconds: list[float]) -> float:
    """The standard error of their median, from the spread of the middle half."""
    quarters = statistics.quantiles(seconds, n=4)
    return 1.25 * (quarters[2] - quarters[0]) / 1.35 / len(seconds) ** 0.5


def mean_error(seconds: list[float]) -> float:
    return statistics.stdev(seconds) / len(seconds) ** 0.5


def judge(report: Report, name: str, alone: list[float], loaded: list[float]) -> None:
    """How much longer iterations with requests are, or that the run was too noisy to say."""
    for line, middle, error_of in (
        ("mean iteration longer by", statistics.fmean, mean_error),
        ("iteration longer by", statistics.median, median_error),
    ):
        base_s = middle(alone)
        error = 2 * (error_of(alone) ** 2 + error_of(loaded) ** 2) ** 0.5 / base_s
        if error > MAX_ERROR:
            report.void(f"{name}: {line}", f"too noisy: the error is {error:.1%}, {MAX_ERROR:.0%} allowed")
        else:
            slowdown = middle(loaded) / base_s - 1
            report.figure(f"{name}: {line}", 100 * slowdown, "%", at_most=100 * (PROMISED + error))


def measure(report: Report, length: int, num_alone: int, num_loaded: int, settle: int) -> None:
    with tempfile.TemporaryDirectory() as folder, Command(PROMISED, folder) as service:
        watch, deadline = Watch(service.url), time.monotonic() + 400
        for _ in range(SETTLE):
            watch.next_s(deadline)
        alone = [watch.next_s(deadline) for _ in range(num_alone)]
        over = threading.Event()
        loader = threading.Thread(target=load, args=(service.url, length, over))
        loader.start()
        try:
            learning = [watch.next_s(deadline) for _ in range(settle)]
            before = metrics(service.url)
            loaded = [watch.next_s(deadline) for _ in range(num_loaded)]
            after = metrics(service.url)
        finally:
            over.set()
        loader.join()
    base_s = statistics.median(alone)
    filled, waited = (
        after.get(f"bubbletea:{name}_seconds_total", 0.0) - before.get(f"bubbletea:{name}_seconds_total", 0.0)
        for name in ("filled", "bubble")
    )
    name = f"{length} tokens"
    report.figure(f"{name}: iteration without requests", base_s * 1e3, "ms")
    report.figure(f"{name}: while the throttle learns", (statistics.fmean(learning) / base_s - 1) * 100, "%")
    report.figure(f"{name}: of the bubbles, filled", 100 * filled / max(waited, 1e-9), "%")
    report.figure(f"{name}: reported as overcommitted (1: yes)", after.get("bubbletea:overcommitted", 0.0), "")
    judge(report, name, alone, loaded)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer iterations")
    parser.add_argument("--tokens", type=int, nargs="*", default=[512, 4000], metavar="N", help="of a prompt")
    args = parser.parse_args()
    report = Report("Serving beside training: is --slowdown held?", "the same training without requests")
    for length in args.tokens:
        measure(report, length, *((16, 24, 12) if args.quick else (40, 60, 24)))
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
