"""Fetches one load from all prefill workers that have a part of it, at the same time, and checks every block against
the dimensions of this engine's cache.

Knows the dimensions of vLLM's model; not the cache or the engine. Shape letters: K heads of keys
and values of this rank, E head width.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import torch

from atlas.errors import AtlasError, WorkerError
from bubbletea.handoff.fetch import EngineIdentity, Fetcher
from bubbletea.handoff.remote_parts import RemotePart
from bubbletea.kv_blocks import KvBlock
from bubbletea.vllm.loader import KvLoad, KvSpan


@dataclass(frozen=True)
class WantedTokens:
    """What a worker of the engine expects to receive."""

    layers: tuple[int, ...]
    heads: tuple[int, int]
    """Of this tensor-parallel rank: the first, and the one after the last."""
    head_width: int
    dtype: torch.dtype
    block_tokens: int


def fetch(load: KvLoad, wanted: WantedTokens, caller: EngineIdentity, timeout_s: float) -> list[KvSpan]:
    """Every layer from the first token to the last; raises WorkerError or OSError if anything is missing."""
    parts = load.ticket.parts_of(wanted.layers)
    fetching = _Fetching(load, wanted, caller, time.monotonic() + timeout_s, timeout_s)
    with ThreadPoolExecutor(len(parts), thread_name_prefix="bubbletea-part") as threads:
        found = [threads.submit(fetching.part, part, layers) for part, layers in parts]
    if fetching.error is not None:
        raise fetching.error
    return [span for one in found for span in one.result()]


@dataclass
class _Fetching:
    """One load; the first error interrupts the fetches of all its parts."""

    load: KvLoad
    wanted: WantedTokens
    caller: EngineIdentity
    until_s: float
    timeout_s: float
    error: Exception | None = None
    _open: list[Fetcher] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def first(self) -> int:
        return self.load.first_token

    @property
    def stop(self) -> int:
        return self.first + len(self.load.block_ids) * self.wanted.block_tokens

    def part(self, part: RemotePart, layers: Sequence[int]) -> list[KvSpan]:
        try:
            return self._fetched(part, layers)
        except Exception as error:
            with self._lock:
                self.error = self.error or _named(error, part)
                for other in self._open:
                    other.interrupt()
            return []

    def _fetched(self, part: RemotePart, layers: Sequence[int]) -> list[KvSpan]:
        reached, spans = dict.fromkeys(layers, self.first), list[KvSpan]()
        with Fetcher(part.host, part.port, self.caller, part.name) as fetcher:
            with self._lock:
                if self.error is not None:
                    return []
                self._open.append(fetcher)
            try:
                for block in fetcher.fetch(self.load.ticket, self.first, self.stop, layers, self.wanted.heads):
                    self._require_expected(block, reached)
                    start, reached[block.layer] = reached[block.layer], min(block.stop, self.stop)
                    kv = block.kv[:, :, start - block.start : reached[block.layer] - block.start]
                    spans.append(KvSpan(block.layer, start - self.first, kv))
                    if time.monotonic() > self.until_s:
                        raise WorkerError(f"hand-off {self.load.ticket.id} took longer than {self.timeout_s:g} s")
            finally:
                with self._lock:
                    self._open.remove(fetcher)
        for layer, end in reached.items():
            if end != self.stop:
                raise WorkerError(f"layer {layer} ends at token {end} instead of {self.stop}")
        return spans

    def _require_expected(self, block: KvBlock, reached: dict[int, int]) -> None:
        wanted = self.wanted
        shape = (2, wanted.heads[1] - wanted.heads[0], block.stop - block.start, wanted.head_width)
        if tuple(block.kv.shape) != shape or block.kv.dtype != wanted.dtype:
            raise WorkerError(
                f"keys and values of shape {list(block.kv.shape)} in {block.kv.dtype}, this cache takes {list(shape)} "
                f"in {wanted.dtype}: serve the same model in the same dtype on both"
            )
        if block.layer not in reached:
            raise WorkerError(f"a block of layer {block.layer}, which was not asked for")
        if not block.start <= reached[block.layer] < block.stop:
            at = reached[block.layer]
            raise WorkerError(f"tokens {block.start} to {block.stop} of layer {block.layer} where {at} is next")


def _named(error: Exception, part: RemotePart) -> Exception:
    where = f"layers {part.first} to {part.stop - 1} at {part.host}:{part.port}"
    if isinstance(error, AtlasError | OSError):
        return WorkerError(f"{where}: {str(error) or type(error).__name__}")
    return error
