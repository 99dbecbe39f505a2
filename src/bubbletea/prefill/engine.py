"""The prefills of one worker: selects the next piece, runs it and passes on its results.

Tasks arrive from another thread at any time; `step` and `settle` are called on the thread that owns the device, when it
is free for prefill. Among the jobs whose input has arrived, the earliest due goes first; a job that does not fit into
the arena waits until another ends. Knows jobs, the arena and the transport to neighbouring stages; not bubbles, not the
service.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from atlas.errors import AtlasError
from atlas.runtime.device import Running
from atlas.wan.transport.base import Handle, Key, Transport
from bubbletea.prefill.job import HEAD, PieceResult, PrefillJob, PrefillPiece, PrefillTask, run_pieces, together
from bubbletea.prefill.piece_times import PieceTimes
from bubbletea.prefill.shard import ModelShard
from bubbletea.prefill.staging import Staged, Staging

if TYPE_CHECKING:
    from bubbletea.prefill.service_link import ServiceLink

LANE = 0
"""Of the transport: activations of prefill have a channel to themselves."""


@dataclass
class _OfferedTask:
    task: PrefillTask
    tokens: Sequence[int]
    cached: Sequence[Tensor]
    job: PrefillJob | None = None
    inputs: list[Handle] = field(default_factory=list)
    """By chunk, if they come from an earlier stage."""


class BegunPiece(NamedTuple):
    """A started piece, of one prompt or of several."""

    task: PrefillTask
    """The most urgent of them."""
    piece: PrefillPiece
    """Of several prompts: one that costs as much (`job.together`)."""
    predicted_ns: int
    running: Running[list[PieceResult]]
    outs: Sequence[tuple[PrefillTask, PrefillPiece, Staged]]
    """Activations for the next stage."""


Begin = Callable[[Callable[[], list[PieceResult]], PrefillPiece], Running[list[PieceResult]]]
"""Executes a piece on the device, or puts it into the device's queue."""


class PrefillEngine:
    """`outlet` receives results: it is called on the device's thread and must not block. `reach(name, host, port)`
    opens a connection to another stage before the first send to it."""

    def __init__(
        self,
        shard: ModelShard,
        outlet: ServiceLink,
        transport: Transport | None = None,
        reach: Callable[[str, str, int], None] = lambda name, host, port: None,
        pace: PieceTimes | None = None,
        batch_tokens: int = 0,
    ) -> None:
        self.shard, self.outlet, self.transport, self.reach = shard, outlet, transport, reach
        self.pace = pace or PieceTimes(shard.config)
        self.batch_tokens = batch_tokens
        """Most tokens of a piece of several prompts; 0: every piece is of one prompt."""
        self._staging = Staging(shard.arena.device)
        self._lock = threading.Lock()
        self._offers: dict[tuple[int, int], _OfferedTask] = {}
        self._dropped: set[tuple[int, int]] = set()
        self._gone: list[_OfferedTask] = []
        """Dropped; their memory is freed on the device's thread."""
        self.changed = threading.Event()
        """Set when there may be a new piece to run. A thread that waits for it clears it before it looks for one."""

    # ---- from any thread ---------------------------------------------------------------------------------------
    def offer(self, task: PrefillTask, tokens: Sequence[int] = (), cached: Sequence[Tensor] = ()) -> None:
        """Accepts a task, or reports at once that it can never run here."""
        why = self._impossible(task)
        if why:
            self.outlet.failed(task, why)
            return
        offer = _OfferedTask(task, tokens, cached)
        if task.stage:
            assert self.transport is not None, "a stage behind another needs a transport"
            before = task.peers[task.stage - 1][0]
            for index in range(len(task.chunks)):
                handle = self.transport.recv(Key(before, LANE, (task.job, task.attempt, index, task.stage)))
                handle.on_done(lambda _: self.changed.set())
                offer.inputs.append(handle)
        with self._lock:
            self._offers[task.job, task.attempt] = offer
        self.changed.set()

    def cancel(self, job: int, attempt: int) -> None:
        """Drops a task; its memory is freed before the next piece runs."""
        with self._lock:
            self._dropped.add((job, attempt))
        self.changed.set()

    def cancel_all(self) -> None:
        with self._lock:
            self._gone += self._offers.values()  # a new service numbers its tasks from 1 again
            self._offers.clear()
            self._dropped.clear()
        self.changed.set()

    # ---- on the device's thread --------------------------------------------------------------------------------
    def step(self, begin: Begin, fits: Callable[[PrefillPiece], bool] = lambda piece: True) -> BegunPiece | None:
        """Starts the next piece, or as much of it as fits; call `settle` when it is done, or later."""
        offer = None if self.outlet.is_full else self._next()
        if offer is None or offer.job is None or offer.job.piece is None:
            return None
        if not fits(offer.job.piece) and not offer.job.shorten(fits):
            return None
        offers = self._batch(offer, fits)
        try:
            flight = self._launch(offers, begin)
        except AtlasError as error:
            for one in offers:
                self._end(one, str(error))
            return None
        for one in offers:
            if one.job is not None and one.job.piece is None:
                self._end(one)
        return flight

    def predict_ns(self, piece: PrefillPiece) -> int:
        """Its expected duration."""
        return self.pace.predict_ns(piece.last - piece.first, piece.last, is_head=piece.layer == HEAD)

    def reconsider(self, fits: Callable[[PrefillPiece, int], bool]) -> None:
        """No piece ran in a wait. If the next one would have fitted at its fastest, its slowest measurement is dropped:
        a prediction that is too long would never be measured again."""
        offer = None if self.outlet.is_full else self._next()
        if offer is None or offer.job is None or (piece := offer.job.piece) is None:
            return
        sizes, is_head = (piece.last - piece.first, piece.last), piece.layer == HEAD
        if fits(piece, self.pace.fastest_ns(*sizes, is_head=is_head)):
            self.pace.drop_slowest(*sizes, is_head=is_head)

    def settle(self, flight: BegunPiece, took_ns: int) -> None:
        """Learns from its duration and sends its result to the next stage."""
        task, piece = flight.task, flight.piece
        self.pace.observe(piece.last - piece.first, piece.last, took_ns, is_head=piece.layer == HEAD)
        self.outlet.ran(task, piece, flight.predicted_ns, took_ns)
        for out in flight.outs:
            self._pass_on(*out)

    def _batch(self, lead: _OfferedTask, fits: Callable[[PrefillPiece], bool]) -> list[_OfferedTask]:
        """It, and other prompts that wait for the same layer, up to `batch_tokens`. All of them are delivered when the
        last of them would be without a batch, so that must be before the deadline of each."""
        assert lead.job is not None
        found, pieces = [lead], [lead.job.next_piece]
        due_ns, planned_ns, widest = lead.task.due_ns, lead.task.planned_ns, lead.task.length
        for offer in self._runnable() if self.batch_tokens > 1 and len(self._offers) > 1 else ():
            job, task = offer.job, offer.task
            if offer is lead or job is None or job.piece is None or job.piece.layer != pieces[0].layer:
                continue
            due_ns, planned_ns = min(due_ns, task.due_ns), max(planned_ns, task.planned_ns)
            whole = together([*pieces, job.piece])
            num, widest = whole.last - whole.first, max(widest, task.length)
            if planned_ns > due_ns or num > self.batch_tokens or not fits(whole):
                break
            if self.shard.workspace_bytes(num, widest) > self.shard.arena.workspace_bytes:
                break
            found.append(offer)
            pieces.append(job.piece)
        return found

    def _launch(self, offers: Sequence[_OfferedTask], begin: Begin) -> BegunPiece:
        jobs, pieces = [offer.job for offer in offers if offer.job is not None], list[PrefillPiece]()
        for offer, job in zip(offers, jobs, strict=True):
            pieces.append(job.next_piece)
            if job.begins_chunk and offer.task.stage:
                data = offer.inputs[job.next_piece.chunk].wait(0)
                x = torch.frombuffer(data, dtype=self.shard.dtype)
                job.feed(self._staging.into(x.view(1, -1, self.shard.config.width)))
        whole = together(pieces)
        predicted_ns = self.predict_ns(whole)
        running = begin(partial(run_pieces, jobs), whole)
        outs = list[tuple[PrefillTask, PrefillPiece, Staged]]()
        for offer, piece, result in zip(offers, pieces, running.result, strict=True):
            kv, out = (None if tensor is None else self._staging.out(tensor) for tensor in result)
            if kv is not None:
                self.outlet.kv(offer.task, piece, kv)
            elif out is not None:
                self.outlet.logits(offer.task, out)
            if out is not None and piece.layer != HEAD:
                outs.append((offer.task, piece, out))
        return BegunPiece(offers[0].task, whole, predicted_ns, running, outs)

    def _pass_on(self, task: PrefillTask, piece: PrefillPiece, out: Staged) -> None:
        assert self.transport is not None, "a stage before another needs a transport"
        peer = task.peers[task.stage + 1]
        self.reach(*peer)
        key = Key(peer[0], LANE, (task.job, task.attempt, piece.chunk, task.stage + 1))
        data = out().contiguous().view(torch.uint8).numpy()
        self.transport.send(key, data, what=f"activations of prefill {task.job}")

    def _next(self) -> _OfferedTask | None:
        """The earliest due task that has memory and input."""
        self._forget_dropped()
        return next(self._runnable(), None)

    def _runnable(self) -> Iterator[_OfferedTask]:
        """Tasks that have memory and input, the earliest due first. Those without memory get some if there is any."""
        with self._lock:
            offers = sorted(self._offers.values(), key=lambda o: (o.task.due_ns, o.task.job))
        is_full = False
        for offer in offers:
            if offer.job is None and not is_full:
                is_full = not self._begin(offer)  # later tasks must not take the memory it waits for
            if offer.job is not None and self._ready(offer):
                yield offer

    def _begin(self, offer: _OfferedTask) -> bool:
        task = offer.task
        allocation = self.shard.arena.take(self._job_bytes(task))
        if allocation is None:
            return False
        offer.job = PrefillJob(self.shard, task, allocation, offer.tokens, offer.cached)
        offer.tokens, offer.cached = (), ()
        return True

    def _ready(self, offer: _OfferedTask) -> bool:
        assert offer.job is not None
        piece = offer.job.piece
        if piece is None or not offer.job.begins_chunk or not offer.task.stage:
            return True
        handle = offer.inputs[piece.chunk]
        if handle.done and handle.error is not None:
            self._end(offer, str(handle.error))
            return False
        return handle.done

    def _end(self, offer: _OfferedTask, why: str = "") -> None:
        with self._lock:
            self._offers.pop((offer.task.job, offer.task.attempt), None)
        if offer.job is not None:
            self.shard.arena.free(offer.job.allocation)
            offer.job = None
        if why:
            self.outlet.failed(offer.task, why)
        else:
            self.outlet.done(offer.task)

    def _forget_dropped(self) -> None:
        with self._lock:
            gone = [*self._gone, *(self._offers.pop(key) for key in self._dropped if key in self._offers)]
            self._dropped.clear()
            self._gone.clear()
        for offer in gone:
            if offer.job is not None:
                self.shard.arena.free(offer.job.allocation)

    def _impossible(self, task: PrefillTask) -> str:
        if not task.is_sound or task.length > self.shard.config.max_length:
            return (
                f"a prompt of {task.length} tokens in chunks that end at {list(task.ends)} cannot be run: ends must "
                f"ascend to the prompt's length, which may be {self.shard.config.max_length} at most"
            )
        if self._job_bytes(task) > self.shard.arena.num_bytes - self.shard.weights_bytes:
            return f"a prompt of {task.length} tokens is larger than the whole arena"
        if self.shard.workspace_bytes(task.widest, task.length) > self.shard.arena.workspace_bytes:
            return f"chunks of {task.widest} tokens need more workspace than was set aside: use smaller chunks"
        return ""

    def _job_bytes(self, task: PrefillTask) -> int:
        return self.shard.job_bytes(task.length, task.widest)
