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
from pathlib import Path
from typing import Any

import numpy as np

from atlas.runtime.models.config import DecoderConfig, RopeScaling
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
    budget: float = 0.005
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
        data = asdict(self)
        data["served"]["folder"] = str(self.served.folder) if self.served.folder else ""
        data["waits_ns"] = list(self.waits_ns.items())
        return data

    @classmethod
    def from_json(cls, data: Json) -> WorkerOrder:
        served = data["served"]
        config = dict(served["config"])
        if config["rope_scaling"] is not None:
            config["rope_scaling"] = RopeScaling(**config["rope_scaling"])
        folder = Path(served["folder"]) if served["folder"] else None
        model = Served(DecoderConfig(**config), folder, served["seed"], served["dtype"])
        fields = {
            **data,
            "served": model,
            "layers_per_stage": tuple(data["layers_per_stage"]),
            "pace": LayerTime(**data["pace"]) if data["pace"] else None,
            "waits_ns": {int(index): int(ns) for index, ns in data["waits_ns"]},
        }
        return cls(**fields)


def ticket_of(task: PrefillTask) -> str:
    return f"{task.job}.{task.attempt}"


def pack_task(task: PrefillTask, tokens: Sequence[int]) -> tuple[Json, Payload]:
    return asdict(task), np.asarray(tokens, "<u4").tobytes()


def unpack_task(fields: Json, payload: Payload) -> tuple[PrefillTask, list[int]]:
    peers = tuple((str(name), str(host), int(port)) for name, host, port in fields["peers"])
    task = PrefillTask(**{**fields, "ends": tuple(fields["ends"]), "peers": peers})
    return task, np.frombuffer(payload, "<u4").tolist()
