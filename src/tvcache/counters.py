"""The counters of a cache. Seconds saved are the tool's time when the value was made."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Counters:
    hits: int = 0
    misses: int = 0
    private: int = 0
    """Calls that bypassed the cache: volatile tools, and everything after a volatile mutation or a failure."""
    uncacheable: int = 0
    """Calls whose arguments have no canonical form."""
    audits: int = 0
    audits_skipped: int = 0
    """Chosen, but the queue was full or the environment could not be copied."""
    replayed: int = 0
    """Mutating calls executed again to reach a state."""
    saved_s: float = 0.0
    executed_s: float = 0.0
    replayed_s: float = 0.0
    differences: Counter[str] = field(default_factory=Counter)
    """By tool: another output when executed again, or a changed state although declared `reads`."""
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, **amounts: float) -> None:
        with self._lock:
            for name, amount in amounts.items():
                setattr(self, name, getattr(self, name) + amount)

    def differed(self, tool: str) -> None:
        with self._lock:
            self.differences[tool] += 1

    def figures(self) -> dict[str, Any]:
        """JSON-able."""
        with self._lock:
            found = {name: value for name, value in vars(self).items() if not name.startswith("_")}
        calls = self.hits + self.misses
        return found | {"differences": dict(self.differences), "hit_rate": self.hits / calls if calls else 0.0}
