"""A worker's loads: separate threads fetch keys and values while the engine runs; the engine's thread writes them into
the cache between two steps, for a few milliseconds each.

A load is all or nothing: if it fails, all its blocks are reported and vLLM computes them. Knows queues, writing and
counting; not the wire format (`fetching`) or vLLM's classes.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from atlas.errors import AtlasError
from bubbletea.handoff.remote_parts import Ticket
from bubbletea.vllm.cache import PagedCache

log = logging.getLogger("vllm.bubbletea")
"""A child of vLLM's logger, so that its handlers and level apply."""
NUM_THREADS = 4
"""Loads that are fetched at once."""
STEP_S = 0.010
"""Time limit of writing per step of the engine; at least one block is written."""
IDLE_S = 0.001
"""Wait in a step in which the engine has no other work: without it, the engine would spin and slow the fetches."""


@dataclass(frozen=True)
class KvLoad:
    """Consecutive whole blocks to load, as requested by the scheduler."""

    request_id: str
    ticket: Ticket
    first_token: int
    block_ids: tuple[int, ...]
    """The blocks of the tokens from `first_token` on."""


class KvSpan(NamedTuple):
    """Keys and values of some tokens of one layer."""

    layer: int
    offset: int
    """Its first token, counted from the first of the load."""
    kv: Tensor
    """[2, K, L, E]"""


@dataclass
class LoadOutcome:
    """Of one step."""

    finished: set[str] = field(default_factory=set)
    """Requests whose load has ended, successfully or not."""
    bad_blocks: set[int] = field(default_factory=set)
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("loads", "failures", "tokens", "bytes"), 0))


@dataclass
class _FetchedLoad:
    load: KvLoad
    spans: list[KvSpan]
    """Emptied as they are written."""
    num_bytes: int = 0
    error: str = ""


class Loader:
    """`fetch` runs on several threads and raises AtlasError or OSError if a load fails."""

    def __init__(self, cache: PagedCache, fetch: Callable[[KvLoad], Sequence[KvSpan]]) -> None:
        self.cache, self._fetch = cache, fetch
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="bubbletea")
        self._arrived: deque[_FetchedLoad] = deque()
        self._wake = threading.Event()
        self._num_under_way = 0

    def begin(self, load: KvLoad) -> None:
        self._num_under_way += 1
        self._threads.submit(self._run, load)

    def step(self, is_idle: bool) -> LoadOutcome:
        """Writes fetched layers within the time limit; returns the loads that have ended."""
        outcome = LoadOutcome()
        if is_idle and self._num_under_way and not self._arrived:
            self._wake.wait(IDLE_S)
        self._wake.clear()
        until = time.monotonic() + STEP_S
        while self._arrived:
            arrival = self._arrived[0]
            self._write_one(arrival)
            if not arrival.spans or arrival.error:
                self._arrived.popleft()
                self._end(arrival, outcome)
            if time.monotonic() >= until:
                break
        return outcome

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    # ---- on our threads ----------------------------------------------------------------------------------------
    def _run(self, load: KvLoad) -> None:
        arrival = _FetchedLoad(load, [])
        try:
            arrival.spans = list(self._fetch(load))
            arrival.num_bytes = sum(span.kv.numel() * span.kv.element_size() for span in arrival.spans)
        except (AtlasError, OSError) as error:
            arrival.error = str(error) or type(error).__name__
        except Exception as error:  # any error must end the load, or its request would wait forever
            log.exception("BubbleTea: a load has failed unexpectedly")
            arrival.error = f"{type(error).__name__}: {error}"
        self._arrived.append(arrival)
        self._wake.set()

    # ---- on the engine's ---------------------------------------------------------------------------------------
    def _write_one(self, arrival: _FetchedLoad) -> None:
        if arrival.error or not arrival.spans:
            return
        layer, offset, kv = arrival.spans.pop()
        try:
            slots = self.cache.slots(arrival.load.block_ids)[offset : offset + kv.shape[2]]
            self.cache.write(layer, kv, slots)
        except (RuntimeError, ValueError) as error:
            arrival.error = f"layer {layer} could not be written: {error}"

    def _end(self, arrival: _FetchedLoad, outcome: LoadOutcome) -> None:
        load = arrival.load
        self._num_under_way -= 1
        outcome.finished.add(load.request_id)
        if arrival.error:
            outcome.counts["failures"] += 1
            outcome.bad_blocks.update(load.block_ids)
            log.warning(
                "BubbleTea: the keys and values of request %s were not loaded and are recomputed: %s",
                load.request_id,
                arrival.error,
            )
            return
        outcome.counts["loads"] += 1
        outcome.counts["tokens"] += len(load.block_ids) * self.cache.block_tokens
        outcome.counts["bytes"] += arrival.num_bytes
