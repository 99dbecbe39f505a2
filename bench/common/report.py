"""What every benchmark prints: one JSON line a figure, and a table for people at the end."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field


@dataclass
class Report:
    """Collects figures; `finish()` prints the table and gives the exit status."""

    title: str
    compared_with: str
    rows: list[tuple[str, float, str, str, bool]] = field(default_factory=list)

    def figure(
        self, name: str, value: float, unit: str, *, at_most: float | None = None, at_least: float | None = None
    ) -> bool:
        """One figure against its bar; without a bar it is only reported."""
        ok = (at_most is None or value <= at_most) and (at_least is None or value >= at_least)
        bar = at_most if at_most is not None else at_least
        line = {"name": name, "value": round(value, 6), "unit": unit, "bar": bar, "ok": ok}
        print(json.dumps(line), flush=True)
        sign = "" if bar is None else ("<= " if at_most is not None else ">= ") + f"{bar:g}"
        self.rows.append((name, value, unit, sign, ok))
        return ok

    def finish(self) -> int:
        width = max(len(row[0]) for row in self.rows)
        print(f"\n{self.title}\n  compared with: {self.compared_with}")
        for name, value, unit, bar, ok in self.rows:
            verdict = "" if not bar else ("ok" if ok else "MISSED")
            print(f"  {name:<{width}}  {value:>12.4g} {unit:<8} {bar:<10} {verdict}")
        sys.stdout.flush()
        return 0 if all(row[4] for row in self.rows) else 1
