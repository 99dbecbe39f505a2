"""One prompt's prefill on one worker: chunk by chunk, within a chunk layer by layer, one *piece* at a time. Results
stay in the arena, so it can stop after any piece, at the end of a bubble, and resume in the next.

Knows its position and memory; not time, other jobs or the transport of tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from atlas.runtime.models.block import KvSlab
from bubbletea.costs import grain_of
from bubbletea.prefill.arena import Allocation
from bubbletea.prefill.shard import ModelShard


@dataclass(frozen=True)
class PrefillTask:
    """The work of one worker for one prompt."""

    job: int
    """Number given by the service; a pair (job, attempt) is used once."""
    attempt: int
    length: int
    """Tokens of the prompt."""
    start: int
    """Tokens before this one are cached: their keys and values come with the task."""
    ends: tuple[int, ...]
    """Where each chunk of tokens ends; the last one at `length`."""
    stage: int
    """The worker's stage of this prefill."""
    due_ns: int
    """Deadline on the service's monotonic clock; earlier ones run first."""
    peers: tuple[tuple[str, str, int], ...] = ()
    """(name, host, port) of the transport of each stage, in order."""
    planned_ns: int = 0
    """When it is delivered by the plan, on the same clock."""
    ticket: str = ""
    """Of a hand-off: keys and values stay at the worker under this name. Empty: they are sent to the service."""
    sent_ns: int = 0
    """When the service began to send it, with its cached tokens, on the same clock."""

    @property
    def chunks(self) -> list[tuple[int, int]]:
        return list(zip((self.start, *self.ends), self.ends, strict=False))

    @property
    def widest(self) -> int:
        return max(b - a for a, b in self.chunks)

    @property
    def is_sound(self) -> bool:
        steps = (self.start, *self.ends)
        return (
            self.start >= 0 and steps[-1] == self.length and all(a < b for a, b in pairwise(steps)) and bool(self.ends)
        )


class PrefillPiece(NamedTuple):
    """One layer of one chunk, or of the part of it that fits into the wait; layer -1: the head."""

    chunk: int
    first: int
    last: int
    """Tokens `first` to `last`, exclusive."""
    layer: int


HEAD = -1
"""The layer of a piece that computes the logits."""


class PieceResult(NamedTuple):
    """The result of a piece, copied out of the arena."""

    kv: Tensor | None
    """The new keys and values, [2, K, L, E]; None for the head."""
    out: Tensor | None
    """Activations of a chunk for the next stage, or the logits."""


class PrefillJob:
    """Uses `allocation` of the shard's arena until its owner frees it."""

    def __init__(
        self,
        shard: ModelShard,
        task: PrefillTask,
        allocation: Allocation,
        tokens: Sequence[int],
        cached: Sequence[Tensor],
    ) -> None:
        """`cached`: keys and values of the tokens before `start`, [2, K, start, E] for every layer of the cut."""
        self.shard, self.task, self.allocation = shard, task, allocation
        self.slabs, self._x = shard.lay_out(allocation, task.length, task.widest)
        self._tokens = torch.from_numpy(np.asarray(tokens, np.int64))
        if shard.arena.device.type == "cuda":
            self._tokens = self._tokens.pin_memory()  # a copy from pageable memory would wait for all queued work
        self._pieces = [
            PrefillPiece(index, first, last, layer)
            for index, (first, last) in enumerate(task.chunks)
            for layer in (*shard.cut.layers, *([HEAD] if shard.cut.has_head and last == task.length else []))
        ]
        self._next = 0
        for slab, kv in zip(self.slabs.values(), cached, strict=False):
            slab.extend(kv[0][None], kv[1][None])

    @property
    def piece(self) -> PrefillPiece | None:
        """The next piece; None at the end."""
        return self._pieces[self._next] if self._next < len(self._pieces) else None

    @property
    def next_piece(self) -> PrefillPiece:
        """Of a job that is not done."""
        return self._pieces[self._next]

    @property
    def begins_chunk(self) -> bool:
        """Whether the next piece needs the activations of another stage (or the tokens)."""
        piece = self.piece
        return piece is not None and (self._next == 0 or self._pieces[self._next - 1].chunk != piece.chunk)

    def shorten(self, fits: Callable[[PrefillPiece], bool]) -> bool:
        """Cuts the next piece to the part that fits; the rest is next. False if no part fits."""
        piece = self.piece
        if piece is None or piece.layer == HEAD:
            return False
        grain = grain_of(self.task.widest)
        for cut in reversed(range(piece.first + grain, piece.last, grain)):
            if fits(piece._replace(last=cut)):
                self._pieces[self._next : self._next + 1] = [piece._replace(last=cut), piece._replace(first=cut)]
                return True
        return False

    def feed(self, x: Tensor) -> None:
        """Sets the activations of the next chunk, from the previous stage."""
        self._x[:, : x.shape[1]].copy_(x, non_blocking=True)

    def input(self) -> Tensor:
        """The activations that the next piece starts from, [1, L, D]."""
        piece = self.next_piece
        first, last = self.task.chunks[piece.chunk]
        if self.begins_chunk and self.shard.cut.has_embedding:
            self.feed(self.shard.embed(self._tokens[first:last], first))
        if piece.layer == HEAD:
            return self._x[:, : last - first]
        return self._x[:, piece.first - first : piece.last - first]

    def finish(self, y: Tensor) -> PieceResult:
        """The next piece has run, with this result."""
        piece = self.next_piece
        self._next += 1
        if piece.layer == HEAD:
            return PieceResult(None, y.clone())
        first, last = self.task.chunks[piece.chunk]
        self._x[:, piece.first - first : piece.last - first].copy_(y)
        ends = piece.layer == self.shard.cut.layers[-1] and piece.last == last
        chunk = self._x[:, : last - first]
        return PieceResult(self._kv(piece), chunk.clone() if ends and not self.shard.cut.has_head else None)

    def _kv(self, piece: PrefillPiece) -> Tensor:
        slab: KvSlab = self.slabs[piece.layer]
        return torch.stack([t[0, :, piece.first : piece.last] for t in (slab.k_BKTE, slab.v_BKTE)])


def run_pieces(jobs: Sequence[PrefillJob]) -> list[PieceResult]:
    """Runs the next piece of each; all are of the same layer."""
    shard, layer = jobs[0].shard, jobs[0].next_piece.layer
    xs = [job.input() for job in jobs]
    if layer == HEAD:
        return [job.finish(y) for job, y in zip(jobs, shard.logits(*xs), strict=True)]
    ys = shard.layers(layer, xs, [job.slabs[layer] for job in jobs])
    return [job.finish(y) for job, y in zip(jobs, ys, strict=True)]


def together(pieces: Sequence[PrefillPiece]) -> PrefillPiece:
    """One piece that costs as much as these of several prompts: as many tokens, and as many pairs of tokens as `costs`
    counts them. Its first token may be before 0."""
    if len(pieces) == 1:
        return pieces[0]
    sizes = [piece.last - piece.first for piece in pieces]
    num = sum(sizes)
    num_pairs = sum(n * (piece.first + n / 2) for n, piece in zip(sizes, pieces, strict=True))
    first = round(num_pairs / num - num / 2)
    return PrefillPiece(0, first, first + num, pieces[0].layer)
