"""Cells on loopback for the tests: n nodes on each side, joined by emulated paths, in one process."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

from atlas.wan.cell_relay.relay import Cell
from atlas.wan.emulator.delay_proxy import DelayProxy
from atlas.wan.transport.endpoint import Endpoint
from atlas.wan.transport.settings import TransportSettings

QUICK = TransportSettings(max_streams=1, stall_s=5.0, heartbeat_s=0.5, deadline_s=20.0, warm_s=1.5)


@contextmanager
def joined_cells(
    size: int, rates_bps: list[float] | None = None, latency_s: float = 0.01, settings: TransportSettings = QUICK
) -> Iterator[tuple[list[Cell], list[Cell], list[DelayProxy]]]:
    """Here, there, and the paths from here to there."""
    here, there = [f"dc1/{i}" for i in range(size)], [f"dc2/{i}" for i in range(size)]
    with ExitStack() as stack:
        ends = {name: stack.enter_context(Endpoint(name, settings=settings)) for name in here + there}
        cells = {}
        for side, other in ((here, there), (there, here)):
            for name in side:
                cells[name] = Cell(ends[name], dict(zip(side, other, strict=True)))
        proxies = []
        peers = {name: {p: ends[p].address for p in side if p != name} for side in (here, there) for name in side}
        for i in range(size):
            rate = rates_bps[i] if rates_bps else 100e6
            for source, target in ((here[i], there[i]), (there[i], here[i])):
                proxy = stack.enter_context(DelayProxy(ends[target].address, latency_s=latency_s, rate_bps=rate))
                proxies.append(proxy)
                peers[source][target] = proxy.address
        with ThreadPoolExecutor(len(cells)) as pool:
            list(pool.map(lambda name: cells[name].connect(peers[name]), cells))
        # They say goodbye over paths that are still there.
        for node in [*ends.values(), *cells.values()]:
            stack.callback(node.close, 0.5)
        yield [cells[name] for name in here], [cells[name] for name in there], proxies[::2]
