"""Two sites 40 ms apart: hits at the second site, and proof that none of its calls waits for the WAN.

Each site has its server; a proxy on loopback delays every byte between them by 20 ms in each direction. The first site
runs half of the rollouts of the tau-bench recording (recorded outputs, tools that take no time), then both run the rest
of the trials at the same time, then the second runs the first's half. Compared with one site that runs all.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "tvcache"))
from common.report import Report, not_measured
from servers import Served
from tvcache_tau import DATA, effect

from tvcache.client import Client
from tvcache.endpoint import HttpEndpoint
from tvcache.keys import root
from tvcache.stores import Ask, Lease
from tvcache.trajectories import Trajectory, read
from tvcache.values import Value

ONE_WAY_S = 0.020


class Proxy:
    """Forwards bytes between loopback ports with a delay per direction; many messages may be in flight."""

    def __init__(self, target: int) -> None:
        self.target, self.port = target, 0
        self._ready = threading.Event()
        threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True).start()
        assert self._ready.wait(10)

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        async with server:
            await server.serve_forever()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(2 * ONE_WAY_S)  # a handshake takes one round trip
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self.target)
        await asyncio.gather(self._carry(reader, far_writer), self._carry(far_reader, writer))

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        try:
            while data := await reader.read(65536):
                loop.call_later(ONE_WAY_S, writer.write, data)
        except ConnectionError:
            pass
        loop.call_later(ONE_WAY_S, writer.close)


def play(trajectories: list[Trajectory], client: Client) -> tuple[int, list[float]]:
    """(hits, seconds of every lookup and store)"""
    hits, took_s = 0, []
    for one in trajectories:
        state = root(one.task)
        for step in one.steps:
            assert step.call is not None
            assert step.body is not None
            mutates = effect(step.name) == "mutates"
            ask = Ask.of(one.task, state, step.call, mutates)
            began_s = time.perf_counter()
            found = client.begin(ask, 0.0)
            took_s.append(time.perf_counter() - began_s)
            if isinstance(found, Lease):
                began_s = time.perf_counter()
                client.finish(ask, found, Value(step.body, 1.0))
                took_s.append(time.perf_counter() - began_s)
            else:
                hits += 1
                assert found.body == step.body, "a wrong output"
            if mutates:
                state = ask.key
    return hits, took_s


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the same: it takes seconds")
    parser.parse_args()
    if not DATA.is_file():
        return not_measured("two sites", f"{DATA} is not here")
    rollouts = read(DATA).trajectories
    half = len(rollouts) // 2
    first, second = rollouts[:half], rollouts[half:]
    report = Report("Two sites, 40 ms apart (emulated)", "one site that sees every rollout")
    with tempfile.TemporaryDirectory() as folder, Served(Path(folder) / "one.log") as alone:
        client = Client(alone.url)
        play(first, client)
        local_hits, _ = play(second, client)
        again_hits, local_s = play(first, client)
        client.close()
    with tempfile.TemporaryDirectory() as folder, Served(Path(folder) / "here.log") as here:
        proxy = Proxy(here.port)
        with Served(Path(folder) / "there.log", "--peer", f"http://127.0.0.1:{proxy.port}") as there:
            near, far = Client(here.url), Client(there.url)
            play(first, near)
            began_s = time.perf_counter()
            until_s = began_s + 60
            while _values(there) < _values(here) and time.perf_counter() < until_s:
                time.sleep(0.005)
            report.figure("the first half is at the second site after", time.perf_counter() - began_s, "s")
            live = threading.Thread(target=play, args=(second, near))
            live.start()
            far_hits, live_s = play(second, far)
            live.join()
            replayed_hits, far_s = play(first, far)
            near.close()
            far.close()
    report.figure("hits at the second site, of those of one site", far_hits / local_hits, "", at_least=0.95)
    report.figure("the same, replaying the first's rollouts", replayed_hits / again_hits, "", at_least=0.95)
    for name, took_s in (("one site", local_s), ("second site", far_s), ("second site, both busy", live_s)):
        report.figure(f"{name}: a request's p50", 1e3 * statistics.median(took_s), "ms")
    report.figure("second site: slowest request, of the WAN's 40 ms", max(far_s) / 0.040, "", at_most=1.0)
    return report.finish()


def _values(served: Served) -> int:
    with HttpEndpoint(served.url) as endpoint:
        _, _, data = endpoint.request("GET", "/healthz", None, 10.0)
    return int(json.loads(data)["values"])


if __name__ == "__main__":
    sys.exit(main())
