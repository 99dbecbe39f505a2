"""200 recorded tau-bench airline rollouts: hits and wrong outputs by key, and the time that live rollouts save.

Recorded: the counts of `tvcache replay`. Live: the rollouts again, eight at once, with tools that return the recorded
outputs and take 2 to 20 s, scaled down 100 times; in one process, and through a server. Overhead of a hit: the time of
a call that hits, minus the wait for an equal one in flight.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import threading
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "tvcache"))
from common.report import Report, not_measured
from servers import Served

from tvcache import Cache, Tool
from tvcache.client import Client
from tvcache.keys import ToolCall
from tvcache.replay import KEYINGS, Durations, replay
from tvcache.stores import Ask, CallStore, Lease, MemoryStore
from tvcache.tools import Effect
from tvcache.trajectories import RecordedRollouts, Trajectory, read
from tvcache.values import Value, decode

DATA = Path(__file__).parents[2] / "shared" / "data" / "taubench" / "gpt-4o-airline.json.gz"
MUTATING = {
    "book_reservation",
    "cancel_reservation",
    "update_reservation_flights",
    "update_reservation_baggages",
    "update_reservation_passengers",
    "send_certificate",
}
EXPECTED = {"mutating calls": (474, 0), "full history": (344, 0), "call alone": (541, 3)}
SCALE = 100.0
SECONDS = Durations(2.0 / SCALE, 20.0 / SCALE)


def effect(name: str) -> Effect:
    return "mutates" if name in MUTATING else "reads"


class Recording:
    """An environment with recorded outputs, by the mutating calls before and the call."""

    outputs: dict[Any, tuple[bytes, float]]

    def __init__(self, outputs: dict[Any, tuple[bytes, float]], before: tuple[bytes, ...] = ()) -> None:
        self.outputs, self.before = outputs, before

    def fork(self) -> Recording:
        return Recording(self.outputs, self.before)

    def execute(self, name: str, arguments: Any) -> Any:
        call = ToolCall(name, arguments).canonical
        body, seconds = self.outputs[self.before, call]
        time.sleep(seconds)
        if name in MUTATING:
            self.before = (*self.before, call)
        return decode(body)

    def close(self) -> None: ...


def outputs_of(steps: Trajectory, outputs: dict[Any, tuple[bytes, float]]) -> None:
    before: tuple[bytes, ...] = ()
    for step in steps.steps:
        assert step.call is not None
        assert step.body is not None
        outputs.setdefault((before, step.call.canonical), (step.body, SECONDS(step)))
        if step.name in MUTATING:
            before = (*before, step.call.canonical)


class Waited:
    """A store that measures how long each call waited for another in flight."""

    def __init__(self, inner: CallStore) -> None:
        self.inner, self.local = inner, threading.local()

    def begin(self, ask: Ask, wait_s: float) -> Value | Lease:
        found = self.inner.begin(ask, 0.0)
        self.local.waited = isinstance(found, Lease) and found.number == 0
        return self.inner.begin(ask, wait_s) if self.local.waited else found

    def finish(self, ask: Ask, lease: Lease, value: Value | None) -> Value | None:
        return self.inner.finish(ask, lease, value)

    def drop(self, ask: Ask, tool: str, reason: str) -> None:
        self.inner.drop(ask, tool, reason)

    def close(self) -> None:
        self.inner.close()


def live(recorded: RecordedRollouts, store: CallStore | None) -> dict[str, float]:
    """Eight concurrent rollouts, in file order; None: no cache."""
    outputs: dict[Any, dict[Any, tuple[bytes, float]]] = {}
    for one in recorded.trajectories:
        outputs_of(one, outputs.setdefault(one.task, {}))
    waited = Waited(store) if store is not None else None
    tools = [Tool(step.name, effect(step.name)) for one in recorded.trajectories for step in one.steps]
    cache = Cache(waited, tools, audit=0.01 if store is not None else 0.0, seed=1)
    waits, overhead, wrong = deque[float](), deque[float](), deque[str]()

    def play(trajectory: Trajectory) -> None:
        def make() -> Recording:
            return Recording(outputs[trajectory.task])

        plain = make()
        with cache.rollout(trajectory.task, make) as rollout:
            for step in trajectory.steps:
                assert step.call is not None
                began_s, hits = time.perf_counter(), rollout.hits
                run = plain.execute if waited is None else rollout.call
                output = run(step.name, step.call.arguments)
                took_s = time.perf_counter() - began_s
                waits.append(took_s)
                if rollout.hits > hits and waited is not None and not waited.local.waited:
                    overhead.append(took_s)
                if output != decode(step.body or b""):
                    wrong.append(step.name)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(play, recorded.trajectories))
    found = {"waits_s": sum(waits), "wrong": float(len(wrong)), "hits": float(cache.counters.hits)}
    if overhead:
        p95_s = statistics.quantiles(overhead, n=20)[18]
        found |= {"overhead_p50_s": statistics.median(overhead), "overhead_p95_s": p95_s}
    cache.close()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a quarter of the live rollouts, in one process only")
    args = parser.parse_args()
    if not DATA.is_file():
        return not_measured("tau-bench airline", f"{DATA} is not here")
    recorded = read(DATA)
    report = Report("tau-bench airline, 200 rollouts, 1,164 calls", "recorded outputs; live rollouts without a cache")
    for keying in KEYINGS:
        found, (hits, wrong) = replay(recorded, effect, keying, Durations()), EXPECTED[keying]
        report.figure(f"recorded, key {keying}: hits", found.hits, "", at_least=hits)
        report.figure(f"recorded, key {keying}: hits beyond {hits}", found.hits - hits, "", at_most=0)
        missed = abs(sum(found.wrong.values()) - wrong)
        report.figure(f"recorded, key {keying}: wrong outputs, difference from {wrong}", missed, "", at_most=0)
    if args.quick:
        wanted = {one.task for one in recorded.trajectories[:12]}
        recorded.trajectories = [one for one in recorded.trajectories if one.task in wanted]
    stores: list[tuple[str, Any]] = [("one process", lambda _: MemoryStore())]
    if not args.quick:
        stores.append(("server", lambda served: Client(served.url)))
    with tempfile.TemporaryDirectory() as folder, Served(Path(folder) / "a.log") as served:
        plain = live(recorded, None)
        for name, make in stores:
            found = live(recorded, make(served))
            saved = 1 - found["waits_s"] / plain["waits_s"]
            report.figure(f"live, {name}: tool seconds saved", saved, "", at_least=0.35)
            report.figure(f"live, {name}: wrong outputs", found["wrong"], "", at_most=0)
            report.figure(f"live, {name}: hits", found["hits"], "")
            report.figure(f"live, {name}: a hit's overhead p50", 1e3 * found["overhead_p50_s"], "ms")
            report.figure(f"live, {name}: a hit's overhead p95", 1e3 * found["overhead_p95_s"], "ms", at_most=2.0)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
