"""Callers that never prove who they are, on every port that a service and a run listen on: idle connections, headers
that announce 1 GiB, and garbage. How much memory they cost, whether training becomes slower, and whether the service
still answers.

    python bench/hostile_ports.py [--quick]

Starts `bubbletea serve` and `atlas train --emulate --filler bubbletea` on this machine, finds their ports, and visits
one after the other: 2,000 idle connections (quick: 400), and beside them 20 callers that announce 1 GiB and send until
they are disconnected, at most 64 MiB, and 20 that send random bytes.

How training's slowdown is measured. The callers share this machine's cores with training, and what they take there is
not what our ports cost. So they have a control: the same callers, at the same rate, call a listener that is no part of
the run and closes whatever speaks. Turns without callers, with the control, and at our ports alternate; every turn has
the median of the iterations that lie inside it. The slowdown is the median of the turns at our ports over the median of
the control's turns. Its bar is the spread of the turns without callers (largest over smallest), and at least 0.5 %.

The ports of the emulated network are visited last, for memory only: it stands for cables, forwards whatever comes, and
callers there take emulated bandwidth and the time of its single event loop. Their figure has no bar.

The bars: no process grows by more than 50 MB; the slowdown is within the spread; the service answers afterwards (200,
or a refusal with its reason on a host that is too busy for training and prefill).
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
import selectors
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections import Counter, defaultdict
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
NUM_SPEAKERS = 20
"""Callers at each port that announce 1 GiB, and as many that send garbage."""
ROUNDS = 3
"""Each has three turns: without callers, with the control, and at a third of our ports."""
CALLS_PER_S = 1000.0
"""The pace of the callers, so that those at our ports and the control's do the same work in the same time."""
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
    with tempfile.TemporaryDirectory(prefix="hostile-ports-") as name, ExitStack() as stack:
        control = stack.enter_context(_control())
        url, roots = stack.enter_context(_started(Path(name)))
        tree = _tree(roots)
        network = [pid for pid in tree if EMULATOR in _command(pid)]
        ours = sorted({port for pid in tree if pid not in network for port in _ports(pid)})
        cables = sorted({port for pid in network for port in _ports(pid)})
        lines.at_least("listening ports that were visited", len(ours) + len(cables), "", 5)
        with _Sizes(tree) as sizes:
            turns = _Turns(Path(name) / "steps.jsonl", tree)
            for i in range(ROUNDS):
                ports = ours[i::ROUNDS]
                turns.alone(len(ports) * _visit_s(num_idle))
                for kind in ("control", "ours") if i % 2 else ("ours", "control"):
                    turns.visited(kind, ports if kind == "ours" else [control] * len(ports), num_idle)
            turns.alone(len(ports) * _visit_s(num_idle))
            turns.visited("emulated network", cables, num_idle)
        _report_sizes(lines, sizes)
        _report_times(lines, turns)
        ask = {"model": "tiny", "prompt": "Tell me", "max_tokens": 4}
        status = httpx.post(f"{url}/v1/completions", json=ask, timeout=60).status_code
        lines.add("status of a request afterwards", status, "", "200, 429 or 503", status in (200, 429, 503))
    return lines.table()


class _Turns:
    """The iterations of training, and the CPU time of all processes, by what happened beside them."""

    def __init__(self, steps: Path, pids: list[int]) -> None:
        self._steps, self._pids = steps, pids
        self.iterations_s: dict[str, list[list[float]]] = defaultdict(list)
        self.cpu_s: Counter[str] = Counter()
        self.took_s: Counter[str] = Counter()

    def alone(self, seconds: float) -> None:
        with self._turn("alone"):
            time.sleep(seconds)

    def visited(self, kind: str, ports: list[int], num_idle: int) -> None:
        with self._turn(kind):
            _visit_all(ports, num_idle)

    @contextmanager
    def _turn(self, kind: str) -> Iterator[None]:
        first, cpu_s, began_s = len(_lengths_s(self._steps)) + 1, _cpu_s(self._pids), time.monotonic()
        yield
        self.iterations_s[kind].append(_lengths_s(self._steps)[first:])  # the first one began before the turn
        self.cpu_s[kind] += _cpu_s(self._pids) - cpu_s
        self.took_s[kind] += time.monotonic() - began_s

    def medians_s(self, kind: str) -> list[float]:
        """Of every turn."""
        return [statistics.median(turn) for turn in self.iterations_s[kind] if turn]


def _report_sizes(lines: Lines, sizes: _Sizes) -> None:
    ours = {pid: name for pid, name in sizes.names.items() if EMULATOR not in name}
    worst = max(ours, key=lambda pid: sizes.grown[pid])
    lines.at_most("largest growth of a process", sizes.grown[worst] / 1e6, "MB", 50, what=ours[worst])
    network = max((sizes.grown[pid] for pid in sizes.names if pid not in ours), default=0)
    lines.add("growth of the emulated network", network / 1e6, "MB", "", None)


def _report_times(lines: Lines, turns: _Turns) -> None:
    alone, control, ours = (turns.medians_s(kind) for kind in ("alone", "control", "ours"))
    base_s, spread = statistics.median(alone), max(alone) / min(alone) - 1
    lines.add("iteration of training without callers", base_s * 1e3, "ms", "", None)
    lines.add("its largest turn over its smallest", 100 * spread, "%", "", None)
    for kind, seconds in turns.took_s.items():
        num = sum(map(len, turns.iterations_s[kind]))
        lines.add(
            f"CPU time of service and run, {kind}", turns.cpu_s[kind] / seconds, "cores", "", None, iterations=num
        )
    for kind in ("control", "emulated network"):
        longer = statistics.median(turns.medians_s(kind)) / base_s - 1
        lines.add(f"iteration beside callers, {kind}, longer by", 100 * longer, "%", "", None)
    longer = statistics.median(ours) / statistics.median(control) - 1
    bar = 100 * max(spread, LEAST_SPREAD)
    lines.at_most("iteration beside callers, our ports over control, longer by", 100 * longer, "%", bar)


# ---- the callers -------------------------------------------------------------------------------------------------
def _visit_all(ports: list[int], num_idle: int) -> None:
    """In a process of its own with the lowest priority."""

    def visit() -> None:
        os.nice(19)
        for port in ports:
            _visit(port, num_idle)

    caller = multiprocessing.get_context("fork").Process(target=visit)
    caller.start()
    caller.join()


def _visit(port: int, num_idle: int) -> None:
    until_s = time.monotonic() + _visit_s(num_idle)
    with ExitStack() as idle:
        for _ in _paced(num_idle):
            with contextlib.suppress(OSError):
                idle.enter_context(socket.create_connection(("127.0.0.1", port), 5))
        for _ in _paced(NUM_SPEAKERS):
            _announce(port)
            _garbage(port)
    time.sleep(max(0.0, until_s - time.monotonic()))


def _visit_s(num_idle: int) -> float:
    """How long a visit takes, unless a port makes its callers wait."""
    return 1.1 * (num_idle + 4 * NUM_SPEAKERS) / CALLS_PER_S


def _paced(count: int) -> Iterator[None]:
    began_s = time.monotonic()
    for i in range(count):
        time.sleep(max(0.0, began_s + i / CALLS_PER_S - time.monotonic()))
        yield


@contextmanager
def _control() -> Iterator[int]:
    """The port of a listener that keeps idle connections and closes those that speak, with the lowest priority."""

    def serve(listener: socket.socket) -> None:
        os.nice(19)
        with selectors.DefaultSelector() as selector:
            selector.register(listener, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    if key.fileobj is listener:
                        selector.register(listener.accept()[0], selectors.EVENT_READ)
                    else:
                        selector.unregister(key.fileobj)
                        key.fileobj.close()  # type: ignore[union-attr]

    with socket.create_server(("127.0.0.1", 0), backlog=2048) as listener:
        process = multiprocessing.get_context("fork").Process(target=serve, args=(listener,))
        process.start()
        try:
            yield listener.getsockname()[1]
        finally:
            process.kill()
            process.join()


def _announce(port: int) -> None:
    """The first frame of a caller, with a payload of 1 GiB; on HTTP a header that never ends."""
    head = struct.pack("!4sBHQI", b"BTF3", 2, 2, GIB, 0)
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
        self.names = {pid: _command(pid)[-80:] for pid in pids}
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


def _command(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")


def _cpu_s(pids: list[int]) -> float:
    """Used so far, in user and in kernel mode."""
    rows = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids]
    return sum(int(row[11]) + int(row[12]) for row in rows) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    sys.exit(main())
