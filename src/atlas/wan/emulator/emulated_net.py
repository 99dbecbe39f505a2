"""What both grades of the emulator share: named nodes, paths between them, and the process that emulates the paths.

Commands and answers are JSON lines over a socket pair, one command at a time. The process ends with the socket, so it
also ends when its user crashes. Knows no packets and no connections.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import socket
import subprocess
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from atlas.errors import AtlasError
from atlas.lifetime import Closing, end_process, start_module
from atlas.wan.emulator.lateness import P99_LIMIT_S, WORST_LIMIT_S, Lateness, summarize
from atlas.wan.emulator.paths import Paths, PathSpec, nodes_of, path_between

START_TIMEOUT_S = 600.0
"""The first start on a machine compiles the forwarder: up to a minute of CPU time. A process that ends is noticed."""
ANSWER_TIMEOUT_S = 60.0
"""Answers take milliseconds."""
EXIT_TIMEOUT_S = 5.0
"""What the emulator's process may take to end before it is killed."""


@dataclass(frozen=True)
class DirectionStats:
    """Traffic from one node to another."""

    num_bytes: int
    """Payload."""
    num_pieces: int
    """Packets (namespace grade) or chunks (proxy grade)."""
    dropped: int = 0
    """Packets dropped by a full queue."""
    lost: int = 0
    """Packets lost at random, or because the path was cut."""


@dataclass(frozen=True)
class EmulatorStats:
    """What the emulator carried, and how late it was."""

    lateness: Lateness
    directions: dict[tuple[str, str], DirectionStats]
    """By (source node, destination node)."""
    cpu_s: float
    """CPU time of the emulator's process."""
    priority: str
    """What the kernel granted: "realtime", "short slice" or "ordinary"."""
    connections: list[dict[str, Any]]
    """Proxy grade, connections that are open: number, src, dst, peak bytes in flight each way."""

    @property
    def sent_bytes(self) -> int:
        return sum(direction.num_bytes for direction in self.directions.values())


class EmulatedNet(Closing):
    """Paths between named nodes, emulated by a process of its own. Thread-safe; close it, or use it in a `with`."""

    def __init__(self, paths: Paths) -> None:
        self.paths = dict(paths)
        self.nodes = nodes_of(paths)
        self._socket, self._worker_socket = socket.socketpair()
        self._socket.settimeout(START_TIMEOUT_S)
        self._answers = self._socket.makefile("rb")
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def _start(self, module: str, paths: Paths, fds: Sequence[int] = (), **options: Any) -> None:
        """Runs `python -m module SOCKET_FD FD...` with this process's copy of atlas, and sends it the paths."""
        passed = [self._worker_socket.fileno(), *fds]
        self._process = start_module(module, *map(str, passed), pass_fds=passed, stdin=subprocess.DEVNULL)
        self._worker_socket.close()
        listed = [(a, b, dataclasses.asdict(path)) for (a, b), path in paths.items()]
        self._priority = str(self._ask("paths", nodes=self.nodes, paths=listed, **options)["priority"])
        self._socket.settimeout(ANSWER_TIMEOUT_S)

    def _ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        with self._lock:
            try:
                self._socket.sendall(json.dumps({"do": do, **arguments}).encode() + b"\n")
                line = self._answers.readline()
            except (OSError, ValueError) as error:
                raise AtlasError(f"the emulator did not answer {do!r}: {error}") from None
        if not line:
            raise AtlasError(f"the emulator exited before it answered {do!r}: see its message above")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise AtlasError(f"emulator, {do}: {answer['error']}")
        return answer

    def change(self, a: str, b: str, **figures: Any) -> PathSpec:
        """Changes a path from now on: `change("east-0", "west-0", pair_bps=25e6)`. Its trunk stays."""
        path = dataclasses.replace(path_between(self.paths, a, b), **figures)
        self._ask("change", a=a, b=b, path=dataclasses.asdict(path))
        self.paths[(a, b) if (a, b) in self.paths else (b, a)] = path
        return path

    @property
    def stats(self) -> EmulatorStats:
        raw = self._ask("stats")
        directions = {(src, dst): DirectionStats(*counts) for src, dst, *counts in raw["directions"]}
        lateness = summarize(raw["bins"], raw["worst_ns"])
        return EmulatorStats(lateness, directions, raw["cpu_s"], self._priority, raw.get("connections", []))

    @property
    def lateness(self) -> Lateness:
        return self.stats.lateness

    def reset_lateness(self) -> None:
        """Starts the count again, so that a measurement is judged by its own traffic."""
        self._ask("reset")

    def certify(self, p99_s: float = P99_LIMIT_S, worst_s: float = WORST_LIMIT_S) -> None:
        """Raises EmulatorLateError if the emulator was too late for the measurement to count."""
        self.lateness.certify(p99_s, worst_s)

    def restart_weather(self, at_ns: int | None = None) -> None:
        """Cross traffic of all paths starts again with its first value: now, or (proxy) at a moment of
        `time.monotonic_ns`."""
        self._ask("weather", **({} if at_ns is None else {"at_ns": at_ns}))

    def close(self) -> None:
        """Ends the emulator's process. May be called twice."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._worker_socket.close()
        if self._process is not None:
            end_process(self._process, EXIT_TIMEOUT_S)
        self._answers.close()
        self._socket.close()


def answer(worker: object, line: bytes) -> bytes:
    """The process's side: calls `do_COMMAND` of `worker` and returns the answer to send back."""
    command = json.loads(line)
    try:
        found = getattr(worker, "do_" + command.pop("do"))(**command) or {}
    except (AtlasError, OSError) as error:
        found = {"error": str(error)}
    return json.dumps(found).encode() + b"\n"
