"""The files of a run that the live page reads: what runs (`page.json`, `job.yaml`), steps, events, timelines, and the
record of attempts (`run.json`). Training writes them; `FolderFollower` reads what is new.

Knows names and formats. A line that is not complete yet is read later; one that is broken is skipped.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from atlas.errors import AtlasError
from atlas.evidence.run_folder import find_run
from atlas.ir.replace import write_whole
from atlas.ir.store import JournalTail, is_journal, json_record, load_timeline
from atlas.ir.timeline import Timeline
from atlas.spec import Job
from atlas.spec.plan import job_text, load_job_or_plan
from atlas.ui.live_run import LiveRun
from atlas.ui.run_model import MAX_ITERATIONS, shown_iterations

FACTS, JOB, STEPS, EVENTS, TIMELINE = "page.json", "job.yaml", "steps.jsonl", "events.jsonl", "timeline.jsonl"
"""Names in a run's folder."""
SERVICE = "service.json"
"""Of a service beside training, while it runs: `metrics` (its URL) and `cards` (see `ui.service`)."""
TIMELINE_BYTES = 256 << 20
"""A longer timeline file is emptied and written from its start: the page shows the last iterations only."""
MAX_READ_BYTES = 256 << 20
"""Of a file that are read at once."""


@dataclass(frozen=True)
class PageFacts:
    """What the page shows about a run before its first step."""

    name: str
    schedule: str = "1f1b"
    tcp: Literal["one", "many"] = "many"
    steps: int = 0
    """Of the whole run; 0: unknown."""
    slower: int = 1
    device: str = ""
    num_groups: int = 1
    """Groups of pipelines; `job.yaml` has one of them."""


def write_facts(folder: Path, facts: PageFacts, job: Job) -> None:
    """Begin the files of a run. Those of an earlier run in this folder are continued, as a resumed run does."""
    _make(folder)
    facts = replace(facts, num_groups=len(job.parts))
    write_whole(folder / FACTS, (json.dumps(asdict(facts), indent=1) + "\n").encode())
    write_whole(folder / JOB, job_text(job).encode())


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise AtlasError(f"{folder}: cannot be made: {error.strerror}. Choose another folder with --runs") from error


@contextmanager
def announced_service(folder: Path, service: Mapping[str, Any]) -> Iterator[None]:
    """Tell the page of the run about a service, until the block is left."""
    _make(folder)
    write_whole(folder / SERVICE, json.dumps(service).encode())
    try:
        yield
    finally:
        (folder / SERVICE).unlink(missing_ok=True)


def read_service(folder: Path) -> dict[str, Any]:
    """Empty where there is no service."""
    try:
        return json_record((folder / SERVICE).read_bytes())
    except OSError:
        return {}


def read_facts(folder: Path) -> PageFacts | None:
    try:
        data = json.loads((folder / FACTS).read_bytes())
        known = {one.name for one in fields(PageFacts)}
        return PageFacts(**{key: value for key, value in data.items() if key in known})
    except (OSError, ValueError, TypeError, AttributeError):
        return None


class _NewLines:
    """The new complete lines of a file that grows, or was emptied or replaced."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._at, self._rest, self._file_id = 0, b"", 0

    def lines(self) -> list[bytes]:
        try:
            with self.path.open("rb") as file:
                stat = os.fstat(file.fileno())
                if stat.st_size < self._at or stat.st_ino != self._file_id:
                    self._at, self._rest, self._file_id = 0, b"", stat.st_ino
                if stat.st_size == self._at:
                    return []
                file.seek(self._at)
                new = file.read(MAX_READ_BYTES)
        except OSError:
            return []
        self._at += len(new)
        whole = (self._rest + new).split(b"\n")
        self._rest = whole.pop()
        return whole


class FolderFollower:
    """Reads a run's folder, or a timeline file alone, into a LiveRun; `poll` reads what is new."""

    def __init__(self, source: Path, run: LiveRun) -> None:
        self.run = run
        found = find_run(source) if not (source / FACTS).is_file() else None
        folder = source if source.is_dir() else source.parent
        self._fixed: Timeline | None = None
        timeline = found.timeline if found is not None else folder / TIMELINE
        # With page.json beside it, training writes it: a file that is still empty is followed.
        if found is not None and timeline is not None and timeline.is_file() and not is_journal(timeline):
            self._fixed, timeline = load_timeline(timeline), None
        self._journal = JournalTail(timeline or folder / TIMELINE, last=MAX_ITERATIONS)
        self._timelines = _NewLines(timeline or folder / TIMELINE)
        log = found.log if found is not None and found.log is not None else folder / STEPS
        # Beside a timeline file that is given alone there may be files of another run.
        names = (log, folder / EVENTS, folder / "run.json") if source.is_dir() else [folder / "none"] * 3
        self._steps, self._events, self._record = _NewLines(names[0]), _NewLines(names[1]), names[2]
        self._record_time = 0
        self._begin(found.job if found is not None else folder / JOB, folder)

    def _begin(self, job_file: Path | None, folder: Path) -> None:
        job = load_job_or_plan(job_file)[0] if job_file is not None and job_file.is_file() else None
        facts = read_facts(folder)
        if facts is None:
            self.poll_timeline()
            timeline = self._fixed or self._journal.timeline(1)
            meta = timeline.meta if timeline is not None else {}
            facts = PageFacts(
                job.name if job is not None else str(meta.get("job", folder.name)),
                timeline.program.name if timeline is not None else "1f1b",
                "one" if meta.get("tcp") == "one" else "many",
            )
        self.run.begin(facts.name, asdict(facts), job)
        if self._fixed is not None:
            self.run.add(timeline=self._fixed)

    def poll(self) -> bool:
        """Whether there was something new."""
        steps = [event for line in self._steps.lines() if "step" in (event := json_record(line))]
        events = [event for line in self._events.lines() if "text" in (event := json_record(line))]
        last = self._journal.timeline(1) if self.poll_timeline() else None
        timeline = None if last is None else self._journal.timeline(shown_iterations(last.program))
        record = self._new_record()
        if not (steps or events or record or timeline is not None):
            return False
        self.run.add(steps, events, timeline, last, record)
        return True

    def poll_timeline(self) -> bool:
        lines = self._timelines.lines()
        for line in lines:
            self._journal.feed(line)
        return bool(lines)

    def _new_record(self) -> dict[str, Any] | None:
        try:
            changed = self._record.stat().st_mtime_ns
            if changed == self._record_time:
                return None
            self._record_time = changed
            return json_record(self._record.read_bytes()) or None
        except OSError:
            return None
