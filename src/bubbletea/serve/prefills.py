"""A prompt for the dispatcher, and its result: prefilled, refused, or handed back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from bubbletea.admit.records import RequestKind
from bubbletea.handoff.kv_store import Parcel
from bubbletea.handoff.remote_parts import RemotePart


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


class Refused(Exception):  # noqa: N818
    """Not admitted; it would be in `retry_s`, or never (None). `detail`: text that explains the reason."""

    def __init__(self, reason: str, retry_s: float | None, detail: str = "") -> None:
        super().__init__(reason)
        self.reason, self.retry_s, self.detail = reason, retry_s, detail


class HandedBack(Exception):  # noqa: N818
    """Admitted, but its workers are gone."""
