"""The workers of all sites as one fleet: orders go out and answers come in through the sites' channels. Whatever
happens to a worker, or to a site, ends the life of all and is told as one error.

Sites answer under their node's name (`west/site0`), workers under their own (`p0.s1`). Knows messages, not training.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from atlas.errors import WorkerError
from atlas.launch.control_channel import Message
from atlas.launch.rendezvous import JoinedAgent, Rendezvous
from atlas.launch.worker_processes import WorkerGroup, WorkerMessage

LOOK_S = 0.1


class RemoteWorkers(WorkerGroup):
    """One life's. `with Spread(...)`: leaving the block tells every site to end its workers."""

    def __init__(
        self,
        epoch: int,
        rendezvous: Rendezvous,
        guests: Sequence[JoinedAgent],
        home: Mapping[str, JoinedAgent],
        grace_s: float,
    ) -> None:
        super().__init__(list(home))
        self.epoch, self.grace_s = epoch, grace_s
        self._rendezvous, self._home = rendezvous, dict(home)
        self._guests = {guest.name.node: guest for guest in guests}
        self._deaths: dict[str, str] = {}
        self._ended = threading.Event()
        self._threads = [
            threading.Thread(target=self._listen, args=(guest,), daemon=True, name=f"ear for {guest.name}")
            for guest in guests
        ]
        for thread in self._threads:
            thread.start()

    @property
    def sites(self) -> list[str]:
        return list(self._guests)

    def site_of(self, name: str) -> str:
        """Where a worker runs."""
        return self._home[name].name.node

    def order(self, site: str, message: Message) -> None:
        """To the launcher itself."""
        self._guests[site].channel.send({"epoch": self.epoch, **message})

    def order_all(self, message: Message) -> None:
        for site in self._guests:
            self.order(site, message)

    def tell(self, name: str, message: Message) -> None:
        self._home[name].channel.send({"epoch": self.epoch, "tell": name, "message": message})

    def how_it_died(self, name: str) -> str:
        return self._deaths.get(name, "ended without a word")

    def title(self, name: str) -> str:
        if name in self._guests:
            return f"datacenter {self._guests[name].name}"
        return f"worker {name} in {self._home[name].name.datacenter}"

    def _next(self, timeout_s: float, missing: Callable[[], str]) -> WorkerMessage:
        said = super()._next(timeout_s, missing)
        if said.message is not None and "interrupt" in said.message:
            raise KeyboardInterrupt
        return said

    def close(self) -> None:
        for site in self._guests:
            try:
                self.order(site, {"end": True})
            except WorkerError:  # it has been away for long; the next life is another
                continue
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def __enter__(self) -> RemoteWorkers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _listen(self, guest: JoinedAgent) -> None:
        """Passes on what a site says, until it has been away for too long, or another of its name has come."""
        node = guest.name.node
        while not self._ended.is_set():
            try:
                self._hear(guest, guest.channel.inbox.get(timeout=LOOK_S))
                continue
            except queue.Empty:
                pass
            except Exception as error:  # on a thread: who waits for this site must hear of it
                self._put(node, {"error": f"what its launcher says makes no sense: {error!r}"})
                return
            if self._rendezvous.guests.get((guest.name.datacenter, guest.name.part)) is not guest:
                self._put(node, {"error": "its launcher was started again"})
                return
            if not guest.channel.is_connected and time.monotonic() - guest.channel.gone_since > self.grace_s:
                self._put(node, {"error": f"its launcher has been out of reach for {self.grace_s:g} s"})
                return

    def _hear(self, guest: JoinedAgent, message: Message) -> None:
        if "interrupt" in message or "failed" in message:
            self._put(guest.name.node, {"error": message["failed"]} if "failed" in message else message)
        elif message.get("epoch") != self.epoch:
            return  # of an earlier life
        elif "said" in message:
            name = str(message["said"])
            if message["message"] is None:
                self._deaths[name] = str(message.get("how", ""))
            self._put(name, message["message"])
        else:
            self._put(guest.name.node, message)

    def _put(self, name: str, message: dict[str, Any] | None) -> None:
        self._said.put(WorkerMessage(name, message, time.monotonic_ns()))
