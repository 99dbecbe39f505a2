"""A prompt for the dispatcher, its run, and its result: prefilled, refused, or handed back."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from bubbletea.admit.records import PrefillRequest, RequestKind
from bubbletea.constants import SECOND
from bubbletea.handoff.kv_store import Parcel
from bubbletea.handoff.remote_parts import RemotePart

if TYPE_CHECKING:
    from bubbletea.serve.connections import ConnectedWorker

RESTART_NS = 5 * SECOND
"""Losses within this time count as one failure: a restart of training ends all its workers, one after the other."""


@dataclass(frozen=True)
class Prompt:
    """A prompt to be prefilled."""

    tokens: Sequence[int]
    tenant: str
    num_new: int
    """Tokens that will be decoded after it."""
    deadline_ns: int | None = None
    kind: RequestKind = "online"
    kept_s: float = 0.0
    """How long its keys and values are expected to be needed after the prefill."""
    cache_salt: str = ""
    """The prefix cache is shared only with prompts of the same tenant and salt."""
    hands_off: bool = False
    """Its keys and values stay at the workers, for a decode engine."""
    key: bytes = b""
    """Equal for the same request when it is sent again; empty: nothing is kept for it if it is refused."""


@dataclass(frozen=True)
class Prefilled:
    parcel: Parcel
    logits: Tensor
    cached_tokens: int
    admitted_ns: int
    first_ns: int
    """When the result of the first piece arrived."""
    done_ns: int
    parts: tuple[RemotePart, ...] = ()
    """Of a hand-off: which worker has which layers."""


@dataclass(eq=False)
class PrefillRun:
    """An admitted prefill, from its admission to its result."""

    job: int
    prompt: Prompt
    request: PrefillRequest
    parcel: Parcel
    future: asyncio.Future[Prefilled]
    admitted_ns: int
    attempt: int = 0
    """Increases when its tasks are cancelled: results of earlier attempts are ignored."""
    sent: tuple[ConnectedWorker, ...] = ()
    """The workers that have its tasks now, by stage."""
    due_ns: int = 0
    """The deadline that was sent to the workers."""
    expected_ns: int = 0
    """Its planned delivery."""
    cached: int = 0
    logits: Tensor | None = None
    first_ns: int = 0
    since_ns: int = 0
    """Since when it has made no progress although it could."""
    planned_ns: int = 0
    """The delivery that was expected then: later plans may move it on and on."""
    num_failures: int = 0
    lost_ns: int = -RESTART_NS
    """The last loss of its workers that counted as a failure."""
    share: float = 0.0
    """Of every wait: what admission counted on for an online request."""

    def stay(self, now_ns: int) -> None:
        """It has made progress, or cannot make any now."""
        self.since_ns, self.planned_ns = now_ns, self.expected_ns


class Refused(Exception):  # noqa: N818
    """Not admitted; it would be in `retry_s`, or never (None). `detail`: text that explains the reason."""

    def __init__(self, reason: str, retry_s: float | None, detail: str = "") -> None:
        super().__init__(reason)
        self.reason, self.retry_s, self.detail = reason, retry_s, detail


class HandedBack(Exception):  # noqa: N818
    """Admitted, but its workers are gone."""
