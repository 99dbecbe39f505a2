"""Messages between a worker and the service, as frames (`bubbletea.frames`). Both ends import this.

    the worker connects with {name, datacenter, worker, transport}; the service answers with a WorkerOrder as JSON
    service -> worker    KV (cached tokens, ticket "job.attempt"), TASK, CANCEL, SHARE (of each wait that may be used),
                         LEASE and DROP (keys and values that the worker keeps for a decode engine)
    worker -> service    READY, KV or KEPT (a block that stays here), LOGITS, DONE, FAILED, REPORT

Times are on the service's monotonic clock; the worker learns its offset when it connects.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from bubbletea.constants import SLOWDOWN_BUDGET
from bubbletea.costs import LayerTime
from bubbletea.frames import Payload
from bubbletea.prefill.job import HEAD, PrefillPiece, PrefillTask
from bubbletea.prefill.shard import Served

TASK, CANCEL, READY, LOGITS, DONE, FAILED, REPORT, SHARE, KEPT, LEASE, DROP = range(32, 43)

Json = dict[str, Any]


@dataclass(frozen=True)
class WorkerOrder:
    """The part of the model that one worker holds, and how it may use its waits."""

    served: Served
    layers_per_stage: tuple[int, ...]
    stage: int
    arena_bytes: int
    workspace_bytes: int
    chunk: int
    """The longest chunk of any task; the warm-up runs one."""
    risk: float = 0.05
    """The share of waits that may be shorter than the guard predicts."""
    margin_ns: int = 500_000
    """Between a piece's predicted end and the predicted end of the wait."""
    pace: LayerTime | None = None
    """On a paced device: the time of a layer."""
    head_ns: int = 0
    """On a paced device: the time of the head."""
    budget: float = SLOWDOWN_BUDGET
    """The share by which prefill may slow training."""
    sensitivity: float = 1.0
    """How much longer an iteration becomes if this worker's ops do (`throttle`)."""
    keep_bytes: int = 0
    """Host memory for keys and values that decode engines fetch from this worker."""
    nixl_unencrypted: bool = False
    """Decode engines of other hosts may read keys and values by NIXL, which does not encrypt."""
    waits_ns: dict[int, int] = field(default_factory=dict)
    """By op: its expected wait, used until enough waits were observed."""

    @property
    def part(self) -> tuple[object, ...]:
        """What has to be loaded for it."""
        return self.served, self.layers_per_stage, self.stage, self.arena_bytes, self.workspace_bytes, self.chunk

    def paced_ns(self, piece: PrefillPiece) -> int:
        """How long a piece occupies a paced device."""
        assert self.pace is not None, "the device is not paced"
        return self.head_ns if piece.layer == HEAD else self.pace(piece.last - piece.first, piece.first)

    def to_json(self) -> Json:
        found: Json = _ORDER.dump_python(self, mode="json")
        return found

    @classmethod
    def from_json(cls, data: Json) -> WorkerOrder:
        return _ORDER.validate_python(data)


_ORDER = TypeAdapter(WorkerOrder)


def ticket_of(task: PrefillTask) -> str:
    return f"{task.job}.{task.attempt}"


def pack_task(task: PrefillTask, tokens: Sequence[int]) -> tuple[Json, Payload]:
    return asdict(task), np.asarray(tokens, "<u4").tobytes()


def unpack_task(fields: Json, payload: Payload) -> tuple[PrefillTask, list[int]]:
    return _TASK.validate_python(fields), np.frombuffer(payload, "<u4").tolist()


_TASK = TypeAdapter(PrefillTask)
