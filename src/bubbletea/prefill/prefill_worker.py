"""Prefill on one worker: holds a part of the served model, receives tasks from the service of its datacenter, and runs
them in the worker's waits (`filling`). In the worker's process, or in one beside it (`prefill_process`).

The service may start before or after training, stop, and return with another model. A thread looks for it; while there
is none, waits are not used. Settings: {"folder": where the service announces itself (`service_files`), "memory_mib":
reserved at once, before training starts}; or {"address", "token_file"} of a service that is there.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from atlas.addresses import is_loopback
from atlas.errors import WorkerError
from atlas.runtime.device import Span
from atlas.runtime.waits import Position, SharedDevice, WorkerFacts
from atlas.wan.transport.endpoint import Endpoint
from atlas.wan.transport.settings import TransportSettings
from bubbletea.constants import MIB
from bubbletea.frames import ClosedError, TokenRefused
from bubbletea.kv_server import KvServer, KvServerThread
from bubbletea.prefill.arena import WORKSPACE_BYTES, Arena
from bubbletea.prefill.engine import LANE, PrefillEngine
from bubbletea.prefill.filling import WaitFilling
from bubbletea.prefill.guard import Guard
from bubbletea.prefill.joining import WorkerIdentity, join
from bubbletea.prefill.kept_parts import KeptParts
from bubbletea.prefill.messages import WorkerOrder
from bubbletea.prefill.piece_times import PieceTimes
from bubbletea.prefill.service_files import ServicePlace, find
from bubbletea.prefill.service_link import ServiceLink
from bubbletea.prefill.shard import ModelShard
from bubbletea.prefill.throttle import ALONE_FIRST, Throttle
from bubbletea.prefill.warming import warm_up

log = logging.getLogger("atlas.bubbletea")
"""Below `atlas`: the launcher of the training shows its warnings."""
STREAMS = TransportSettings(max_streams=1)
"""For activations of a chunk between hosts of one datacenter."""
AGAIN_S, REFUSED_S = 0.5, 5.0
"""Between two looks for a service; after one that cannot be used."""
SETTLE_S = 0.01
"""Between two looks at whether the last pieces of the earlier service have ended."""


class PrefillWorker:
    """A Filler."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings
        self._link: ServiceLink | None = None
        self._transport: Endpoint | None = None
        self._order: WorkerOrder | None = None
        self._arena: Arena | None = None
        self._filling: WaitFilling | None = None
        self._parts = KeptParts()
        self._kv_server: KvServerThread | None = None
        """Where decode engines fetch what this worker has computed."""
        self._guard = Guard(0.0)
        """Learns waits also while there is no service."""
        self._trains = False
        self._is_joined = False
        self._using = threading.Lock()
        """Held while a wait is filled, and while the thread that joins changes what fills it."""
        self._closed = threading.Event()
        self._said = ""
        self._refused: ServicePlace | None = None

    # ---- the worker's thread -------------------------------------------------------------------------------------
    def attach(self, facts: WorkerFacts, device: SharedDevice) -> None:
        kind = "paced" if facts.compute_ns.any() else torch.device(device.place).type
        memory_bytes = int(self.settings.get("memory_mib", 0)) * MIB
        me = WorkerIdentity(facts.name, facts.datacenter, facts.worker, facts.plan, kind, memory_bytes, facts.security)
        self.open(me, device, facts.host, trains=True)

    def open(self, me: WorkerIdentity, device: SharedDevice, host: str = "127.0.0.1", *, trains: bool = False) -> None:
        """Reserves memory, and joins a service that is there already, before training starts."""
        # A restarted worker is another node: unfinished transfers of the old one are dropped.
        name = f"{me.datacenter}/{me.name}.{os.getpid()}.{secrets.token_hex(4)}"
        self._transport = Endpoint(name, (host, 0), security=me.security, settings=STREAMS)
        self._me, self._device, self._trains = me, device, trains
        self._kv_server = _listening(self._parts, me, host)
        if me.memory_bytes:
            self._arena = Arena(me.memory_bytes, WORKSPACE_BYTES, device.place)
        self._join()
        threading.Thread(target=self._keep_joined, daemon=True, name="bubbletea join").start()

    def fill(self, position: Position, arrived: Callable[[], bool], began_ns: int | None = None) -> None:
        """`began_ns`: when the wait began; None: now."""
        with self._using:
            if self._is_joined and self._filling is not None:
                self._filling.fill(position, arrived, began_ns)

    def waited(self, position: Position, began_ns: int, ended_ns: int) -> None:
        link, filling, filled_ns = self._link, self._filling, 0
        if filling is None:
            self._guard.observe(position.index, began_ns, ended_ns)
        else:
            filled_ns = filling.over(position, began_ns, ended_ns)
        if link is not None:
            link.waited(position.step, position.index, began_ns, ended_ns, filled_ns)

    def ran(self, position: Position, span: Span) -> None:
        if self._filling is not None and self._filling.throttle is not None:
            self._filling.throttle.ran(position.step, position.index, span.end_ns - span.start_ns)

    def close(self) -> None:
        self._closed.set()
        if self._link is not None:
            self._link.report()
            self._link.close()
        if self._kv_server is not None:
            self._kv_server.close()
        if self._transport is not None:
            self._transport.close(0.0)

    # ---- the thread that joins -----------------------------------------------------------------------------------
    def _keep_joined(self) -> None:
        while not self._closed.is_set():
            link = self._link
            if link is not None:
                link.lost.wait()
                self._leave()
            self._closed.wait(AGAIN_S if self._join() or not self._said else REFUSED_S)

    def _join(self) -> bool:
        """One attempt. Whatever goes wrong, training continues."""
        try:
            place = find(self.settings, self._me.datacenter)
            if place is None:
                return False
            assert self._transport is not None
            server = self._kv_server
            parts = () if server is None else (*server.address, server.server.context is not None)
            link = join(place, self._me, [self._transport.name, *self._transport.address], parts)
        except (OSError, ClosedError):
            return False  # it has ended, or is about to listen
        except TokenRefused as error:
            assert place is not None
            if place == self._refused:
                self._say(f"cannot join the service of {self._me.datacenter} at {place.address}: {error}")
            self._refused = place  # at first it may be a new service that is about to write its file
            return False
        except Exception as error:
            self._say(f"cannot join the service of {self._me.datacenter}: {error}")
            return False
        try:
            order = WorkerOrder.from_json(link.order)
            engine = self._take(order, link)
            link.parts = self._parts
            if self._kv_server is not None:
                self._kv_server.server.token = place.token
                self._kv_server.server.nixl_unencrypted = order.nixl_unencrypted
            with self._using:
                self._is_joined, self._link, self._said = True, link, ""
            link.serve(engine, self._set_share)
        except Exception as error:
            link.close()
            self._say(f"cannot load the model of the service of {self._me.datacenter}: {error!r}")
            return False
        return True

    def _leave(self) -> None:
        with self._using:
            self._is_joined, self._link = False, None
            self._parts.lose_service()
            if self._filling is not None:
                self._filling.engine.cancel_all()

    def _take(self, order: WorkerOrder, link: ServiceLink) -> PrefillEngine:
        """What an order asks for; the model is loaded only if it is another one than before."""
        while self._filling is not None and self._filling.is_busy and not self._closed.wait(SETTLE_S):
            pass  # pieces of the earlier service, which end in the worker's next waits
        engine, self._filling = None if self._filling is None else self._filling.engine, None
        if engine is None or self._order is None or order.part != self._order.part:
            engine = self._load(order, link)
        engine.outlet, self._order, self._parts.budget_bytes = link, order, order.keep_bytes
        self._guard.expect(order.risk, order.waits_ns)
        paced_ns = None if order.pace is None else order.paced_ns
        throttle = None
        if self._trains:
            # A restarted training does not keep admitted requests waiting for three iterations without prefill.
            throttle = Throttle(order.budget, order.sensitivity, 0 if link.has_baseline else ALONE_FIRST)
        self._filling = WaitFilling(engine, self._guard, self._device, order.margin_ns, paced_ns, throttle)
        return engine

    def _load(self, order: WorkerOrder, link: ServiceLink) -> PrefillEngine:
        self._order = None
        place, arena = self._device.place, self._arena
        if arena is None:
            arena = Arena(order.arena_bytes, order.workspace_bytes, place)
        elif order.arena_bytes > arena.num_bytes or order.workspace_bytes > arena.workspace_bytes:
            reserved = f"{arena.num_bytes / MIB:.0f} MiB and {arena.workspace_bytes / MIB:.0f} MiB of workspace"
            raise WorkerError(
                f"the service needs {order.arena_bytes / MIB:.0f} MiB and {order.workspace_bytes / MIB:.0f} MiB of "
                f"workspace, and this worker has reserved {reserved}. Train with a larger --filler-mib, or serve with "
                "a smaller --arena-mib"
            )
        arena.clear()
        pace = PieceTimes(order.served.config)
        with _own_stream(place):
            shard = ModelShard(order.served, order.served.cuts(order.layers_per_stage)[order.stage], arena)
            warm_up(shard, pace, order.chunk)
        return PrefillEngine(shard, link, self._transport, self._reach, pace, order.chunk)

    def _say(self, text: str) -> None:
        """Once, not at every attempt."""
        if text != self._said and not self._closed.is_set():
            self._said = text
            log.warning("BubbleTea on %s: %s. Training continues without it", self._me.name, text)

    def _set_share(self, share: float) -> None:
        if self._filling is not None:
            self._filling.share = share

    def _reach(self, name: str, host: str, port: int) -> None:
        assert self._transport is not None
        self._transport.open(name, LANE, (host, port))


def _listening(parts: KeptParts, me: WorkerIdentity, host: str) -> KvServerThread | None:
    """On this worker's address with its certificate; without one on loopback, or not at all."""
    context = None if me.security.credentials is None else me.security.server_context
    if context is None and not is_loopback(host):
        return None
    return KvServerThread(KvServer(parts, secrets.token_hex(32), context), host)


def _own_stream(place: str) -> AbstractContextManager[object]:
    """Loading does not wait for what training has queued."""
    device = torch.device(place)
    if device.type != "cuda":
        return nullcontext()
    return torch.cuda.stream(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]
