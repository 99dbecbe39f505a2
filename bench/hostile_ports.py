"""Callers that never prove who they are, on every port that a service and a run listen on: idle connections, headers
that announce 1 GiB, and garbage. How much memory they cost, whether training becomes slower, and whether the service
still answers.

    python bench/hostile_ports.py [--quick]

Starts `bubbletea serve` and `atlas train --emulate --filler bubbletea` on this machine, finds their ports, and visits
one after the other: 2,000 idle connections (quick: 400), and beside them 20 callers that announce 1 GiB and send until
they are disconnected, at most 64 MiB, and 20 that send random bytes. The callers are a process of their own with the
lowest priority, since they share this machine. Visits and times without callers take turns; training writes down every
iteration.

The bars: no process grows by more than 50 MB; the median iteration during visits is within the spread of the times
without callers; the service answers afterwards (200, or a refusal with its reason on a host that is too busy for
training and prefill).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import random
import re
import resource
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx2 as httpx

sys.path.insert(0, str(Path(__file__).parent))
from lab.lines import Lines

ROOT = Path(__file__).parents[1]
JOB = ("examples/tiny.yaml", "--set", "pipelines_per_cell=1")
MIB, GIB = 1 << 20, 1 << 30
START_S = 120.0
TURNS, QUIET_S = 3, 10.0
LEAST_SPREAD = 0.005
"""Turns without callers may agree by chance."""
EMULATOR = "atlas.wan.emulator"
"""The network between the datacenters of an emulated run: it forwards whatever comes, as cables do."""
LISTENS = "0A"
"""The state of a listening socket in /proc/net/tcp."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="400 idle connections on each port")
    num_idle = 400 if parser.parse_args().quick else 2000
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    lines = Lines()
    with tempfile.TemporaryDirectory(prefix="hostile-ports-") as name, _started(Path(name)) as (url, roots):
        steps = Path(name) / "steps.jsonl"
        ports = sorted({port for pid in _tree(roots) for port in _ports(pid)})
        lines.at_least("listening ports that were visited", len(ports), "", 5)
        times = {"alone": [_iterations_s(steps, QUIET_S)], "visited": list[list[float]]()}
        with _Sizes(_tree(roots)) as sizes:
            for turn in range(TURNS):
                first = len(_lengths_s(steps))
                _visit_all(ports[turn::TURNS], num_idle)
                times["visited"].append(_lengths_s(steps)[first:])
                times["alone"].append(_iterations_s(steps, QUIET_S))
        _report_sizes(lines, sizes)
        _report_times(lines, times)
        ask = {"model": "tiny", "prompt": "Tell me", "max_tokens": 4}
        status = httpx.post(f"{url}/v1/completions", json=ask, timeout=60).status_code
        lines.add("status of a request afterwards", status, "", "200, 429 or 503", status in (200, 429, 503))
    return lines.table()


def _report_sizes(lines: Lines, sizes: _Sizes) -> None:
    ours = {pid: name for pid, name in sizes.names.items() if EMULATOR not in name}
    worst = max(ours, key=lambda pid: sizes.grown[pid])
    lines.at_most("largest growth of a process", sizes.grown[worst] / 1e6, "MB", 50, what=ours[worst])
    network = max((sizes.grown[pid] for pid in sizes.names if pid not in ours), default=0)
    lines.add("growth of the emulated network", network / 1e6, "MB", "", None)


def _report_times(lines: Lines, times: dict[str, list[list[float]]]) -> None:
    alone = [statistics.median(turn) for turn in times["alone"] if turn]
    visited = [s for turn in times["visited"] for s in turn]
    base_s, spread = statistics.median(alone), max(alone) / min(alone) - 1
    lines.add("iteration of training without callers", base_s * 1e3, "ms", "", None)
    lines.add("its largest turn over its smallest", 100 * spread, "%", "", None)
    lines.add("iterations during visits", len(visited), "", "", None)
    longer = statistics.median(visited) / base_s - 1
    lines.at_most("iteration during visits, longer by", 100 * longer, "%", 100 * max(spread, LEAST_SPREAD))


# ---- the callers -------------------------------------------------------------------------------------------------
def _visit_all(ports: list[int], num_idle: int) -> None:
    """In a process of its own, which runs only when nobody else wants to."""

    def visit() -> None:
        os.nice(19)
        for port in ports:
            _visit(port, num_idle)

    caller = multiprocessing.get_context("fork").Process(target=visit)
    caller.start()
    caller.join()


def _visit(port: int, num_idle: int) -> None:
    with ExitStack() as idle:
        for _ in range(num_idle):
            with contextlib.suppress(OSError):
                idle.enter_context(socket.create_connection(("127.0.0.1", port), 5))
        for _ in range(20):
            _announce(port)
            _garbage(port)


def _announce(port: int) -> None:
    """The first frame of a caller, with a payload of 1 GiB; on HTTP a header that never ends."""
    head = struct.pack("!4sBHQ", b"BTF1", 2, 2, GIB)
    first = head + struct.pack("!I", zlib.crc32(head)) + b"{}"
    for start in (first, b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nX: ", struct.pack("!Q", GIB)):
        _send(port, start, 64)


def _garbage(port: int) -> None:
    _send(port, random.randbytes(4096), 1)


def _send(port: int, start: bytes, num_mib: int) -> None:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 5) as sock:
        sock.settimeout(0.5)
        sock.sendall(start)
        for _ in range(num_mib):
            sock.sendall(b"x" * MIB)


# ---- the processes -----------------------------------------------------------------------------------------------
@contextmanager
def _started(folder: Path) -> Iterator[tuple[str, list[int]]]:
    """A service and a run whose workers have joined it."""
    serve = [sys.executable, "-m", "bubbletea.cli", "serve", *JOB, "--port", "0", "--name", "tiny"]
    train = [sys.executable, "-m", "atlas.cli", "train", *JOB, "--emulate", "--steps", "1000000"]
    train += ["--filler", "bubbletea", "--filler-folder", str(folder / "meet"), "--runs", str(folder / "run")]
    train += ["--log", str(folder / "steps.jsonl"), "--no-bar"]
    log = (folder / "train.log").open("wb")
    with ExitStack() as stack:
        service = _run([*serve, "--folder", str(folder / "meet")], subprocess.PIPE, stack)
        assert service.stdout is not None
        found = re.search(r"http://127\.0\.0\.1:\d+", service.stdout.readline().decode())
        assert found is not None, "the service did not start"
        run = _run(train, log, stack)
        until = time.monotonic() + START_S
        while httpx.get(f"{found[0]}/health", timeout=10).json()["lanes"] < 1:
            if run.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"no lanes:\n{(folder / 'train.log').read_text()[-2000:]}")
            time.sleep(0.2)
        time.sleep(5.0)  # some iterations
        yield found[0], [service.pid, run.pid]


def _run(words: list[str], out: object, stack: ExitStack) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(words, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT)  # type: ignore[call-overload]
    stack.callback(process.wait)
    stack.callback(process.terminate)
    return process  # type: ignore[no-any-return]


def _tree(roots: list[int]) -> list[int]:
    """The processes and their descendants."""
    parents = dict[int, int]()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
    found = list(roots)
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid and child not in found]
    return found


def _ports(pid: int) -> set[int]:
    """TCP ports on which a process listens."""
    inodes = set[str]()
    for file in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            inodes.add(str(file.readlink()))
    rows = [line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
    return {int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == LISTENS and f"socket:[{row[9]}]" in inodes}


class _Sizes:
    """The growth of the resident memory of processes, in bytes."""

    def __init__(self, pids: list[int]) -> None:
        self.names = {pid: Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")[-80:] for pid in pids}
        self._before = {pid: _resident(pid) for pid in pids}
        self.grown = dict.fromkeys(pids, 0)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> _Sizes:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(0.05):
            for pid, before in self._before.items():
                with contextlib.suppress(OSError):
                    self.grown[pid] = max(self.grown[pid], _resident(pid) - before)


def _resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()


def _lengths_s(steps: Path) -> list[float]:
    """Of all iterations so far."""
    return [json.loads(line)["iteration_s"] for line in steps.read_text().splitlines() if line.endswith("}")]


def _iterations_s(steps: Path, seconds: float) -> list[float]:
    """Those of the next seconds."""
    first = len(_lengths_s(steps))
    time.sleep(seconds)
    return _lengths_s(steps)[first:]


if __name__ == "__main__":
    sys.exit(main())
