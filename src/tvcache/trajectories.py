"""Recorded rollouts from a file: task, calls in order, what each gave and how long it took, where that was recorded.

Three forms, as JSON or JSON lines, also gzipped: OpenAI messages under `messages` or `traj` (tau-bench's), or `calls`
with name, arguments, output and perhaps seconds. Incomplete or invalid entries are counted and skipped.
"""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tvcache.errors import ArgumentsError, TvcacheError
from tvcache.keys import Task, ToolCall, parse
from tvcache.values import encode


@dataclass
class RecordedCall:
    """One recorded call."""

    name: str
    call: ToolCall | None
    """None: its arguments have no canonical form."""
    body: bytes | None = None
    """None: no result was recorded."""
    seconds: float | None = None


@dataclass
class Trajectory:
    task: Task
    steps: list[RecordedCall] = field(default_factory=list)


@dataclass
class RecordedRollouts:
    """The content of one file."""

    source: str
    trajectories: list[Trajectory]
    oddities: Counter[str]
    """Skipped entries, by kind."""

    @property
    def num_calls(self) -> int:
        return sum(len(one.steps) for one in self.trajectories)

    @property
    def timed(self) -> bool:
        """Whether every call has its seconds."""
        return all(step.seconds is not None for one in self.trajectories for step in one.steps)


def read(path: Path) -> RecordedRollouts:
    try:
        data = path.read_bytes()
        text = (gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data).decode()
    except OSError as error:
        raise TvcacheError(f"{path}: {error.strerror or error}. Check the path") from None
    except (EOFError, gzip.BadGzipFile, UnicodeDecodeError) as error:
        raise TvcacheError(f"{path}: damaged ({error}). Copy it again") from None
    oddities: Counter[str] = Counter()
    trajectories = [_trajectory(path, number, found, oddities) for number, found in enumerate(_objects(path, text), 1)]
    found = RecordedRollouts(path.name, trajectories, oddities)
    if not found.num_calls:
        raise TvcacheError(f"{path}: no tool call in it. Give trajectories with messages, traj or calls")
    return found


def _objects(path: Path, text: str) -> Iterator[Any]:
    try:
        whole = json.loads(text)
    except RecursionError:
        raise TvcacheError(f"{path}: nested too deep") from None
    except json.JSONDecodeError:
        for number, line in enumerate(text.splitlines(), 1):
            if line.strip():
                try:
                    yield json.loads(line)
                except (json.JSONDecodeError, RecursionError) as error:
                    raise TvcacheError(
                        f"{path}: line {number} is not JSON ({error}). Fix or remove this line"
                    ) from None
        return
    yield from whole if isinstance(whole, list) else [whole]


def _trajectory(path: Path, number: int, found: Any, oddities: Counter[str]) -> Trajectory:
    where = f"{path}: trajectory {number}"
    if not isinstance(found, dict):
        raise TvcacheError(f"{where} is not an object: give one with messages, traj or calls")
    name = found.get("task", found.get("task_id"))
    if not isinstance(name, (str, int)):
        raise TvcacheError(f"{where} has no task or task_id, so its tree is unknown: add one")
    made = Trajectory(Task(str(name), str(found.get("image", ""))))
    given = next((found[key] for key in ("calls", "messages", "traj") if isinstance(found.get(key), list)), None)
    if given is None:
        raise TvcacheError(f"{where} has no list of messages, traj or calls")
    if "calls" in found:
        made.steps = [_recorded(where, call, oddities) for call in given]
    else:
        _messages(made, where, given, oddities)
    return made


def _recorded(where: str, found: Any, oddities: Counter[str]) -> RecordedCall:
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        raise TvcacheError(f"{where}: a call is an object with a name, not {str(found)[:80]!r}")
    step = _step(found["name"], found.get("arguments", {}), oddities, str(found.get("version", "")))
    if "output" in found:
        step.body = encode(found["output"])
    else:
        oddities["result missing"] += 1
    seconds = found.get("seconds")
    if isinstance(seconds, (int, float)) and not isinstance(seconds, bool):
        if not 0 <= seconds < 1e9:
            raise TvcacheError(f"{where}: seconds {seconds!r} of {found['name']!r}: must be a number of at least 0")
        step.seconds = float(seconds)
    return step


def _messages(made: Trajectory, where: str, messages: list[Any], oddities: Counter[str]) -> None:
    """A result belongs to the oldest call with its id that has none yet: models repeat ids within a rollout."""
    open_: dict[str, list[RecordedCall]] = {}
    for message in messages:
        if not isinstance(message, dict):
            raise TvcacheError(f"{where}: a message is an object, not {str(message)[:80]!r}")
        for called in message.get("tool_calls") or ():
            try:
                name, arguments = called["function"]["name"], called["function"]["arguments"]
                steps = open_.setdefault(str(called["id"]), [])
            except (KeyError, TypeError):
                raise TvcacheError(f"{where}: a tool call needs id and function, not {str(called)[:80]!r}") from None
            made.steps.append(_step(str(name), arguments, oddities))
            steps.append(made.steps[-1])
        if message.get("role") == "tool":
            waiting = open_.get(str(message.get("tool_call_id")))
            answered = next((step for step in waiting or () if step.body is None), None)
            if answered is not None:
                answered.body = encode(message.get("content"))
            else:
                oddities["result of an unknown call" if waiting is None else "second result of a call"] += 1
    oddities["result missing"] += sum(step.body is None for step in made.steps)


def _step(name: str, arguments: Any, oddities: Counter[str], version: str = "") -> RecordedCall:
    try:
        call = ToolCall(name, parse(arguments) if isinstance(arguments, str) else arguments, version)
        assert call.canonical
        return RecordedCall(name, call)
    except ArgumentsError:
        oddities["arguments that cannot be cached"] += 1
        return RecordedCall(name, None)
