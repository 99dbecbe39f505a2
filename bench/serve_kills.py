"""Workers of `bubbletea serve` are killed under load: is every admitted request answered, once, and how soon?

    python bench/serve_kills.py               50 runs, about 12 minutes
    python bench/serve_kills.py --runs 12     fewer
    python bench/serve_kills.py --quick       3 runs, one of each kind
    python bench/serve_kills.py --only training --seed 7

Three kinds of runs take turns: two workers without training; training under emulation (examples/tiny.yaml, three times
slower), where one lost worker restarts all; and two workers with half of the requests offline. In each run 32 clients
(beside training: 12) send prompts of 50 to 600 tokens over HTTP for some seconds, and one worker gets SIGKILL at a
random moment. Runs of one kind use one service, one after the other, each begun when all lanes are back.

Refused (429, or 503 while there are no workers) is not admitted: the client sends it again after the time it was told.
Everything else but the right answer is a lost request. A request is affected if it was open when the worker was killed;
its time counts from the kill, or from when there was a lane again if there was none.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from common.report import Report

ROOT = Path(__file__).parents[1]
START_S, REQUEST_S, BACK_S = 120.0, 90.0, 90.0
BAR_S = 5.0
NUM_PROMPTS, NEW_TOKENS = 40, 4
REFUSED = ("deadline", "share", "memory", "no-lane")
"""Codes of those that were not let in."""
NOISE = "socket.send() raised exception"


@dataclass(frozen=True)
class Kind:
    """How the service is started and loaded."""

    name: str
    arguments: tuple[str, ...]
    num_lanes: int
    clients: int = 32
    load_s: float = 6.0
    offline: float = 0.0
    """The share of offline requests."""


ALONE, TRAINING = ("--alone", "2"), (str(ROOT / "examples" / "tiny.yaml"), "--slower", "3")
KINDS = (
    Kind("alone", ALONE, 2),
    Kind("training", TRAINING, 8, clients=12, load_s=8.0),
    Kind("offline", ALONE, 2, offline=0.5),
)


@dataclass
class Asked:
    """One request; times on this process's monotonic clock."""

    sent_s: float
    answered_s: float = 0.0
    outcome: str = ""
    """right, wrong, or why it was lost."""


@dataclass
class Outcome:
    """Of one run."""

    killed_s: float = 0.0
    asked: list[Asked] = field(default_factory=list)
    num_refused: int = 0
    lanes: list[tuple[float, int]] = field(default_factory=list)
    """(when, how many) as they changed."""

    @property
    def lost(self) -> Counter[str]:
        return Counter(one.outcome for one in self.asked if one.outcome != "right")

    @property
    def affected(self) -> list[Asked]:
        return [one for one in self.asked if one.sent_s < self.killed_s < one.answered_s]

    @property
    def lane_again_s(self) -> float:
        """When the clock of the affected starts: the kill, or the end of the last time without a lane."""
        none_before = False
        found = self.killed_s
        for at_s, count in self.lanes:
            if none_before and count and at_s > self.killed_s:
                found = at_s
            none_before = not count
        return found

    @property
    def slowest_s(self) -> float:
        """Who was answered before the lanes were lost waited from the kill on."""
        starts = (self.killed_s, self.lane_again_s)
        return max(
            (one.answered_s - max(s for s in starts if s < one.answered_s) for one in self.affected), default=0.0
        )


class Service:
    """`bubbletea serve` as a user starts it."""

    def __init__(self, kind: Kind, log: Path) -> None:
        self.kind, self._log = kind, log
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "bubbletea.cli", "serve", *kind.arguments, "--port", "0"],
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        assert self._process.stdout is not None
        match = re.search(r"http://([\d.]+):(\d+)", self._process.stdout.readline())
        if match is None:
            raise RuntimeError(f"bubbletea serve did not start: {log.read_text()[-2000:]}")
        self.host, self.port = match[1], int(match[2])

    @property
    def workers(self) -> list[int]:
        """Process ids: the processes below the service that have no children, without the network emulator."""
        parents, found = dict[int, int](), list[int]()
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit():
                with contextlib.suppress(OSError):
                    parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        for pid in parents.keys() - set(parents.values()):
            above = pid
            while above in parents and above != self._process.pid:
                above = parents[above]
            with contextlib.suppress(OSError):
                if above == self._process.pid and b"emulator" not in Path(f"/proc/{pid}/cmdline").read_bytes():
                    found.append(pid)
        return sorted(found)

    @property
    def noise(self) -> int:
        return self._log.read_text().count(NOISE)

    async def lanes(self) -> int:
        _, body = await http(self, "GET", "/health")
        return int(json.loads(body)["lanes"])

    async def wait_for_lanes(self, timeout_s: float) -> None:
        async with asyncio.timeout(timeout_s):
            while await self.lanes() < self.kind.num_lanes:
                await asyncio.sleep(0.1)

    def close(self) -> None:
        self._process.send_signal(signal.SIGINT)
        try:
            self._process.communicate(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()


async def http(service: Service, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
    """One request on a connection of its own: status and body."""
    reader, writer = await asyncio.open_connection(service.host, service.port)
    try:
        head = f"{method} {path} HTTP/1.1\r\nHost: bench\r\nConnection: close\r\nContent-Length: {len(body)}\r\n"
        writer.write(head.encode() + b"Content-Type: application/json\r\n\r\n" + body)
        answer = await reader.read()
    finally:
        writer.close()
    top, _, rest = answer.partition(b"\r\n\r\n")
    if not top:
        raise ConnectionResetError("no answer")
    return int(top.split()[1]), rest


def prompts(seed: int) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(256) for _ in range(draw.randint(50, 600))] for _ in range(NUM_PROMPTS)]


class Load:
    """Clients that ask again when they are answered, until the time is over; all share `texts`, the first answers."""

    def __init__(self, service: Service, texts: dict[int, str]) -> None:
        self.service, self.texts, self.outcome = service, texts, Outcome()
        self.prompts, self.until_s = prompts(0), 0.0

    async def client(self, draw: random.Random) -> None:
        while time.monotonic() < self.until_s:
            await self.ask(draw.randrange(NUM_PROMPTS), offline=draw.random() < self.service.kind.offline)

    async def ask(self, number: int, *, offline: bool = False) -> None:
        body = {"model": "tiny-random", "prompt": self.prompts[number], "max_tokens": NEW_TOKENS, "temperature": 0}
        body |= {"ignore_eos": True, "priority": "offline" if offline else "online"}
        asked = Asked(time.monotonic())
        while not asked.outcome:
            try:
                async with asyncio.timeout(REQUEST_S):
                    status, said = await http(self.service, "POST", "/v1/completions", json.dumps(body).encode())
            except (OSError, TimeoutError) as error:
                asked.outcome = type(error).__name__
                break
            told = json.loads(said)
            if status == 200:
                text = str(told["choices"][0]["text"])
                asked.outcome = "right" if self.texts.setdefault(number, text) == text else "wrong"
            elif told["error"]["code"] in REFUSED:
                self.outcome.num_refused += 1
                await asyncio.sleep(0.1)
                asked.sent_s = time.monotonic()
            else:
                asked.outcome = f"{status} {told['error']['message']}"
        asked.answered_s = time.monotonic()
        self.outcome.asked.append(asked)

    async def watch(self) -> None:
        while True:
            count = await self.service.lanes()
            if not self.outcome.lanes or self.outcome.lanes[-1][1] != count:
                self.outcome.lanes.append((time.monotonic(), count))
            await asyncio.sleep(0.05)

    async def kill(self, draw: random.Random) -> None:
        await asyncio.sleep(draw.uniform(0.15, 0.75) * self.service.kind.load_s)
        victim = draw.choice(self.service.workers)
        self.outcome.killed_s = time.monotonic()
        os.kill(victim, signal.SIGKILL)


async def run(service: Service, seed: int, texts: dict[int, str]) -> Outcome:
    load, kind = Load(service, texts), service.kind
    await service.wait_for_lanes(BACK_S)
    watcher = asyncio.create_task(load.watch())
    load.until_s = time.monotonic() + kind.load_s
    clients = [load.client(random.Random(1000 * seed + number)) for number in range(kind.clients)]
    await asyncio.gather(load.kill(random.Random(seed)), *clients)
    watcher.cancel()
    await asyncio.gather(watcher, return_exceptions=True)
    return load.outcome


async def first_answers(service: Service, texts: dict[int, str]) -> None:
    """Of every prompt, before any worker is killed: what all later answers must be."""
    await service.wait_for_lanes(START_S)
    load = Load(service, texts)
    for number in range(NUM_PROMPTS):
        await load.ask(number)
    assert not load.outcome.lost, load.outcome.lost


def runs(kind: Kind, seeds: list[int], num_noise: list[int]) -> Iterator[Outcome]:
    texts = dict[int, str]()
    with tempfile.TemporaryDirectory() as folder:
        service = Service(kind, Path(folder) / "log")
        try:
            asyncio.run(first_answers(service, texts))
            for seed in seeds:
                outcome = asyncio.run(run(service, seed, texts))
                print(
                    f"# {kind.name}, seed {seed}: {len(outcome.asked)} requests, {len(outcome.affected)} affected, "
                    f"slowest {outcome.slowest_s:.2f} s after {outcome.lane_again_s - outcome.killed_s:.2f} s without "
                    f"a lane, {outcome.num_refused} refusals, lost: {dict(outcome.lost)}",
                    flush=True,
                )
                yield outcome
            num_noise.append(service.noise)
        finally:
            service.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=50, help="workers to kill (default 50)")
    parser.add_argument("--quick", action="store_true", help="3 runs, one of each kind")
    parser.add_argument("--only", choices=[kind.name for kind in KINDS], help="runs of one kind")
    parser.add_argument("--seed", type=int, default=0, help="of the first run")
    args = parser.parse_args()
    kinds = [kind for kind in KINDS if args.only in (None, kind.name)]
    seeds = [args.seed + number for number in range(len(kinds) if args.quick else args.runs)]
    outcomes, noise = list[Outcome](), list[int]()
    for index, kind in enumerate(kinds):
        if own := seeds[index :: len(kinds)]:
            outcomes += runs(kind, own, noise)
    told = Report("A worker of bubbletea serve is killed under load", "every admitted request answered once")
    told.figure("runs", len(outcomes), "kills")
    told.figure("admitted requests", sum(len(one.asked) for one in outcomes), "requests")
    told.figure("affected requests", sum(len(one.affected) for one in outcomes), "requests", at_least=len(outcomes))
    told.figure("admitted requests lost", sum(one.lost.total() for one in outcomes), "requests", at_most=0)
    told.figure("slowest affected request", max(one.slowest_s for one in outcomes), "s", at_most=BAR_S)
    told.figure("log lines of writes to lost workers", sum(noise), "lines", at_most=0)
    return told.finish()


if __name__ == "__main__":
    sys.exit(main())
