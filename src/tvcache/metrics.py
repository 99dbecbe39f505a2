"""The Prometheus metrics of `/metrics`, with one registry per server."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

if TYPE_CHECKING:
    from tvcache.server import CacheServer

SECONDS = (0.0002, 0.0005, 0.001, 0.002, 0.003, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1, 5, 25)
"""Upper bounds of the histogram's buckets: from a hit to a call that waits for another one."""


class CacheMetrics:
    def __init__(self, server: CacheServer) -> None:
        self.registry = registry = CollectorRegistry()
        self.hits = Counter("tvcache_hits", "Calls answered from the cache", registry=registry)
        self.misses = Counter("tvcache_misses", "Calls that a client executed", registry=registry)
        self.stores = Counter("tvcache_stores", "Values stored by clients", registry=registry)
        self.saved_s = Counter("tvcache_saved_seconds", "Tool seconds that hits saved", registry=registry)
        self.differences = Counter(
            "tvcache_differences", "Values that differed when executed again", ["tool"], registry=registry
        )
        self.requests = Histogram(
            "tvcache_request_seconds", "Time of requests, including waits for calls of other clients", ["path"],
            registry=registry, buckets=SECONDS,
        )  # fmt: skip
        log = server.log
        self._gauge("tvcache_values", "Values stored", lambda: len(log))
        self._gauge("tvcache_log_bytes", "Size of the log", lambda: log.end)
        self._gauge("tvcache_damaged", "Damaged records of the log, which are skipped", lambda: log.damaged)
        self._gauge("tvcache_flights", "Calls being executed", lambda: len(server.flights))
        self._gauge(
            "tvcache_conflicts", "Values that arrived twice and differed: the first was kept", lambda: log.conflicts
        )
        self._gauge("tvcache_merged", "Values that came from other sites", lambda: log.merged)
        self._gauge("tvcache_peers_down", "Other sites whose values cannot be read", lambda: len(server.peers.down))

    def _gauge(self, name: str, text: str, value: object) -> None:
        Gauge(name, text, registry=self.registry).set_function(value)  # type: ignore[arg-type]
