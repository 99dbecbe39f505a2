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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from atlas.runtime.device import Device
from atlas.runtime.exchange import ENDS, HALVES, NORMS, PARTS, SUMS, Exchange, ExchangeKey
from atlas.runtime.group_sum import GroupSum
from atlas.runtime.group_sum_plan import norm_receivers
from atlas.runtime.links import WorkerLinks
from atlas.runtime.models.decoder import TIED_EMBEDDING
from atlas.runtime.optimizer import global_norm
from atlas.runtime.topology import CONTROL, GRADIENTS, GROUP_SUMS, TIED
from atlas.runtime.transfers import bytes_of
from atlas.runtime.waits import Pending, Wait
from atlas.wan.transport.base import Handle, Key

UP, DOWN = range(2)


def slices(length: int, count: int) -> list[slice]:
    """`count` slices of nearly equal length, determined by the two numbers alone."""
    edges = [length * i // count for i in range(count + 1)]
    return [slice(a, b) for a, b in itertools.pairwise(edges)]


def own_slice(exchange: Exchange, flat: Tensor) -> slice:
    """Of the rank, in a tensor with as many values for each rank."""
    length = len(flat) // exchange.size
    return slice(exchange.rank * length, (exchange.rank + 1) * length)


class CombinedHandle(Handle):
    """Done when all handles passed to `follow` are done."""

    def follow(self, others: Sequence[Pending]) -> None:
        handles = [other for other in others if isinstance(other, Handle)]
        assert len(handles) == len(others), "polled operations are awaited directly"
        left, lock = len(handles), threading.Lock()

        def ended(handle: Handle) -> None:
            nonlocal left
            with lock:
                left -= 1
            if left == 0 or handle.error is not None:
                self.finish(handle.error)

        for handle in handles:
            handle.on_done(ended)


@dataclass
class _Sum:
    """A pending sum of one stage's gradients over all pipelines."""

    flat: Tensor
    """This worker's gradients; later the sums."""
    parts: Tensor | None = None
    """Of this pipeline's slice, one of each pipeline; or, where the exchange adds, the sum."""
    arrived: Sequence[Pending] = ()
    """The exchange that fills `parts`."""
    sent: Tensor | None = None
    """`flat`, where the exchange takes its tensors."""


class GradientSync:
    """Sums the gradients of one process's stages over all pipelines, in place.

    Each pipeline adds its slice of the gradients in the order of pipelines, here or in the exchange, or has the backend
    add (`sums: fast`).
    """

    def __init__(
        self, exchanges: Mapping[int, Exchange], device: Device, who: str, group_sum: GroupSum | None = None
    ) -> None:
        """`exchanges`: by stage. `group_sum`: with other groups of pipelines."""
        self.exchanges, self.device, self.who, self.group_sum = exchanges, device, who, group_sum
        self._sums: dict[tuple[int, int], _Sum] = {}

    def begin(self, step: int, stage: int, flat: Tensor) -> None:
        """Send every pipeline its slice of these gradients, which must not change before `finish`. Returns at once.

        `flat` has as many values for each pipeline.
        """
        exchange, what = self.exchanges[stage], self._what(step)
        total = self._sums[step, stage] = _Sum(flat)

        def exchange_parts(mine: Tensor) -> Sequence[Pending]:
            total.sent, key = mine, ExchangeKey(step, stage, PARTS)
            if not exchange.reduces:
                total.parts = torch.empty_like(mine)
                return exchange.swap(key, mine, total.parts, None, what)
            own = mine[own_slice(exchange, mine)]
            total.parts = own if exchange.on_host else torch.empty_like(own)
            return exchange.reduce(key, mine, total.parts, what)

        if exchange.on_host and flat.device.type != "cpu":
            arrived = CombinedHandle(f"{what} (its own included, copied from the device)")
            total.arrived = [arrived]
            self.device.download(flat, lambda host: arrived.follow(exchange_parts(host)))
        else:
            total.arrived = exchange_parts(flat)

    def finish(self, step: int, stage: int, wait: Wait, *, whole: bool) -> int:
        """Wait until the gradients are the sums: all, or with `whole` false those of this pipeline's slice. Returns
        when the last arrived."""
        total, exchange = self._sums.pop((step, stage)), self.exchanges[stage]
        wait(total.arrived)
        assert total.sent is not None, "it was exchanged"
        assert total.parts is not None, "it was exchanged"
        own = own_slice(exchange, total.flat)
        added, gathered = _add(total.parts, 1 if exchange.reduces else exchange.size), list[Pending]()
        met_ns = 0
        if self.group_sum is not None:
            added = added.cpu()
            met_ns = self.group_sum.sum(step, added, wait)
        if whole:
            mine = total.sent[own].copy_(added)
            gathered = exchange.gather(ExchangeKey(step, stage, SUMS), mine, total.sent, self._what(step))
            wait(gathered)  # the sent slice is part of the sums, which may be clipped in place from now on
            if total.sent is not total.flat:
                total.flat.copy_(self.device.upload(total.sent)())
        else:
            total.flat[own] = added if added.device == total.flat.device else self.device.upload(added)()
        return max(_last_ns(total.arrived), met_ns, _last_ns(gathered))

    def _what(self, step: int) -> str:
        return f"SYNC of step {step} on {self.who} waits for gradients"


def _add(parts: Tensor, count: int) -> Tensor:
    """The sum of `count` equal parts, in their order."""
    first, *others = parts.view(count, -1).unbind()
    for part in others:
        first.add_(part)
    return first


def _last_ns(pending: Sequence[Pending]) -> int:
    return max((each.end_ns for each in pending), default=0)


class TiedEnds:
    """Joins the gradients of tied embeddings whose ends are on two workers."""

    def __init__(self, links: WorkerLinks) -> None:
        self.links, self.role = links, links.role

    def join(self, step: int, name: str, gradient: Tensor, wait: Wait) -> tuple[Tensor, int]:
        """The sum of the local end's gradient (`name`) and the other end's, in host memory; when it arrived."""
        role = self.role
        assert role.opposite_end is not None, "only for ends on two workers"
        mine = gradient.detach().to("cpu").contiguous().view(-1)
        cut = slices(len(mine), role.num_pipelines)
        whole, theirs = torch.empty_like(mine), torch.empty(cut[role.pipeline].stop - cut[role.pipeline].start)
        what = f"SYNC of step {step} on {role.who} waits for the other end of the tied embeddings"
        tag = (step, 0, role.pipeline, ENDS)
        came = self.links.recv_from(TIED, role.pipeline, role.opposite_end, tag, bytes_of(theirs), what)
        others = [
            self.links.recv_from(GRADIENTS, c, role.rank, (step, 0, c, HALVES), bytes_of(whole[cut[c]]), what)
            for c in role.other_pipelines
        ]
        own = mine[cut[role.pipeline]]
        sent = [self.links.send_to(TIED, role.pipeline, role.opposite_end, tag, bytes_of(own), what)]
        wait([came])
        # The embedding's first on both workers, which so get the same bits, take the same step and stay equal.
        half = own + theirs if name == TIED_EMBEDDING else theirs + own
        whole[cut[role.pipeline]] = half
        tag = (step, 0, role.pipeline, HALVES)
        sent += [self.links.send_to(GRADIENTS, c, role.rank, tag, bytes_of(half), what) for c in role.other_pipelines]
        wait([*others, *sent])
        return whole.view(gradient.shape), max(handle.end_ns for handle in (came, *others))


class GlobalNorm:
    """The global norm of the gradients: all stages send their squares to the last stage, which sends the norm back."""

    def __init__(self, links: WorkerLinks) -> None:
        self.links, self.role = links, links.role

    def take(self, step: int, squares: Sequence[float], wait: Wait) -> tuple[float, int]:
        """The norm, and when it arrived. The sum is exact, so the order does not matter.

        `squares`: of this pipeline's slices; the last stages of all pipelines exchange theirs. Other groups get the
        norm of the first one: they divide the gradients into other slices, whose squares differ in the last bit.
        """
        last, moments = self.role.program.num_ranks - 1, [0]
        gathered = np.array(squares, np.float64)
        computes = self.role.group == 0
        if self.role.rank > 0 and computes:
            earlier, at_ns = self._recv(self.role.rank - 1, (step, UP, 0, 0), wait)
            gathered = np.concatenate([earlier, gathered])
            moments.append(at_ns)
        if self.role.rank < last:
            if computes:
                self._send(self.role.rank + 1, (step, UP, 0, 0), gathered)
            norm, at_ns = self._recv(self.role.rank + 1, (step, DOWN, 0, 0), wait)
            moments.append(at_ns)
        elif computes:
            of_others, at_ns = self._exchange(step, gathered, wait)
            moments.append(at_ns)
            norm = np.array([global_norm([gathered.tolist(), *of_others])])
            for group, peer in norm_receivers(self.role):
                what = f"{self.role.who} sends the norm of step {step} to another group"
                self.links.main.send(
                    Key(group.node_of(*peer), GROUP_SUMS, (step, 0, 0, NORMS)), norm.tobytes(), what=what
                )
        else:
            norm, at_ns = self._of_first_group(step, wait)
            moments.append(at_ns)
        if self.role.rank > 0:
            self._send(self.role.rank - 1, (step, DOWN, 0, 0), norm)
        return float(norm[0]), max(moments)

    def _exchange(self, step: int, squares: np.ndarray, wait: Wait) -> tuple[list[list[float]], int]:
        """The squares of the other pipelines, and when the last arrived."""
        role, what = self.role, f"NORM of step {step} on {self.role.who} waits for other pipelines"
        handles = [
            self.links.recv_from(GRADIENTS, c, role.rank, (step, 0, c, NORMS), None, what) for c in role.other_pipelines
        ]
        for c in role.other_pipelines:
            tag = (step, 0, role.pipeline, NORMS)
            self.links.send_to(GRADIENTS, c, role.rank, tag, squares.tobytes(), f"{role.who} sends squares")
        if handles:
            wait(handles)
        found = [np.frombuffer(handle.buffer or b"", np.float64).tolist() for handle in handles]
        return found, _last_ns(handles)

    def _of_first_group(self, step: int, wait: Wait) -> tuple[np.ndarray, int]:
        """The norm, from the last stage of the first group's first pipeline."""
        first = self.role.groups[0]
        node = first.node_of(0, len(first.rank_dc) - 1)
        what = f"NORM of step {step} on {self.role.who} waits for {node}"
        return _values(self.links.main.recv(Key(node, GROUP_SUMS, (step, 0, 0, NORMS)), None, what), wait)

    def _send(self, rank: int, tag: tuple[int, int, int, int], values: np.ndarray) -> None:
        what = f"{self.role.who} sends the norm of step {tag[0]} to p{self.role.pipeline}.s{rank}"
        self.links.send_to(CONTROL, self.role.pipeline, rank, tag, values.tobytes(), what)

    def _recv(self, rank: int, tag: tuple[int, int, int, int], wait: Wait) -> tuple[np.ndarray, int]:
        what = f"NORM of step {tag[0]} on {self.role.who} waits for p{self.role.pipeline}.s{rank}"
        return _values(self.links.recv_from(CONTROL, self.role.pipeline, rank, tag, None, what), wait)


def _values(handle: Handle, wait: Wait) -> tuple[np.ndarray, int]:
    """What was received, and when."""
    wait([handle])
    return np.frombuffer(handle.buffer or b"", np.float64), handle.end_ns
