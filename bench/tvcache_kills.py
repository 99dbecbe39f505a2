"""`kill -9` of the tool cache's server at 50 random moments, while eight concurrent rollouts use it.

Rollouts must end with the outputs and states of uncached execution, whenever the server dies or comes back. After every
start the values acknowledged since the last one must be there; at the end all of them, unchanged. Also: 64 equal calls
of 64 clients are executed once.
"""

from __future__ import annotations

import argparse
import logging
import random
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "tvcache"))
from common.report import Report
from histories import TOOLS, WORLD, cached, new_state, random_group, uncached
from servers import Served

from tvcache import Cache, Tool
from tvcache.client import Client
from tvcache.environments.memory import MemoryEnvironment
from tvcache.stores import Ask, Lease
from tvcache.values import Value


class Remembering(Client):
    """Records the acknowledged values."""

    kept: dict[bytes, tuple[Ask, Value]]

    def finish(self, ask: Ask, lease: Lease, value: Value | None) -> Value | None:
        stored = super().finish(ask, lease, value)
        if value is not None and stored is not None:
            self.kept.setdefault(ask.key, (ask, stored))
        return stored


def killed(served: Served, kills: int, seed: int) -> tuple[int, int, int, int]:
    """(wrong rollouts, values lost or changed, acknowledged, hits)"""
    chance = random.Random(seed)
    client = Remembering(served.url)
    client.kept = {}
    cache = Cache(client, TOOLS, audit=0.0)
    stop, wrong, lost, checked = threading.Event(), 0, 0, 0

    def play(numbers: range) -> int:
        bad = number = 0
        while not stop.wait(0.005):  # leave the server a core
            number += 1
            group = random_group(random.Random(numbers.start * 100_000 + number // 3), num_rollouts=2)
            for seat, calls in enumerate(group):
                make = lambda: MemoryEnvironment(new_state(), WORLD)  # noqa: E731
                bad += cached(cache, f"task {numbers.start} {number // 3}", seat, calls, make) != uncached(seat, calls)
        return bad

    with ThreadPoolExecutor(8) as pool:
        players = [pool.submit(play, range(seat, seat + 1)) for seat in range(8)]
        for _ in range(kills):
            before, until_s = client.acknowledged, time.monotonic() + 10
            while client.acknowledged == before and time.monotonic() < until_s:
                time.sleep(0.002)
            time.sleep(chance.uniform(0.0, 0.2))
            served.kill()
            served.start()
            known = list(client.kept.values())
            lost += changed(served.url, known[checked:])
            checked = len(known)
        stop.set()
        wrong = sum(player.result(120) for player in players)
    lost += changed(served.url, list(client.kept.values()))
    hits = cache.counters.hits
    cache.close()
    return wrong, lost, len(client.kept), hits


def changed(url: str, known: list[tuple[Ask, Value]]) -> int:
    """How many acknowledged values the server has lost or changed."""
    client = Client(url)
    found = sum(client.begin(ask, 0.0) != value for ask, value in known)
    client.close()
    return found


def equal_calls(url: str) -> int:
    started, executed = threading.Barrier(64), []

    def f(_: Any) -> int:
        executed.append(1)
        time.sleep(0.05)
        return 1

    def play(_: int) -> Any:
        cache = Cache(Client(url), [Tool("f", "reads")], audit=0.0)
        with cache, cache.rollout("64", lambda: MemoryEnvironment({}, {"f": f})) as rollout:
            started.wait(60)
            return rollout.call("f", {})

    with ThreadPoolExecutor(64) as pool:
        list(pool.map(play, range(64)))
    return len(executed)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="5 kills")
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    report = Report("kill -9 of the server", "uncached execution; what was acknowledged before")
    with tempfile.TemporaryDirectory() as folder, Served(Path(folder) / "a.log") as served:
        report.figure("64 equal calls at once: executions", equal_calls(served.url), "", at_most=1)
        kills = 5 if args.quick else 50
        wrong, lost, acknowledged, hits = killed(served, kills, 4)
        report.figure("kills", kills, "")
        report.figure("rollouts with a wrong output or state", wrong, "", at_most=0)
        report.figure("values acknowledged", acknowledged, "", at_least=kills)
        report.figure("of them lost or changed", lost, "", at_most=0)
        report.figure("hits meanwhile", hits, "", at_least=1)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
