"""The log files of one host's workers: `attempt-3/east/host0/p0.s1.log` in the run's folder of logs. They are kept;
a file that grows beyond a limit is moved to `.log.1`, and only the last attempts stay.

Knows files. The workers write to them themselves.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import tempfile
from pathlib import Path

MAX_BYTES = 16 << 20
"""Of a log file before it is rotated: about a day of warnings."""
MAX_ATTEMPTS = 20
"""Whose log files are kept."""
TAIL_LINES, TAIL_BYTES = 50, 1 << 16
"""Of a log file, shown when its worker fails: at most so many lines, of at most so many bytes."""


class WorkerLogs:
    """`folder` None: a temporary one, deleted by `close`."""

    def __init__(self, folder: Path | None = None) -> None:
        self._temporary = tempfile.TemporaryDirectory(prefix="atlas-workers-") if folder is None else None
        self.folder = Path(self._temporary.name) if self._temporary is not None else folder or Path()
        self.folder.mkdir(parents=True, exist_ok=True)

    def file(self, worker: str) -> Path:
        return self.folder / f"{worker}.log"

    def tail(self, worker: str) -> str:
        """The end of a worker's log as indented lines below its path; empty where it wrote nothing."""
        with contextlib.suppress(OSError), self.file(worker).open("rb") as file:
            file.seek(max(0, self.file(worker).stat().st_size - TAIL_BYTES))
            lines = file.read().decode(errors="replace").strip().splitlines()[-TAIL_LINES:]
            if lines:
                return "\n".join([f"the last {len(lines)} lines of {self.file(worker)}:", *(f"  {x}" for x in lines)])
        return ""

    def rotate(self) -> None:
        """Move what is in a large file to `.log.1`. The workers append, so they go on at its beginning."""
        for file in self.folder.glob("*.log"):
            with contextlib.suppress(OSError):
                if file.stat().st_size > MAX_BYTES:
                    shutil.copyfile(file, file.with_suffix(".log.1"))
                    with file.open("r+b") as old:
                        old.truncate(0)

    def close(self) -> None:
        if self._temporary is not None:
            self._temporary.cleanup()


def log_folder(root: Path, attempt: int, datacenter: str, host: int) -> Path:
    """Of one host's workers in an attempt. Deletes this host's logs of attempts long ago."""
    place = Path(datacenter) / f"host{host}"
    for old in root.glob("attempt-*"):
        number = re.fullmatch(r"attempt-(\d+)", old.name)
        if number is not None and int(number[1]) <= attempt - MAX_ATTEMPTS:
            shutil.rmtree(old / place, ignore_errors=True)
            for empty in (old / datacenter, old):
                with contextlib.suppress(OSError):
                    empty.rmdir()
    return root / f"attempt-{attempt}" / place


def new_attempt(root: Path) -> Path:
    """The folder for an emulated attempt: all its workers are on this host."""
    found = [int(match[1]) for old in root.glob("attempt-*") if (match := re.fullmatch(r"attempt-(\d+)", old.name))]
    return root / f"attempt-{max(found, default=0) + 1}" / "emulated"
