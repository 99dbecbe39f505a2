"""Step records of one launcher's workers as one message: it is sent when all of them have finished the step.

A Timeline shows one cell, the first, so only its workers' records have the moments of ops and transfers; those of the
others are reduced to losses, tokens and counts. Knows records; not what they are for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from atlas.launch.control_channel import Message
from atlas.runtime.topology import WorkerRole

MOMENTS = frozenset({"op_start_ns", "op_end_ns", "ready_ns", "start_ns", "arrive_ns", "fills"})
EMPTY: Message = {"loss": None, "losses": [], "norms": [], "tokens": 0, "compiled": ""}
"""What a record has at least. Keys with these values are not sent."""


class SiteRecords:
    """Of one attempt. `sampled`: workers whose records are sent whole."""

    def __init__(self, names: Iterable[str] = (), sampled: Iterable[str] = ()) -> None:
        self._names, self._sampled = frozenset(names), frozenset(sampled)
        self._held: dict[int, dict[str, Message]] = {}

    @classmethod
    def of(cls, roles: Sequence[WorkerRole]) -> SiteRecords:
        """Samples the first cell."""
        sampled = [role.name for role in roles if (role.group, role.cell) == (0, 0)]
        return cls([role.name for role in roles], sampled)

    def reduced(self, name: str, body: Message | None) -> Message | None:
        """A worker's message; a step record without moments, unless the worker is sampled."""
        if body is None or "step" not in body or name in self._sampled:
            return body
        return {key: value for key, value in body.items() if key not in MOMENTS}

    def joined(self, message: Message) -> Message | None:
        """What to send now. A step record waits for those of the other workers."""
        body = message["message"]
        if body is None or "step" not in body:
            return message
        held = self._held.setdefault(int(body["step"]), {})
        held[message["from"]] = {key: value for key, value in body.items() if EMPTY.get(key, ...) != value}
        if len(held) < len(self._names):
            return None
        del self._held[int(body["step"])]
        return {"epoch": message["epoch"], "records": held}


def unpacked(records: Message) -> Iterator[tuple[str, dict[str, Any]]]:
    """The record of every worker in such a message."""
    for name, body in records.items():
        yield str(name), {**EMPTY, **body}
