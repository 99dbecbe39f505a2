"""Makes one trace for Perfetto (ui.perfetto.dev) of the Kineto traces of all workers: one process a worker and device,
on one clock. Knows the JSON of torch.profiler; loads no torch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from atlas.errors import AtlasError
from atlas.ir.replace import replacing

MERGED = "trace.json"
_IDS = 1 << 40
"""Flow ids of one worker; Kineto counts them from 1."""


def merge_traces(folder: Path) -> Path:
    """Merge `rank*_trace.json`. Raises AtlasError where there is none."""
    found = {int(match[1]): path for path in folder.glob("rank*_trace.json") if (match := _rank(path))}
    if not found:
        raise AtlasError(f"{folder}: no worker has written a trace. Name steps that the run reaches")
    events: list[dict[str, Any]] = []
    bases: dict[int, int] = {}
    for number, (rank, path) in enumerate(sorted(found.items())):
        data = json.loads(path.read_text(encoding="utf-8"))
        bases[rank] = int(data.get("baseTimeNanoseconds", 0))
        shift_us = (bases[rank] - next(iter(bases.values()))) / 1e3
        events += _renumbered(data["traceEvents"], number, f"rank {rank}", shift_us)
    with replacing(folder / MERGED) as file:
        file.write(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}).encode())
    return folder / MERGED


def _rank(path: Path) -> re.Match[str] | None:
    return re.fullmatch(r"rank(\d+)_trace", path.stem)


def _renumbered(events: Sequence[dict[str, Any]], number: int, name: str, shift_us: float) -> list[dict[str, Any]]:
    """The events of one worker with processes and flows of their own."""
    processes: dict[Any, int] = {}
    out = []
    for event in events:
        event = dict(event)
        if "pid" in event:
            event["pid"] = number * 1000 + processes.setdefault(event["pid"], len(processes) + 1)
        if "ts" in event:
            event["ts"] += shift_us
        if isinstance(event.get("id"), int):
            event["id"] += number * _IDS
        if event.get("name") == "process_name":
            event["args"] = {"name": f"{name}: {event['args']['name']}"}
        out.append(event)
    return out
