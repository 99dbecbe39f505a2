"""One run over two datacenters under emulation, the BubbleTea service of each, and a stock vllm-router before them: as
processes, started with the shipped commands.
"""

from __future__ import annotations

import contextlib
import json
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import ExitStack
from pathlib import Path

ROOT = Path(__file__).parents[2]
JOB = (str(ROOT / "examples" / "tiny.yaml"), "--set", "pipelines_per_cell=1", "--slower", "3")
DATACENTERS = ("east", "west")
LANES, START_S, BACK_S = 2, 120.0, 120.0
"""In each datacenter."""


class TwoSites:
    def __init__(self, folder: Path) -> None:
        self._folder, self._stack = folder, ExitStack()
        self.urls: list[str] = []

    def __enter__(self) -> TwoSites:
        try:
            self._start()
        except BaseException:
            self._stack.close()
            raise
        return self

    def _start(self) -> None:
        meet = self._folder / "meet"
        for name in DATACENTERS:
            words = ["bubbletea.cli", "serve", *JOB, "--dc", name, "--device", "paced", "--port", "0", "--name", "tiny"]
            service = self._started(name, *words, "--folder", str(meet))
            self.urls.append(_url(self._folder / f"{name}.log", service))
        train = ["atlas", "train", *JOB, "--emulate", "--steps", "1000000", "--no-bar", "--filler", "bubbletea"]
        train += ["--filler-folder", str(meet), "--checkpoints", str(self._folder / "saved"), "--save-every", "20"]
        self._training = self._started("train", *train, "--runs", str(self._folder / "runs"))
        self.wait_for_lanes(START_S)

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _started(self, name: str, *words: str) -> subprocess.Popen[bytes]:
        with (self._folder / f"{name}.log").open("wb") as log:
            process = subprocess.Popen([sys.executable, "-m", *words], cwd=self._folder, stdout=log, stderr=log)
        self._stack.callback(_end, process)
        return process

    def start_router(self, command: str, stack: ExitStack, num_retries: int) -> str:
        """Its URL. It retries refusals every two seconds, and never takes a service out: one without workers says
        so."""
        port, metrics = _free_port(), _free_port()
        flags = ["--worker-urls", *self.urls, "--policy", "consistent_hash", "--port", str(port)]
        flags += ["--worker-startup-check-interval", "1", "--prometheus-port", str(metrics), "--log-level", "error"]
        retries = ["--retry-initial-backoff-ms", "200", "--retry-max-backoff-ms", "2000"]
        flags += ["--retry-max-retries", str(num_retries), *retries] if num_retries else ["--disable-retries"]
        flags += ["--disable-circuit-breaker", "--health-failure-threshold", "100000"]
        with (self._folder / "router.log").open("wb") as log:
            router = subprocess.Popen([command, *flags], stdout=log, stderr=log)
        stack.callback(_end, router)
        url, until = f"http://127.0.0.1:{port}", time.monotonic() + START_S
        while True:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/v1/models", timeout=5):
                return url
            if router.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"the router did not start:\n{(self._folder / 'router.log').read_text()[-2000:]}")
            time.sleep(0.2)

    @property
    def workers(self) -> list[int]:
        """Process ids of the training workers: the leaves below the launcher, without the network emulator and the
        processes in which paced workers prefill."""
        parents = dict[int, int]()
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                name, _, rest = (folder / "stat").read_text().rpartition(")")
                if not name.endswith("(prefill"):
                    parents[int(folder.name)] = int(rest.split()[1])
        found = []
        for pid in parents.keys() - set(parents.values()):
            above = pid
            while above in parents and above != self._training.pid:
                above = parents[above]
            with contextlib.suppress(OSError):
                if above == self._training.pid and b"emulator" not in Path(f"/proc/{pid}/cmdline").read_bytes():
                    found.append(pid)
        return sorted(found)

    def wait_for_lanes(self, timeout_s: float = BACK_S) -> None:
        """In both datacenters."""
        until = time.monotonic() + timeout_s
        while min(map(_lanes, self.urls)) < LANES:
            if self._training.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"no lanes:\n{(self._folder / 'train.log').read_text()[-2000:]}")
            time.sleep(0.1)

    def counted(self, name: str, label: str = "") -> int:
        """The sum of a counter of both services, of the samples that have this label."""
        found = 0.0
        for url in self.urls:
            with urllib.request.urlopen(f"{url}/metrics", timeout=60) as answer:
                for line in answer.read().decode().splitlines():
                    if line.startswith(f"{name}{{") and label in line:
                        found += float(line.rpartition(" ")[2])
        return int(found)


def _lanes(url: str) -> int:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=60) as answer:
            return int(json.load(answer)["lanes"])
    except urllib.error.HTTPError:
        return 0  # 503: no workers


def _url(log: Path, service: subprocess.Popen[bytes]) -> str:
    until = time.monotonic() + START_S
    while (found := re.search(r"http://127\.0\.0\.1:\d+", log.read_text())) is None:
        if service.poll() is not None or time.monotonic() > until:
            raise RuntimeError(f"bubbletea serve did not start:\n{log.read_text()[-2000:]}")
        time.sleep(0.1)
    return found[0]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _end(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
