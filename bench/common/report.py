"""The output of every bench: one JSON line per figure, and a table at the end.

Exit status of a bench: 0 if every bar holds, 1 if a bar is missed, 77 if nothing could be measured.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

OK, MISSED, NOT_MEASURED = 0, 1, 77


def not_measured(name: str, reason: str) -> int:
    """Report that a bench has nothing to measure here; its exit status."""
    print(json.dumps({"name": name, "skipped": reason, "ok": None}), flush=True)
    return NOT_MEASURED


@dataclass
class Report:
    """Collects figures; `finish()` prints the table and gives the exit status."""

    title: str
    compared_with: str
    rows: list[dict[str, Any]] = field(default_factory=list)

    def figure(
        self, name: str, value: float, unit: str, *, at_most: float | None = None, at_least: float | None = None
    ) -> bool:
        """Report one figure and check its bar, if it has one."""
        held = (at_most is None or value <= at_most) and (at_least is None or value >= at_least)
        limit = at_most if at_most is not None else at_least
        bar = "" if limit is None else ("<= " if at_most is not None else ">= ") + f"{limit:g}"
        self._add({"name": name, "value": round(value, 6), "unit": unit, "bar": bar, "ok": held if bar else None})
        return held

    def void(self, name: str, reason: str) -> None:
        """A figure that could not be measured here. It neither holds its bar nor misses it."""
        self._add({"name": name, "skipped": reason, "ok": None})

    def _add(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        print(json.dumps(row), flush=True)

    def finish(self) -> int:
        width = max((len(row["name"]) for row in self.rows), default=0)
        print(f"\n{self.title}\n  compared with: {self.compared_with}")
        for row in self.rows:
            print(f"  {row['name']:<{width}}  {shown(row)}")
        return status(self.rows)


def shown(row: dict[str, Any]) -> str:
    """A figure, its bar and the verdict, as text."""
    if "skipped" in row:
        return f"not measured: {row['skipped']}"
    verdict = {True: "ok", False: "MISSED", None: ""}[row["ok"]]
    return f"{row['value']:>12.4g} {row['unit']:<8} {row['bar']:<10} {verdict}".rstrip()


def status(rows: list[dict[str, Any]]) -> int:
    """The exit status for these rows."""
    if any(row["ok"] is False for row in rows):
        return MISSED
    return OK if any("value" in row for row in rows) else NOT_MEASURED
