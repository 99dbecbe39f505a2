"""The folder of a run (`runs/NAME`): where its timeline, its plan and its step log are. Reads names, not contents."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from atlas.errors import AtlasError
from atlas.spec.document import read_json

TIMELINES = ("run.timeline", "timeline", "timeline.jsonl")
PLANS = ("plan.yaml", "job.yaml")
LOGS = ("run.jsonl", "steps.jsonl", "log.jsonl")
RECORD = "run.json"


@dataclass(frozen=True)
class RunFiles:
    """What was found of a run."""

    timeline: Path | None
    job: Path | None = None
    log: Path | None = None
    record: dict[str, Any] = field(default_factory=dict)
    """`run.json`, if there is one: attempts, reasons, hosts, checkpoints, goodput."""

    def require_timeline(self, source: Path) -> Path:
        """Raise AtlasError where the run left none."""
        if self.timeline is None:
            raise AtlasError(
                f"{source}: has no timeline ({', '.join(TIMELINES)}). Train with --timeline FILE, a file in this folder"
            )
        return self.timeline

    @property
    def command(self) -> list[str]:
        words = self.record.get("command")
        return [str(word) for word in words] if isinstance(words, list) else []


def find_run(source: Path) -> RunFiles:
    """A timeline file, or the folder of a run with one in it."""
    if source.is_file():
        return RunFiles(source)
    if not source.is_dir():
        raise AtlasError(f"{source}: there is no such file or folder. Check the path")
    record = _record(source / RECORD)
    timeline = _first(source, TIMELINES, "*.timeline")
    if timeline is None and not record:
        raise AtlasError(
            f"{source}: has neither {RECORD} nor a timeline ({', '.join(TIMELINES)}): not the folder of a run. "
            "Name another folder, or a timeline file"
        )
    return RunFiles(timeline, _first(source, PLANS), _first(source, LOGS, "*.jsonl"), record)


def _first(folder: Path, names: tuple[str, ...], pattern: str = "") -> Path | None:
    """The first of these files, in the folder or one or two levels below it."""
    for level in ("", "*/", "*/*/"):
        for name in (*names, *([pattern] if pattern else [])):
            found = sorted(path for path in folder.glob(f"{level}{name}") if path.is_file())
            if found:
                return found[-1]
    return None


def _record(path: Path) -> dict[str, Any]:
    data = read_json(path, key="record of a run") if path.is_file() else {}
    return data if isinstance(data, dict) else {}
