"""The server: values and leases over HTTP, JSON in and out. Every value is in the log before it is acknowledged.

One event loop owns the log; nothing here waits for a disk other than by writing, and nothing waits for another site.
Without a token it accepts only requests whose Host is this machine, which protects against requests from web pages.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from prometheus_client import generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from tvcache import messages
from tvcache.errors import ArgumentsError
from tvcache.fast_http import Headers, protocol
from tvcache.keys import parse
from tvcache.leases import CallLease, CallLeases
from tvcache.log import LogStore
from tvcache.metrics import CacheMetrics
from tvcache.peers import Peers
from tvcache.show import page, summary
from tvcache.stores import Ask

LOG = logging.getLogger("tvcache")
MAX_BODY_BYTES = 24 << 20
"""Of a request: a value of the largest size (`values.MAX_VALUE_BYTES`), in JSON."""
FLUSH_S = 2.0
"""Between two writes of the hit counts to the log."""
Do = Callable[[Any], dict[str, Any] | Awaitable[dict[str, Any]]]
LOCAL_HOSTS = ("localhost", "127.0.0.1", "[::1]")


class CacheServer:
    def __init__(self, log: LogStore, token: str = "", lease_s: float = 10.0, peers: Peers | None = None) -> None:
        """`lease_s`: a client that executes a call renews its lease before this ends, or others stop waiting."""
        self.log, self.token, self.lease_s = log, token, lease_s
        self.peers = peers or Peers([])
        self.flights = CallLeases(lease_s, first=secrets.randbits(48))
        self.metrics = CacheMetrics(self)
        self._posts: dict[str, Do] = {
            "/v1/begin": self.begin,
            "/v1/finish": self.finish,
            "/v1/renew": self.renew,
            "/v1/drop": self.drop,
        }
        self._waiting: dict[bytes, list[asyncio.Future[bool]]] = {}
        self._grown = asyncio.Event()

    def app(self) -> Starlette:
        gets: dict[str, Callable[[Request], Awaitable[Response]]] = {
            "/": self.show,
            "/v1/summary": self.summary,
            "/v1/log": self.since,
            "/metrics": self.measured,
            "/healthz": self.healthy,
        }
        routes = [Route(path, self._post(path, do), methods=["POST"]) for path, do in self._posts.items()]
        routes += [Route(path, self._guarded(do), methods=["GET"]) for path, do in gets.items()]
        return Starlette(routes=routes, lifespan=self._life)

    def protocol(self) -> type[H11Protocol]:
        """For uvicorn's `http`."""
        return protocol(self.answer, self._posts)

    async def begin(self, found: Any) -> dict[str, Any]:
        ask, now_s = messages.ask_of(found), time.monotonic()
        until_s = now_s + min(messages.number(found, "wait_s"), messages.MAX_WAIT_S)
        while True:
            begun = self._begin(ask, now_s)
            if isinstance(begun, dict):
                return begun
            if now_s >= until_s:
                return {"wait": True}
            if await self._woken(ask.key, min(begun, until_s) - now_s):
                return {"lease": 0, "lease_s": self.lease_s}
            now_s = time.monotonic()

    def _begin(self, ask: Ask, now_s: float) -> dict[str, Any] | float:
        """The response; or the expiry of another caller's lease for this call."""
        value = self.log.get(ask.key)
        if value is not None:
            self.metrics.hits.inc()
            self.metrics.saved_s.inc(value.seconds)
            return {"value": messages.valued(value)}
        asked = self.flights.ask(ask.key, now_s)
        if not isinstance(asked, CallLease):
            return asked
        self.metrics.misses.inc()
        return {"lease": asked.lease, "lease_s": self.lease_s}

    def answer(self, path: str, headers: Headers, body: bytes) -> bytes | None:
        """The short path (`fast_http`). None: invalid, or it has to wait; the usual path handles it."""
        began_s = time.perf_counter()
        if not headers.get(b"content-type", b"").startswith(b"application/json") or not self._allowed(
            headers.get(b"host", b"").decode("latin-1"), headers.get(b"authorization", b"").decode("latin-1")
        ):
            return None
        try:
            found = parse(body)
            if path == "/v1/begin":
                messages.number(found, "wait_s")
                made: Any = self._begin(messages.ask_of(found), time.monotonic())
            else:
                made = self._posts[path](found)
        except (ArgumentsError, OSError):
            return None
        if not isinstance(made, dict):
            return None
        self.metrics.requests.labels(path).observe(time.perf_counter() - began_s)
        return _encoded(made)

    def finish(self, found: Any) -> dict[str, Any]:
        ask, lease = messages.ask_of(found), messages.field(found, "lease", int)
        given = found.get("value")
        stored = None
        try:
            if given is not None:
                stored = self._put(ask, messages.value_of(given))
        finally:
            self.flights.end(lease)
            for one in self._waiting.pop(ask.key, ()):
                if not one.done():
                    one.set_result(ask.key not in self.log)
        return {"value": None if stored is None else messages.valued(stored)}

    def _put(self, ask: Ask, value: Any) -> Any:
        before = len(self.log)
        stored = self.log.put(ask, value)
        if len(self.log) > before:
            self.metrics.stores.inc()
            self._grown.set()
        return stored

    def renew(self, found: Any) -> dict[str, Any]:
        now_s = time.monotonic()
        leases = messages.field(found, "leases", list)
        return {"renewed": sum(self.flights.renew(lease, now_s) for lease in leases if isinstance(lease, int))}

    def drop(self, found: Any) -> dict[str, Any]:
        ask, tool = messages.ask_of(found), messages.field(found, "tool", str)
        count = self.log.drop(ask.state, tool, messages.field(found, "why", str))
        LOG.warning("tvcache: task %r: tool %r: %s; %d values dropped", ask.task.name, tool, found["why"], count)
        self.metrics.differences.labels(tool).inc()
        self._grown.set()
        return {"dropped": count}

    async def since(self, request: Request) -> Response:
        """Records of the log from an offset on; waits a while for new ones."""
        try:
            after, wait_s = int(request.query_params.get("after", 0)), float(request.query_params.get("wait_s", 0))
        except ValueError:
            return _error(400, "the query needs a whole number `after` and a number of seconds `wait_s`")
        if request.query_params.get("log") not in (None, "", self.log.log_id) or not 0 <= after <= self.log.end:
            after = 0  # another log, or a new one
        if after >= self.log.end and wait_s > 0:
            self._grown.clear()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._grown.wait(), min(wait_s, messages.MAX_WAIT_S))
        data, end = self.log.since(after)
        headers = {"x-tvcache-log": self.log.log_id, "x-tvcache-next": str(end)}
        return Response(data, media_type="text/plain", headers=headers)

    async def show(self, _: Request) -> Response:
        return HTMLResponse(page(await asyncio.to_thread(self._summary)))

    async def summary(self, _: Request) -> Response:
        return _json(await asyncio.to_thread(self._summary))

    async def measured(self, _: Request) -> Response:
        return Response(generate_latest(self.metrics.registry), media_type="text/plain; version=0.0.4")

    async def healthy(self, _: Request) -> Response:
        return _json({"values": len(self.log), "log": self.log.log_id})

    def _summary(self) -> dict[str, Any]:
        return summary(self.log.records(), self.log.num_dropped, self.log.path.name)

    async def _woken(self, key: bytes, seconds: float) -> bool:
        """Wait for the caller that executes the call; whether it failed."""
        one = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(key, []).append(one)
        try:
            return await asyncio.wait_for(one, seconds)
        except TimeoutError:
            return False
        finally:
            waiting = self._waiting.get(key)
            if waiting is not None and one in waiting:
                waiting.remove(one)
                if not waiting:
                    del self._waiting[key]

    @contextlib.asynccontextmanager
    async def _life(self, _: Starlette) -> AsyncIterator[None]:
        flushing = asyncio.create_task(self._flush())
        self.peers.start(asyncio.get_running_loop(), self.log, self._grown)
        try:
            yield
        finally:
            flushing.cancel()
            self.peers.stop()
            self.log.close()

    async def _flush(self) -> None:
        while True:
            await asyncio.sleep(FLUSH_S)
            self.flights.expire(time.monotonic())
            try:
                self.log.flush()
            except OSError as error:
                LOG.warning("tvcache: %s: hits are not counted (%s)", self.log.path, error)

    def _guarded(self, do: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            refused = self._refused(request)
            return refused if refused is not None else await do(request)

        return answer

    def _post(self, path: str, do: Do) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            if not request.headers.get("content-type", "").startswith("application/json"):
                return _error(415, "the body must be JSON: send it with content-type application/json")
            began_s = time.perf_counter()
            try:
                made = do(parse(await _body(request)))
                return _json(made if isinstance(made, dict) else await made)
            except ArgumentsError as error:
                return _error(400, str(error))
            except OSError as error:
                LOG.warning("tvcache: %s: not stored (%s)", self.log.path, error)
                return _error(507, f"not stored: {error.strerror or error}")
            finally:
                self.metrics.requests.labels(path).observe(time.perf_counter() - began_s)

        return self._guarded(answer)

    def _refused(self, request: Request) -> Response | None:
        if self._allowed(request.headers.get("host", ""), request.headers.get("authorization", "")):
            return None
        if self.token:
            return _error(401, "no token, or a wrong one: give this server's with --token-file or $TVCACHE_TOKEN")
        return _error(421, f"a server without a token answers only to {', '.join(LOCAL_HOSTS)}")

    def _allowed(self, host: str, authorization: str) -> bool:
        if self.token:
            kind, _, given = authorization.partition(" ")
            return hmac.compare_digest(given.strip().encode(), self.token.encode()) and kind.lower() == "bearer"
        name = host if host.endswith("]") else host.rpartition(":")[0] or host
        return name in LOCAL_HOSTS


async def _body(request: Request) -> bytes:
    parts, size = [], 0
    async for part in request.stream():
        parts.append(part)
        size += len(part)
        if size > MAX_BODY_BYTES:
            raise ArgumentsError(f"a request of more than {MAX_BODY_BYTES:,} bytes: outputs this large are not cached")
    return b"".join(parts)


def _json(found: dict[str, Any], status: int = 200) -> Response:
    return Response(_encoded(found), status, media_type="application/json")


def _encoded(found: dict[str, Any]) -> bytes:
    return json.dumps(found, ensure_ascii=False, separators=(",", ":")).encode()


def _error(status: int, message: str) -> Response:
    return _json({"error": message}, status)
