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
from tvcache.errors import ArgumentsError, TvcacheError, words_of
from tvcache.log import LogStore, unframed

LOG = logging.getLogger("tvcache")
WAIT_S, TIMEOUT_S = 15.0, 25.0
"""How long another site may wait for new records before it answers, and until it counts as down."""
RETRY_S = 1.0
"""Between two requests to a site that is down."""
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

    def start(self, loop: asyncio.AbstractEventLoop, log: LogStore, grown: asyncio.Event) -> None:
        self._loop, self._log, self._grown = loop, log, grown
        for one in self.endpoints:
            threading.Thread(target=self._follow, args=(one,), name=f"tvcache-peer {one.url}", daemon=True).start()

    def stop(self) -> None:
        self._stopping.set()

    def _follow(self, endpoint: HttpEndpoint) -> None:
        """Reads the log of one site until `stop`."""
        position = self._log.cursors.get(endpoint.url, ("", 0))
        while not self._stopping.is_set():
            try:
                position = self._read(endpoint, *position)
            except (OSError, http.client.HTTPException, ValueError, TvcacheError) as error:
                if endpoint.url not in self.down:
                    self.down.add(endpoint.url)
                    LOG.warning("tvcache: site %s cannot be read (%s): trying again", endpoint.url, words_of(error))
                self._stopping.wait(RETRY_S)
            else:
                if endpoint.url in self.down:
                    self.down.discard(endpoint.url)
                    LOG.warning("tvcache: site %s is read again", endpoint.url)
        endpoint.close()

    def _read(self, endpoint: HttpEndpoint, log_id: str, after: int) -> tuple[str, int]:
        """Adopts what is new; the id of the other log, and how far it was read."""
        path = f"/v1/log?after={after}&log={quote(log_id)}&wait_s={WAIT_S:g}"
        status, headers, data = endpoint.request("GET", path, None, TIMEOUT_S)
        if status != 200:
            raise TvcacheError(f"it answered {status}: {data[:200].decode(errors='replace')}")
        log_id, after = headers.get("x-tvcache-log", ""), int(headers.get("x-tvcache-next", "0"))
        lines = data.splitlines(keepends=True)
        new = False
        for begin in range(0, len(lines), BATCH):
            adopted = self._adopt(endpoint, lines[begin : begin + BATCH])
            new = asyncio.run_coroutine_threadsafe(adopted, self._loop).result(60) or new
        if new:  # otherwise two sites would write positions for each other forever
            self._loop.call_soon_threadsafe(self._log.remember, endpoint.url, log_id, after)
        return log_id, after

    async def _adopt(self, endpoint: HttpEndpoint, lines: list[bytes]) -> bool:
        new = False
        for line in lines:
            record = unframed(line)
            try:
                new = (record is not None and self._log.adopt(record)) or new
            except ArgumentsError as error:
                LOG.warning("tvcache: site %s sent an invalid record (%s), which is skipped", endpoint.url, error)
        if new:
            self._grown.set()
        return new
