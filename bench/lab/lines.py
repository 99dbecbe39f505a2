"""Lines of a bench: a JSON object each, and a table at the end."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from common.report import shown, status

from atlas.errors import AtlasError


class Lines:
    """Collects what was measured against what was promised."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def add(self, name: str, value: float, unit: str, bar: str, ok: bool | None, **more: Any) -> None:
        """`ok` None: reported, not promised."""
        row = {"name": name, "value": round(value, 3), "unit": unit, "bar": bar, "ok": ok, **more}
        self.rows.append(row)
        print(json.dumps(row), flush=True)

    def at_least(self, name: str, value: float, unit: str, bar: float, **more: Any) -> None:
        self.add(name, value, unit, f">= {bar:g}", value >= bar, **more)

    def at_most(self, name: str, value: float, unit: str, bar: float, **more: Any) -> None:
        self.add(name, value, unit, f"<= {bar:g}", value <= bar, **more)

    def skip(self, name: str, reason: str, ok: bool | None = None) -> None:
        row = {"name": name, "skipped": reason, "ok": ok}
        self.rows.append(row)
        print(json.dumps(row), flush=True)

    def attempt(self, name: str, measure: Callable[[], None], tries: int = 3) -> None:
        """A measurement in which the emulator was late does not count: it is made again."""
        for left in reversed(range(tries)):
            kept = len(self.rows)
            try:
                measure()
                return
            except AtlasError as error:
                del self.rows[kept:]
                if not left:
                    self.skip(name, f"void, not certified in {tries} tries: {error}", ok=False)

    def table(self) -> int:
        """Prints it; the exit code."""
        width = max((len(row["name"]) for row in self.rows), default=0)
        print()
        for row in self.rows:
            print(f"{row['name']:{width}}  {shown(row)}")
        return status(self.rows)
