"""BubbleTea inside a training worker: what `atlas.fillers` calls "bubbletea". In every wait it runs pieces of prefill
for as long as each one's predicted end, plus a margin, lies before the end that the guard believes in, and stops the
moment the input has arrived. Training always wins the device.

Settings: {"address": where the service listens, "token_file": a file with the token both share}.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from atlas.runtime.waits import Position, SharedDevice, WorkerFacts
from atlas.wan.endpoint import Endpoint
from atlas.wan.settings import Settings
from bubbletea.prefill.arena import Arena
from bubbletea.prefill.engine import LANE, Engine, warm_up
from bubbletea.prefill.guard import Guard
from bubbletea.prefill.job import HEAD, Piece
from bubbletea.prefill.link import Link
from bubbletea.prefill.messages import Order
from bubbletea.prefill.pace import Pace
from bubbletea.prefill.shard import Shard

IDLE_S = 0.001
"""How often a wait without work looks for some, and for its end."""
STREAMS = Settings(max_streams=1)
"""Activations of a chunk between hosts of one datacenter."""


class BubbleTea:
    """The Filler."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings
        self._link: Link | None = None
        self._transport: Endpoint | None = None
        self._filled_ns = 0

    def attach(self, facts: WorkerFacts, device: SharedDevice) -> None:
        self.open(facts.name, facts.datacenter, facts.worker, device)

    def open(self, worker_name: str, datacenter: str, worker: int, device: SharedDevice) -> None:
        """Asks the service what to hold, and gets ready for it. Training has not begun: this may take its time."""
        token = Path(self.settings["token_file"]).read_text().strip()
        # Another life of the same worker is another node: its half-done transfers are nobody's.
        name = f"{datacenter}/{worker_name}.{os.getpid()}.{secrets.token_hex(4)}"
        self._transport = Endpoint(name, settings=STREAMS)
        who = {
            "name": worker_name,
            "datacenter": datacenter,
            "worker": worker,
            "pid": os.getpid(),
            "transport": [name, *self._transport.address],
        }
        self._device = device
        self._link = link = Link(str(self.settings["address"]), token, who)
        self._order = order = Order.from_json(link.order)
        arena = Arena(order.arena_bytes, order.workspace_bytes, device.place)
        shard = Shard(order.served, order.served.cuts(order.layers_per_stage)[order.stage], arena)
        pace = Pace(order.served.config)
        warm_up(shard, pace, order.chunk)
        self._guard = Guard(order.risk, order.waits_ns)
        self.engine = Engine(shard, link, self._transport, self._reach, pace)
        link.serve(self.engine)

    def fill(self, position: Position, arrived: Callable[[], bool]) -> None:
        """Pieces as long as they fit; then, as there may be more work before the end, looks out for both."""
        began_ns = time.monotonic_ns()
        end_ns = began_ns + self._guard.wait_ns(position.index) - self._order.margin_ns
        self._filled_ns = 0
        while not arrived():
            now_ns = time.monotonic_ns()
            if now_ns >= end_ns:
                return
            found = self.engine.next_piece()
            if found is not None and now_ns + self._cost_ns(found[1], found[2]) <= end_ns:
                self.engine.step(lambda work, piece=found[1]: self._run(work, piece))  # type: ignore[misc]
            else:
                self.engine.changed.wait(IDLE_S)

    def waited(self, position: Position, began_ns: int, ended_ns: int) -> None:
        self._guard.observe(position.index, ended_ns - began_ns)
        assert self._link is not None
        self._link.waited(position.step, position.index, began_ns, ended_ns, self._filled_ns)
        self._filled_ns = 0

    def close(self) -> None:
        if self._link is not None:
            self._link.report()
            self._link.close()
        if self._transport is not None:
            self._transport.close(0.0)

    def _run(self, work: Callable[[], None], piece: Piece) -> int:
        _, span = self._device.run(work, self._paced_ns(piece))
        self._filled_ns += span.end_ns - span.start_ns
        return span.end_ns - span.start_ns

    def _cost_ns(self, piece: Piece, predicted_ns: int) -> int:
        """A paced device's pace is known; a real one's is what was learnt."""
        return max(self._paced_ns(piece), predicted_ns if self._order.pace is None else 0)

    def _paced_ns(self, piece: Piece) -> int:
        if self._order.pace is None:
            return 0
        if piece.layer == HEAD:
            return self._order.head_ns
        return self._order.pace(piece.last - piece.first, piece.first)

    def _reach(self, name: str, host: str, port: int) -> None:
        assert self._transport is not None
        self._transport.open(name, LANE, (host, port))
