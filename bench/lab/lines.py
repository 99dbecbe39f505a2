"""Lines of a bench of the transport: a JSON object each, a table at the end, and runs that do not count repeated."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from common.host import Others
from common.report import shown, status

from atlas.wan.emulator.lateness import EmulatorLateError

TRIES = 3
OTHERS_CORES = 0.25


class HostBusyError(Exception):
    """Other processes used the cores that the nodes of a bench need."""


def require_quiet(others: Others) -> None:
    if (cores := others.cores) > OTHERS_CORES:
        raise HostBusyError(f"other processes used {cores:.2f} cores, {OTHERS_CORES:g} allowed. Stop them")


class Lines:
    """Collects figures and their bars."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def add(self, name: str, value: float, unit: str, bar: str, ok: bool | None, **more: Any) -> None:
        """`ok` None: reported without a bar."""
        row = {"name": name, "value": round(value, 3), "unit": unit, "bar": bar, "ok": ok, **more}
        self.rows.append(row)
        print(json.dumps(row), flush=True)

    def at_least(self, name: str, value: float, unit: str, bar: float, **more: Any) -> None:
        self.add(name, value, unit, f">= {bar:g}", value >= bar, **more)

    def at_most(self, name: str, value: float, unit: str, bar: float, **more: Any) -> None:
        self.add(name, value, unit, f"<= {bar:g}", value <= bar, **more)

    def skip(self, name: str, reason: str) -> None:
        """Not measured: neither ok nor missed."""
        row = {"name": name, "skipped": reason, "ok": None}
        self.rows.append(row)
        print(json.dumps(row), flush=True)

    def attempt(self, name: str, measure: Callable[[], None], *prints: str, tries: int = TRIES) -> bool:
        """Repeat a run in which the emulator was late or the host busy, at most `tries` times; then it is void, and so
        are the lines that it `prints` (those of docs/claims.md are named). Any other failure ends the bench. True if it
        was measured."""
        for left in reversed(range(tries)):
            try:
                measure()
                return True
            except (EmulatorLateError, HostBusyError) as error:
                print(f"# {name}: {error}", flush=True)
                if not left:
                    for line in prints or (name,):
                        self.skip(line, f"void in {tries} of {tries} tries: {error}")
        return False

    def table(self) -> int:
        """Print the table; the exit status (see `common.report`)."""
        width = max((len(row["name"]) for row in self.rows), default=0)
        print()
        for row in self.rows:
            print(f"{row['name']:{width}}  {shown(row)}")
        return status(self.rows)
