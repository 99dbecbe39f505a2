"""The record of a run, `run.json` in its folder of logs: attempts, why each ended, hosts, checkpoints, goodput. Written
by the launcher that coordinates, for people and scripts; nothing reads it back but the next start of the run.

Knows a folder and numbers; does not know agents.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from atlas.launch.run_monitor import RunMonitor

log = logging.getLogger("atlas.launch")
FILE = "run.json"


class RunRecord:
    """Without a folder nothing is recorded."""

    def __init__(self, folder: Path | None, facts: Mapping[str, Any], clock: Callable[[], float] = time.time) -> None:
        self._file, self._clock = folder / FILE if folder is not None else None, clock
        self._began, self._before_s = clock(), 0.0
        self.data: dict[str, Any] = {**facts, "attempts": []}
        if self._file is not None:
            try:
                old = json.loads(self._file.read_text())
                self.data["attempts"], self._before_s = list(old["attempts"]), float(old["wall_s"])
            except (OSError, ValueError, KeyError, TypeError):
                pass  # the first start, or a file that someone has changed

    @contextmanager
    def attempt(
        self,
        number: int,
        hosts: Mapping[str, Sequence[str]],
        monitor: RunMonitor,
        machines: Mapping[str, str] | None = None,
    ) -> Iterator[None]:
        """Record an attempt from its first step to its end, whatever ends it. `hosts`: workers, by launcher.
        `machines`: host names, by launcher."""
        entry: dict[str, Any] = {
            "attempt": number,
            "began": round(self._clock(), 3),
            "hosts": dict(hosts),
            "machines": dict(machines or {}),
            "first_step": monitor.first_step,
        }
        self.data["attempts"].append(entry)
        self._write()
        reason = ""
        try:
            yield
        except BaseException as error:
            reason = str(error).partition("\n")[0] or type(error).__name__
            raise
        finally:
            entry.update(
                ended=round(self._clock(), 3),
                last_step=monitor.num_done,
                checkpoints=monitor.saved_steps,
                reason=reason or ("done" if monitor.num_done >= self.data.get("steps", 0) else "stopped"),
            )
            self._write()

    def _write(self) -> None:
        if self._file is None:
            return
        wall_s = self._before_s + self._clock() - self._began
        ended = [entry for entry in self.data["attempts"] if "last_step" in entry]
        kept = max((entry["last_step"] for entry in ended), default=0)
        kept -= min((entry["first_step"] for entry in self.data["attempts"]), default=0)
        done = sum(entry["last_step"] - entry["first_step"] for entry in ended)
        self.data.update(
            wall_s=round(wall_s, 3),
            steps_kept=max(0, kept),
            steps_done=done,
            goodput_steps_per_s=round(max(0, kept) / wall_s, 6) if wall_s > 0 else 0.0,
        )
        new = self._file.with_suffix(".new")
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            new.write_text(json.dumps(self.data, indent=1) + "\n")
            new.replace(self._file)
        except OSError as error:
            log.warning("%s: %s. The run continues without its record", self._file, error.strerror)
            self._file = None
