"""BubbleTea inside a training worker: the entry point "bubbletea" of `atlas.fillers`. Holds a part of the served model,
receives tasks from the service, and runs them in the worker's waits (`filling`).

Settings: {"address": of the service, "token_file": a file with the shared token}.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

from atlas.runtime.device import Span
from atlas.runtime.waits import Position, SharedDevice, WorkerFacts
from atlas.wan.transport.endpoint import Endpoint
from atlas.wan.transport.settings import TransportSettings
from bubbletea.prefill.arena import Arena
from bubbletea.prefill.engine import LANE, PrefillEngine
from bubbletea.prefill.filling import Filling
from bubbletea.prefill.guard import Guard
from bubbletea.prefill.messages import WorkerOrder
from bubbletea.prefill.piece_times import PieceTimes
from bubbletea.prefill.service_link import ServiceLink
from bubbletea.prefill.shard import ModelShard
from bubbletea.prefill.throttle import ALONE_FIRST, Throttle
from bubbletea.prefill.warming import warm_up

STREAMS = TransportSettings(max_streams=1)
"""For activations of a chunk between hosts of one datacenter."""


class BubbleTea:
    """The Filler."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings
        self._link: ServiceLink | None = None
        self._transport: Endpoint | None = None
        self._throttle: Throttle | None = None

    def attach(self, facts: WorkerFacts, device: SharedDevice) -> None:
        self.open(facts.name, facts.datacenter, facts.worker, device, trains=True)

    def open(
        self, worker_name: str, datacenter: str, worker: int, device: SharedDevice, *, trains: bool = False
    ) -> None:
        """Gets its part of the model from the service and loads it. Runs before training starts."""
        token = Path(self.settings["token_file"]).read_text().strip()
        # A restarted worker is another node: unfinished transfers of the old one are dropped.
        name = f"{datacenter}/{worker_name}.{os.getpid()}.{secrets.token_hex(4)}"
        self._transport = Endpoint(name, settings=STREAMS)
        who = {
            "name": worker_name,
            "datacenter": datacenter,
            "worker": worker,
            "pid": os.getpid(),
            "transport": [name, *self._transport.address],
        }
        self._link = link = ServiceLink(str(self.settings["address"]), token, who)
        order = WorkerOrder.from_json(link.order)
        arena = Arena(order.arena_bytes, order.workspace_bytes, device.place)
        shard = ModelShard(order.served, order.served.cuts(order.layers_per_stage)[order.stage], arena)
        pace = PieceTimes(order.served.config)
        warm_up(shard, pace, order.chunk)
        self.engine = PrefillEngine(shard, link, self._transport, self._reach, pace)
        guard, paced_ns = Guard(order.risk, order.waits_ns), None if order.pace is None else order.paced_ns
        if trains:
            # A restarted training does not keep admitted requests waiting for three iterations without prefill.
            self._throttle = Throttle(order.budget, order.sensitivity, 0 if link.has_baseline else ALONE_FIRST)
        self._filling = Filling(self.engine, guard, device, order.margin_ns, paced_ns, self._throttle)
        link.serve(self.engine, self._set_share)

    def _set_share(self, share: float) -> None:
        self._filling.share = share

    def fill(self, position: Position, arrived: Callable[[], bool]) -> None:
        self._filling.fill(position, arrived)

    def waited(self, position: Position, began_ns: int, ended_ns: int) -> None:
        assert self._link is not None
        filled_ns = self._filling.over(position, began_ns, ended_ns)
        self._link.waited(position.step, position.index, began_ns, ended_ns, filled_ns)

    def ran(self, position: Position, span: Span) -> None:
        if self._throttle is not None:
            self._throttle.ran(position.step, position.index, span.end_ns - span.start_ns)

    def close(self) -> None:
        if self._link is not None:
            self._link.report()
            self._link.close()
        if self._transport is not None:
            self._transport.close(0.0)

    def _reach(self, name: str, host: str, port: int) -> None:
        assert self._transport is not None
        self._transport.open(name, LANE, (host, port))
