"""Kills a worker of `bubbletea serve` under load: is every admitted request answered, once, and how soon?

    python bench/serve_kills.py                      50 runs of 500 requests, about 25 minutes
    python bench/serve_kills.py --first 10 --runs 5  runs 10 to 14: parts of the 50 for several machines
    python bench/serve_kills.py --quick              3 runs of 120 requests, one of each kind
    python bench/serve_kills.py --only training --runs 4

Three kinds of runs take turns: two workers without training; training under emulation (examples/tiny.yaml, three times
slower), where one lost worker restarts all; and two workers with half of the requests offline. In each run 64 clients
(--quick: 24) send 500 prompts of 50 to 600 tokens over HTTP, and one worker gets SIGKILL at a random moment. Runs of
one kind use one service, one after the other; each starts when all lanes are back.

A refused request (429, or 503 while there are no workers) is not admitted: the client sends it again. Everything else
but the right answer is a lost request. A request is affected if it was open when the worker was killed. The bar counts
from when its worker was back, that is, when all lanes were there again: until then it may be queued behind the requests
of the other lane, which is not recovery. The same number of seconds is the bar for the time from the kill, or from the
end of a time without any lane, beyond the slowest request of the run that was not affected: how long the queue of 64
clients takes on this host.
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
from typing import Any

from common.report import Report

ROOT = Path(__file__).parents[1]
START_S, REQUEST_S, BACK_S = 120.0, 90.0, 90.0
BAR_S = 5.0
NUM_PROMPTS, NEW_TOKENS = 40, 4
FULL, QUICK = (64, 500), (24, 120)
"""Clients and requests of a run."""
FIRST_CLIENTS = 8
"""While the right answers are collected."""
REFUSED = ("deadline", "share", "memory", "no-lane", "overcommitted")
"""Error codes of requests that were not admitted."""
NOISE = "socket.send() raised exception"


@dataclass(frozen=True)
class Kind:
    """How the service is started and loaded."""

    name: str
    arguments: tuple[str, ...]
    num_lanes: int
    offline: float = 0.0
    """The share of offline requests."""

    @property
    def trains(self) -> bool:
        return "--alone" not in self.arguments


ALONE, TRAINING = ("--alone", "2"), (str(ROOT / "examples" / "tiny.yaml"), "--slower", "3")
KINDS = (
    Kind("alone", ALONE, 2),
    Kind("training", TRAINING, 8),
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
    def usual_s(self) -> float:
        """The longest time of a request that was not open at the kill: the queue of that many clients."""
        others = (one for one in self.asked if not one.sent_s < self.killed_s < one.answered_s)
        return max((one.answered_s - one.sent_s for one in others), default=0.0)

    def back_s(self, num_lanes: int) -> float:
        """When all lanes were there again after the kill; the end of the run where they were not."""
        after = [(at_s, count) for at_s, count in self.lanes if at_s > self.killed_s]
        fell = next((n for n, (_, count) in enumerate(after) if count < num_lanes), len(after))
        ended_s = max((one.answered_s for one in self.asked), default=self.killed_s)
        return next((at_s for at_s, count in after[fell:] if count >= num_lanes), ended_s)

    @property
    def lane_s(self) -> float:
        """The kill, or the end of the last time without any lane after it."""
        pairs = zip(self.lanes, self.lanes[1:], strict=False)
        ends = [at_s for (_, before), (at_s, count) in pairs if not before and count and at_s > self.killed_s]
        return ends[-1] if ends else self.killed_s

    def slowest_s(self, *starts_s: float) -> float:
        """Of the affected: the longest time since the last of `starts_s` before its answer; 0 where there is none."""
        found = 0.0
        for one in self.affected:
            starts = [start_s for start_s in starts_s if start_s < one.answered_s]
            found = max(found, one.answered_s - max(starts)) if starts else found
        return found


class Service:
    """`bubbletea serve`, and with a job `atlas train --filler bubbletea`, as a user starts them."""

    def __init__(self, kind: Kind, folder: Path) -> None:
        self.kind, self._log = kind, folder / "log"
        meet = ["--folder", str(folder)] if kind.trains else []
        with self._log.open("w") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "bubbletea.cli", "serve", *kind.arguments, "--port", "0", *meet],
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
            self._processes = [self._process]
            if kind.trains:
                train = ["--emulate", "--steps", "1000000", "--no-bar", "--filler", "bubbletea"]
                train += ["--checkpoints", str(folder / "saved"), "--save-every", "5"]
                words = ["train", *kind.arguments, *train, "--filler-folder", str(folder)]
                self._processes.append(
                    subprocess.Popen(
                        [sys.executable, "-m", "atlas", *words], cwd=folder, stdout=subprocess.DEVNULL, stderr=errors
                    )
                )
        assert self._process.stdout is not None
        match = re.search(r"http://([\d.]+):(\d+)", self._process.stdout.readline())
        if match is None:
            raise RuntimeError(f"bubbletea serve did not start: {self._log.read_text()[-2000:]}")
        self.host, self.port = match[1], int(match[2])

    @property
    def workers(self) -> list[int]:
        """Process ids: the processes below service or training that have no children, without the network emulator and
        the processes in which a paced worker prefills, which end with it."""
        parents, found = dict[int, int](), list[int]()
        root = self._processes[-1].pid
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit():
                with contextlib.suppress(OSError):
                    name, _, rest = (folder / "stat").read_text().rpartition(")")
                    if not name.endswith("(prefill"):
                        parents[int(folder.name)] = int(rest.split()[1])
        for pid in parents.keys() - set(parents.values()):
            above = pid
            while above in parents and above != root:
                above = parents[above]
            with contextlib.suppress(OSError):
                if above == root and b"emulator" not in Path(f"/proc/{pid}/cmdline").read_bytes():
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
        for process in reversed(self._processes):
            process.send_signal(signal.SIGINT if process is self._process else signal.SIGTERM)
        for process in self._processes:
            try:
                process.communicate(timeout=30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()


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
    """Clients that send the next request when one is answered; all compare with `texts`, the first answers."""

    def __init__(self, service: Service, texts: dict[int, str], num_requests: int) -> None:
        self.service, self.texts, self.outcome = service, texts, Outcome()
        self.prompts, self._left, self.num_requests = prompts(0), num_requests, num_requests

    async def client(self, draw: random.Random) -> None:
        while self._left > 0:
            self._left -= 1
            await self.ask(draw.randrange(NUM_PROMPTS), offline=draw.random() < self.service.kind.offline)

    async def ask(self, number: int, *, offline: bool = False) -> None:
        body = {"model": "tiny", "prompt": self.prompts[number], "max_tokens": NEW_TOKENS, "temperature": 0}
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
        """When a random share of the requests was answered."""
        answered = draw.uniform(0.1, 0.6) * self.num_requests
        while len(self.outcome.asked) < answered:
            await asyncio.sleep(0.01)
        victim = draw.choice(self.service.workers)
        self.outcome.killed_s = time.monotonic()
        os.kill(victim, signal.SIGKILL)


async def run(service: Service, seed: int, texts: dict[int, str], size: tuple[int, int]) -> Outcome:
    num_clients, num_requests = size
    load = Load(service, texts, num_requests)
    await service.wait_for_lanes(BACK_S)
    watcher = asyncio.create_task(load.watch())
    clients = [load.client(random.Random(1000 * seed + number)) for number in range(num_clients)]
    await asyncio.gather(load.kill(random.Random(seed)), *clients)
    watcher.cancel()
    await asyncio.gather(watcher, return_exceptions=True)
    return load.outcome


async def first_answers(service: Service, texts: dict[int, str]) -> None:
    """Of every prompt, before any worker is killed: all later answers must be the same."""
    await service.wait_for_lanes(START_S)
    load = Load(service, texts, NUM_PROMPTS)
    numbers = iter(range(NUM_PROMPTS))

    async def client() -> None:
        for number in numbers:
            await load.ask(number)

    await asyncio.gather(*(client() for _ in range(FIRST_CLIENTS)))
    assert not load.outcome.lost, load.outcome.lost


def runs(kind: Kind, seeds: list[int], size: tuple[int, int], num_noise: list[int]) -> Iterator[Outcome]:
    texts = dict[int, str]()
    with tempfile.TemporaryDirectory() as folder:
        service = Service(kind, Path(folder))
        try:
            asyncio.run(first_answers(service, texts))
            for seed in seeds:
                outcome = asyncio.run(run(service, seed, texts, size))
                print(json.dumps({"run": seed, "kind": kind.name} | row(outcome, kind)), flush=True)
                yield outcome
            num_noise.append(service.noise)
        finally:
            service.close()


def row(one: Outcome, kind: Kind) -> dict[str, Any]:
    """The figures of one run; seconds."""
    back_s = one.back_s(kind.num_lanes)
    figures = {
        "worker_back_s": back_s - one.killed_s,
        "lane_after_s": one.lane_s - one.killed_s,
        "slowest_s": one.slowest_s(back_s),
        "slowest_since_lane_s": one.slowest_s(one.killed_s, one.lane_s),
        "slowest_unaffected_s": one.usual_s,
        "beyond_usual_s": max(0.0, one.slowest_s(one.killed_s, one.lane_s) - one.usual_s),
    }
    counts = {"requests": len(one.asked), "affected": len(one.affected), "refusals": one.num_refused}
    return counts | {"lost": dict(one.lost)} | {name: round(value, 3) for name, value in figures.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=50, help="number of runs, one kill each (default 50)")
    parser.add_argument("--first", type=int, default=0, metavar="N", help="number of the first run (default 0)")
    parser.add_argument("--quick", action="store_true", help="3 short runs, one of each kind")
    parser.add_argument("--only", choices=[kind.name for kind in KINDS], help="runs of one kind")
    args = parser.parse_args()
    kinds = [kind for kind in KINDS if args.only in (None, kind.name)]
    numbers = range(args.first, args.first + (len(kinds) if args.quick else args.runs))
    outcomes, noise = list[tuple[Outcome, Kind]](), list[int]()
    for index, kind in enumerate(kinds):
        own = [number for number in numbers if number % len(kinds) == index]
        if own:
            outcomes += [(one, kind) for one in runs(kind, own, QUICK if args.quick else FULL, noise)]
    return report(outcomes, sum(noise))


def report(outcomes: list[tuple[Outcome, Kind]], num_noise: int) -> int:
    rows = [row(one, kind) for one, kind in outcomes]
    told = Report("A worker of bubbletea serve is killed under load", "every admitted request answered once")
    told.figure("runs", len(rows), "kills")
    told.figure("admitted requests", sum(one["requests"] for one in rows), "requests")
    told.figure("affected requests", sum(one["affected"] for one in rows), "requests", at_least=len(rows))
    told.figure("admitted requests lost", sum(one.lost.total() for one, _ in outcomes), "requests", at_most=0)
    told.figure(
        "slowest affected, since its worker was back", max(one["slowest_s"] for one in rows), "s", at_most=BAR_S
    )
    told.figure("slowest affected, since there was a lane", max(one["slowest_since_lane_s"] for one in rows), "s")
    beyond_s = max(one["beyond_usual_s"] for one in rows)
    told.figure("the same, beyond the slowest that was not affected", beyond_s, "s", at_most=BAR_S)
    told.figure("slowest request that was not affected", max(one["slowest_unaffected_s"] for one in rows), "s")
    told.figure("longest until the worker was back", max(one["worker_back_s"] for one in rows), "s")
    told.figure("log lines of writes to lost workers", num_noise, "lines", at_most=0)
    return told.finish()


if __name__ == "__main__":
    sys.exit(main())
