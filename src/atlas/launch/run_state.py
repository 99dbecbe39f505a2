"""The state of a coordinator, in a file: the number of the last attempt, the lost hosts, and the attempt whose
workers run. A coordinator that is started again reads it and goes on (`coordinator`).

    FOLDER/coordinator.json    replaced as a whole: a kill leaves the old one or the new one
    FOLDER/coordinator.lock    held by the coordinator that runs

Without a folder the state is lost with the process. Knows files; does not know agents.
"""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import json
import logging
import secrets
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

from atlas.errors import AtlasError
from atlas.runtime.assignment import read

log = logging.getLogger("atlas.launch")
FILE, LOCK = "coordinator.json", "coordinator.lock"
ATTEMPT_BITS, RUN_BITS = 12, 20
"""An epoch has 32 bits on the wire: a random number of the run, then the attempt."""


@dataclass(frozen=True)
class ResumePoint:
    """Where an attempt starts, and where its checkpoints are copied to."""

    first_step: int = 0
    attempt: int = 0
    """The number of this attempt in the names of its checkpoints."""
    resume: int | None = None
    """The step of the checkpoint; None: from the beginning."""
    copies: dict[str, str] = field(default_factory=dict)
    """By agent: the agent whose checkpoint server its workers copy to."""
    saves: bool = False


@dataclass(frozen=True)
class RunningAttempt:
    """An attempt whose workers have been started."""

    start: ResumePoint
    instances: dict[str, int]
    """By agent: the random number of its process."""
    program: str
    """SHA-256 of the Program that the workers run."""
    num_done: int
    """Steps that all workers have finished and that were reported."""


@dataclass(frozen=True)
class RunState:
    plan: str
    """The digest of the plan."""
    epoch: int
    """Of the last attempt: larger than that of any earlier attempt of this run, and unlike that of other runs."""
    attempt: int = 0
    """Attempts so far."""
    num_hosts: dict[str, int] = field(default_factory=dict)
    """By datacenter: its launchers, lost ones included; where they have connected."""
    lost: tuple[tuple[str, int], ...] = ()
    """Datacenter and number of each launcher that the run does without."""
    running: RunningAttempt | None = None
    finished: tuple[str, int] | None = None
    """What all launchers receive at the end: a sentence and an exit code."""


class FinishedBeforeError(Exception):
    """An earlier coordinator has ended the run already."""

    def __init__(self, sentence: str, code: int) -> None:
        super().__init__(sentence)
        self.sentence, self.code = sentence, code


class StateFile:
    """`state`, and `update` to change it."""

    def __init__(self, folder: Path | None, plan: str) -> None:
        self._folder = folder
        self._lock: IO[str] | None = None
        self._reported = False
        found = None
        if folder is not None:
            self._lock = _locked(folder)
            try:
                found = _read(folder / FILE)
            except AtlasError:
                self.close()
                raise
        first = secrets.randbelow((1 << RUN_BITS) - 1) << ATTEMPT_BITS
        self.state = found or RunState(plan, first)
        if self.state.plan != plan:  # checkpoints of one plan are resumed by another
            self.state = RunState(plan, self.state.epoch, self.state.attempt)

    def update(self, **changes: Any) -> RunState:
        """Training does not depend on this file, so a full disk is reported and no more."""
        self.state = replace(self.state, **changes)
        if self._folder is None:
            return self.state
        new = self._folder / f"{FILE}.new"
        try:
            new.write_text(json.dumps(dataclasses.asdict(self.state)))
            new.replace(self._folder / FILE)
        except OSError as error:
            if not self._reported:
                log.warning("%s: %s. A coordinator that is started again will restart the workers", new, error.strerror)
            self._reported = True
        return self.state

    def next_attempt(self) -> RunState:
        """Number a new attempt, before any worker of it starts."""
        state = self.state
        return self.update(epoch=state.epoch + 1, attempt=state.attempt + 1, running=None, finished=None)

    def close(self) -> None:
        if self._lock is not None:
            self._lock.close()


def _locked(folder: Path) -> IO[str]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / LOCK).open("a+")
    except OSError as error:
        raise AtlasError(f"--state {folder}: cannot be used ({error.strerror}). Choose another folder") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno == errno.EWOULDBLOCK:
            lock.close()
            raise AtlasError(
                f"{folder}: another coordinator uses this folder. A run has one coordinator: end that one, or give "
                "this one another folder"
            ) from None
        log.debug("%s: this file system has no locks: %s", folder, error)  # some network file systems
    return lock


def _read(file: Path) -> RunState | None:
    try:
        text = file.read_text()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise AtlasError(f"{file}: {error.strerror}. Make it readable, or give another folder") from None
    try:
        return read(RunState, json.loads(text))
    except ValueError as error:  # pydantic's errors are ValueErrors
        raise AtlasError(f"{file}: not the state of a coordinator ({error}). Delete it to start a new run") from None
