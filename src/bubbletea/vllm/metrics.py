"""The connector's counters in vLLM's format: sent from the workers to the server's /metrics and log."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

COUNTS = {
    "loads": "Hand-offs whose keys and values were written into the cache",
    "failures": "Hand-offs that could not be loaded and were recomputed",
    "tokens": "Tokens whose keys and values were written into the cache instead of being computed",
    "bytes": "Bytes of keys and values received",
}
"""Exported as `bubbletea:handoff_<name>_total`."""


class LoadCounts(KVConnectorStats):  # type: ignore[misc]
    """Counts since the last report."""

    def reset(self) -> None:
        self.data = dict.fromkeys(COUNTS, 0)

    def add(self, **more: int) -> None:
        self.data = {name: self.data.get(name, 0) + more.get(name, 0) for name in COUNTS}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        self.add(**other.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        return dict(self.data)

    def is_empty(self) -> bool:
        return not any(self.data.values())


class ConnectorMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._counters = {name: self._make(name, text) for name, text in COUNTS.items()}

    def _make(self, name: str, text: str) -> dict[int, Any]:
        counter = self._counter_cls(name=f"bubbletea:handoff_{name}", documentation=text, labelnames=self._labelnames)
        return {engine: counter.labels(*values) for engine, values in self.per_engine_labelvalues.items()}

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, counters in self._counters.items():
            counters[engine_idx].inc(transfer_stats_data.get(name, 0))
