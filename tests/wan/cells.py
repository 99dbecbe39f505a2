"""Two cells for the tests: n nodes on each side in this process, joined by emulated paths."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

from atlas.wan.cell_relay.relay import Cell
from atlas.wan.emulator.paths import PathSpec
from atlas.wan.emulator.proxy_net import ProxyNet
from atlas.wan.transport.endpoint import Endpoint
from atlas.wan.transport.settings import TransportSettings

QUICK = TransportSettings(max_streams=1, stall_s=5.0, heartbeat_s=0.5, deadline_s=20.0, warm_s=1.5)


@contextmanager
def joined_cells(
    size: int, rates_bps: list[float] | None = None, latency_s: float = 0.01, settings: TransportSettings = QUICK
) -> Iterator[tuple[list[Cell], list[Cell], ProxyNet]]:
    """The cells of both sides, and the emulated paths between `dc1/i` and `dc2/i`."""
    here, there = [f"dc1/{i}" for i in range(size)], [f"dc2/{i}" for i in range(size)]
    with ExitStack() as stack:
        ends = {name: stack.enter_context(Endpoint(name, settings=settings)) for name in here + there}
        cells = {}
        for side, other in ((here, there), (there, here)):
            for name in side:
                cells[name] = Cell(ends[name], dict(zip(side, other, strict=True)))
        rates = rates_bps or [100e6] * size
        specs = [PathSpec(latency_s=latency_s, window_bytes=None, pair_bps=rate) for rate in rates]
        net = stack.enter_context(ProxyNet(dict(zip(zip(here, there, strict=True), specs, strict=True))))
        peers = {name: {p: ends[p].address for p in side if p != name} for side in (here, there) for name in side}
        for pair in zip(here, there, strict=True):
            for source, target in (pair, pair[::-1]):
                peers[source][target] = net.listen(source, target, ends[target].address)
        with ThreadPoolExecutor(len(cells)) as pool:
            list(pool.map(lambda name: cells[name].connect(peers[name]), cells))
        # The nodes are closed before the paths, so that they can notify their peers.
        for node in [*ends.values(), *cells.values()]:
            stack.callback(node.close, 0.5)
        yield [cells[name] for name in here], [cells[name] for name in there], net
