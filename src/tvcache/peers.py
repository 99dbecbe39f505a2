"""Other sites: each server reads the others' logs in the background and adopts what is new. Snapshots stay where they
are. A call never waits for this: it runs in threads of its own, and adopts a few records at a time.
"""

from __future__ import annotations

import asyncio
import http.client
import logging
import threading
from collections.abc import Sequence
from urllib.parse import quote

from tvcache.endpoint import HttpEndpoint, is_loopback
from tvcache.errors import ArgumentsError, TvcacheError
from tvcache.log import LogStore, unframed

LOG = logging.getLogger("tvcache")
WAIT_S = 15.0
RETRY_S = 1.0
BATCH = 32
"""Records adopted before requests are served again."""


class Peers:
    def __init__(self, endpoints: Sequence[HttpEndpoint]) -> None:
        for one in endpoints:
            if not one.tls and not is_loopback(one.host):
                raise TvcacheError(f"{one.url}: sites need https. Give https://, and --ca, --cert and --key")
        self.endpoints = list(endpoints)
        self.down: set[str] = set()
        self._stopping = threading.Event()

    @property
    def num_down(self) -> int:
        return len(self.down)

    def start(self, loop: asyncio.AbstractEventLoop, log: LogStore, grown: asyncio.Event) -> None:
        for one in self.endpoints:
            reader = _Reader(one, loop, log, grown, self)
            threading.Thread(target=reader.run, name=f"tvcache-peer {one.url}", daemon=True).start()

    def stop(self) -> None:
        self._stopping.set()

    def stopping(self, seconds: float = 0.0) -> bool:
        return self._stopping.wait(seconds)


class _Reader:
    def __init__(
        self, endpoint: HttpEndpoint, loop: asyncio.AbstractEventLoop, log: LogStore, grown: asyncio.Event, peers: Peers
    ) -> None:
        self.endpoint, self.loop, self.log, self.grown, self.peers = endpoint, loop, log, grown, peers
        self.log_id, self.after = log.cursors.get(endpoint.url, ("", 0))

    def run(self) -> None:
        while not self.peers.stopping():
            try:
                self._read()
            except (OSError, http.client.HTTPException, ValueError, TvcacheError) as error:
                if self.endpoint.url not in self.peers.down:
                    self.peers.down.add(self.endpoint.url)
                    LOG.warning("tvcache: site %s does not answer (%s): trying again", self.endpoint.url, error)
                self.peers.stopping(RETRY_S)
            else:
                if self.endpoint.url in self.peers.down:
                    self.peers.down.discard(self.endpoint.url)
                    LOG.warning("tvcache: site %s answers again", self.endpoint.url)
        self.endpoint.close()

    def _read(self) -> None:
        path = f"/v1/log?after={self.after}&log={quote(self.log_id)}&wait_s={WAIT_S:g}"
        status, headers, data = self.endpoint.request("GET", path, None, WAIT_S + 10.0)
        if status != 200:
            raise TvcacheError(f"it answered {status}: {data[:200].decode(errors='replace')}")
        log_id, after = headers.get("x-tvcache-log", ""), int(headers.get("x-tvcache-next", "0"))
        lines = data.splitlines(keepends=True)
        new = False
        for begin in range(0, len(lines), BATCH):
            adopting = asyncio.run_coroutine_threadsafe(self._adopt(lines[begin : begin + BATCH]), self.loop)
            new = adopting.result(60) or new
        if new:  # otherwise two sites would write positions for each other forever
            self.loop.call_soon_threadsafe(self.log.remember, self.endpoint.url, log_id, after)
        self.log_id, self.after = log_id, after

    async def _adopt(self, lines: list[bytes]) -> bool:
        new = False
        for line in lines:
            record = unframed(line)
            try:
                new = (record is not None and self.log.adopt(record)) or new
            except ArgumentsError as error:
                LOG.warning("tvcache: site %s sent an invalid record (%s): left out", self.endpoint.url, error)
        if new:
            self.grown.set()
        return new
