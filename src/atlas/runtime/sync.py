"""The end of an iteration: gradients are summed over all pipelines, the two ends of tied embeddings are joined, and the
global norm is computed. Every sum is taken in the order of pipelines, whatever arrives first, so all workers and all
schedules get the same bits.

A sum is divided among the pipelines: each receives its slice from all others, adds, and sends the result to all. It
begins as soon as a stage has its last gradient, while others still compute. Tied ends cross the WAN once an iteration,
each pipeline a slice of the matrix. The norm is a list of scalars to the last stage and one number back. Knows
gradients and links; not when a Program calls for any of it.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from atlas.errors import WorkerError
from atlas.runtime.device import Device
from atlas.runtime.links import WorkerLinks
from atlas.runtime.models.decoder import TIED_EMBEDDING
from atlas.runtime.models.tied import joined
from atlas.runtime.optimizer import global_norm
from atlas.runtime.transfers import bytes_of
from atlas.runtime.wiring import CONTROL, GRADIENTS, TIED
from atlas.wan.transport.base import Handle

Wait = Callable[[Sequence[Handle]], None]
PARTS, SUMS, ENDS, HALVES = range(4)
"""The last number of a tag: a part of a sum; a sum; an end of the tied matrix; its joined slices."""
UP, DOWN = range(2)


def slices(length: int, count: int) -> list[slice]:
    """`count` slices of nearly equal length, determined by the two numbers alone."""
    edges = [length * i // count for i in range(count + 1)]
    return [slice(a, b) for a, b in itertools.pairwise(edges)]


def is_on_host(tensors: Sequence[Tensor]) -> bool:
    return all(tensor.device.type == "cpu" for tensor in tensors)


@dataclass
class _Sum:
    """A pending sum of one stage's gradients over all pipelines, flat in host memory."""

    flat: Tensor
    parts: dict[int, Tensor]
    """Of this pipeline's slice, by pipeline."""
    received: list[Handle] = field(default_factory=list)
    sums: list[Handle] = field(default_factory=list)
    own_is_ready: threading.Event = field(default_factory=threading.Event)
    """Set when this worker's own gradients are in host memory."""


class GradientSync:
    """Sums the gradients of one worker's stages over all pipelines."""

    def __init__(self, links: WorkerLinks, device: Device, who: str) -> None:
        self.links, self.device, self.who = links, device, who
        self.role = links.role
        self._sums: dict[tuple[int, int], _Sum] = {}

    def begin(self, step: int, stage: int, gradients: Sequence[Tensor]) -> None:
        """Post the receives and send every pipeline its slice of this worker's gradients. Returns at once."""
        if not self.role.other_pipelines:
            return
        num_values = sum(gradient.numel() for gradient in gradients)
        cut = slices(num_values, self.role.num_pipelines)
        flat = self.device.buffer((num_values,), torch.float32)
        mine = cut[self.role.pipeline]
        parts = {c: torch.empty(mine.stop - mine.start) for c in self.role.other_pipelines}
        total = _Sum(flat, parts)
        for c in self.role.other_pipelines:
            total.received.append(self._recv(c, (step, stage, c, PARTS), parts[c]))
            total.sums.append(self._recv(c, (step, stage, c, SUMS), flat[cut[c]]))
        self._sums[step, stage] = total

        def send_parts(host: Tensor) -> None:
            flat_own = host.view(-1)
            parts[self.role.pipeline] = flat_own[mine]
            for c in self.role.other_pipelines:
                self._send(c, (step, stage, self.role.pipeline, PARTS), flat_own[cut[c]])
            total.own_is_ready.set()

        own = torch.cat([gradient.flatten() for gradient in gradients])
        if is_on_host(gradients):
            send_parts(own)
        else:
            self.device.download(own, send_parts)

    def finish(self, step: int, stage: int, gradients: Sequence[Tensor], wait: Wait) -> tuple[list[Tensor], int]:
        """The sums over all pipelines, in the shapes and on the device of `gradients`, and when the last arrived."""
        if not self.role.other_pipelines:
            return list(gradients), 0
        total = self._sums.pop((step, stage))
        wait(total.received)
        if not total.own_is_ready.wait(self.links.patience_s):
            raise WorkerError(
                f"SYNC of step {step} on {self.who}: its own gradients of stage {stage} were not copied from the "
                f"device within {self.links.patience_s:g} s"
            )
        mine = slices(len(total.flat), self.role.num_pipelines)[self.role.pipeline]
        added = total.flat[mine]
        added.zero_()
        for c in sorted(total.parts):
            added += total.parts[c]
        tag = (step, stage, self.role.pipeline, SUMS)
        sent = [self._send(c, tag, added) for c in self.role.other_pipelines]
        wait([*total.sums, *sent])  # the sent slice is part of the sums, which may be clipped in place from now on
        on_device = total.flat if is_on_host(gradients) else self.device.upload(total.flat).get()
        ends = list(itertools.accumulate(gradient.numel() for gradient in gradients))
        summed = [on_device[end - g.numel() : end].view(g.shape) for end, g in zip(ends, gradients, strict=True)]
        return summed, max(handle.end_ns for handle in (*total.received, *total.sums))

    def _send(self, pipeline: int, tag: tuple[int, int, int, int], values: Tensor) -> Handle:
        what = f"{self.who} sends gradients of step {tag[0]} to pipeline {pipeline}"
        return self.links.send_to(GRADIENTS, pipeline, self.role.rank, tag, bytes_of(values), what)

    def _recv(self, pipeline: int, tag: tuple[int, int, int, int], values: Tensor) -> Handle:
        what = f"SYNC of step {tag[0]} on {self.who} waits for gradients of p{pipeline}.s{self.role.rank}"
        return self.links.recv_from(GRADIENTS, pipeline, self.role.rank, tag, bytes_of(values), what)


class TiedEnds:
    """Joins the gradients of tied embeddings whose ends are on two workers."""

    def __init__(self, links: WorkerLinks, who: str) -> None:
        self.links, self.who = links, who
        self.role = links.role

    def join(self, step: int, name: str, gradient: Tensor, wait: Wait) -> tuple[Tensor, int]:
        """The sum of the local end's gradient (`name`) and the other end's, in host memory; when it arrived."""
        role = self.role
        assert role.opposite_end is not None, "only for ends on two workers"
        mine = gradient.detach().to("cpu").contiguous().view(-1)
        cut = slices(len(mine), role.num_pipelines)
        whole, theirs = torch.empty_like(mine), torch.empty(cut[role.pipeline].stop - cut[role.pipeline].start)
        what = f"SYNC of step {step} on {self.who} waits for the other end of the tied embeddings"
        tag = (step, 0, role.pipeline, ENDS)
        came = self.links.recv_from(TIED, role.pipeline, role.opposite_end, tag, bytes_of(theirs), what)
        others = [
            self.links.recv_from(GRADIENTS, c, role.rank, (step, 0, c, HALVES), bytes_of(whole[cut[c]]), what)
            for c in role.other_pipelines
        ]
        own = mine[cut[role.pipeline]]
        sent = [self.links.send_to(TIED, role.pipeline, role.opposite_end, tag, bytes_of(own), what)]
        wait([came])
        ends = (own, theirs) if name == TIED_EMBEDDING else (theirs, own)
        half = joined(*ends)
        whole[cut[role.pipeline]] = half
        tag = (step, 0, role.pipeline, HALVES)
        sent += [self.links.send_to(GRADIENTS, c, role.rank, tag, bytes_of(half), what) for c in role.other_pipelines]
        wait([*others, *sent])
        return whole.view(gradient.shape), max(handle.end_ns for handle in (came, *others))


class GlobalNorm:
    """The global norm of the gradients: all stages send their squares to the last stage, which sends the norm back."""

    def __init__(self, links: WorkerLinks, who: str) -> None:
        self.links, self.who, self.role = links, who, links.role

    def take(self, step: int, squares: Sequence[float], wait: Wait) -> tuple[float, int]:
        """The norm, and when it arrived. The sum is exact, so the order does not matter."""
        last, moments = self.role.program.num_ranks - 1, [0]
        gathered = np.array(squares, np.float64)
        if self.role.rank > 0:
            earlier, at_ns = self._recv(self.role.rank - 1, (step, UP, 0, 0), wait)
            gathered = np.concatenate([earlier, gathered])
            moments.append(at_ns)
        if self.role.rank < last:
            self._send(self.role.rank + 1, (step, UP, 0, 0), gathered)
            norm, at_ns = self._recv(self.role.rank + 1, (step, DOWN, 0, 0), wait)
            moments.append(at_ns)
        else:
            norm = np.array([global_norm([gathered.tolist()])])
        if self.role.rank > 0:
            self._send(self.role.rank - 1, (step, DOWN, 0, 0), norm)
        return float(norm[0]), max(moments)

    def _send(self, rank: int, tag: tuple[int, int, int, int], values: np.ndarray) -> None:
        what = f"{self.who} sends the norm of step {tag[0]} to p{self.role.pipeline}.s{rank}"
        self.links.send_to(CONTROL, self.role.pipeline, rank, tag, values.tobytes(), what)

    def _recv(self, rank: int, tag: tuple[int, int, int, int], wait: Wait) -> tuple[np.ndarray, int]:
        what = f"NORM of step {tag[0]} on {self.who} waits for p{self.role.pipeline}.s{rank}"
        handle = self.links.recv_from(CONTROL, self.role.pipeline, rank, tag, None, what)
        wait([handle])
        assert handle.buffer is not None
        return np.frombuffer(handle.buffer, np.float64), handle.end_ns
