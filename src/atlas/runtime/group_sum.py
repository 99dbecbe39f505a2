"""Sums gradients over groups of pipelines, over the WAN transport: each worker exchanges its slice, which its own group
has summed, with the workers of other groups that have the same values (`group_sum_plan`). All workers of a group send
at once, and a stage begins when its own sum is complete, while other stages still compute.

Knows slices and links; not what lies in them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from atlas.runtime.group_sum_plan import GroupPeer, group_parts, rounds
from atlas.runtime.links import WorkerLinks
from atlas.runtime.models.config import DecoderConfig
from atlas.runtime.topology import GROUP_SUMS
from atlas.runtime.transfers import bytes_of
from atlas.runtime.waits import Wait
from atlas.wan.transport.base import Handle, Key

if TYPE_CHECKING:
    from atlas.runtime.tensor_parallel.group import TensorGroup


class GroupSum(Protocol):
    def sum(self, step: int, mine: Tensor, wait: Wait) -> int:
        """Replace this pipeline's slice, in host memory, by the sum over all groups; returns when the last part
        arrived."""
        ...


class RingGroupSum:
    """Of a worker with one stage."""

    def __init__(self, links: WorkerLinks, config: DecoderConfig, tp: int = 1) -> None:
        self.links, self.role, self.tp = links, links.role, tp
        role = self.role
        count = len(role.groups)
        self._after, self._before = (role.groups[(role.group + step) % count] for step in (1, -1))
        self._rounds = rounds(role.group, count)
        self._plan = group_parts(role, config, tp)

    def sum(self, step: int, mine: Tensor, wait: Wait) -> int:
        """`mine`: of all tensor-parallel ranks, one after the other."""
        ranks, arrived_ns = mine.view(self.tp, -1), 0
        sent: list[Handle] = []
        what = f"SYNC of step {step} on {self.role.who} waits for gradients"
        for number, (sends, receives, adds) in enumerate(self._rounds):
            arriving = list(self._plan.received[receives].items())
            buffers = [torch.empty(self.tp, sum(_length(part) for part in parts)) for _, parts in arriving]
            handles = [
                self._recv(peer, (step, number), buffer, what)
                for (peer, _), buffer in zip(arriving, buffers, strict=True)
            ]
            for peer, parts in self._plan.sent[sends].items():
                values = torch.cat([ranks[:, part] for part in parts], 1)
                sent.append(self._send(peer, (step, number), values))
            wait(handles)
            for (_, parts), buffer in zip(arriving, buffers, strict=True):
                for part, values in zip(parts, torch.split(buffer, [*map(_length, parts)], 1), strict=True):
                    ranks[:, part] = ranks[:, part] + values if adds else values
            arrived_ns = max([arrived_ns, *(handle.end_ns for handle in handles)])
        wait(sent)
        return arrived_ns

    def _send(self, peer: GroupPeer, key: tuple[int, int], values: Tensor) -> Handle:
        node = self._after.node_of(*peer)
        what = f"{self.role.who} sends gradients of step {key[0]} to {node}"
        return self.links.main.send(Key(node, GROUP_SUMS, (*key, self.role.rank, 0)), bytes_of(values), what=what)

    def _recv(self, peer: GroupPeer, key: tuple[int, int], values: Tensor, what: str) -> Handle:
        node = self._before.node_of(*peer)
        return self.links.main.recv(Key(node, GROUP_SUMS, (*key, peer.rank, 0)), bytes_of(values), f"{what} of {node}")


def _length(part: slice) -> int:
    return int(part.stop - part.start)


class LeaderGroupSum:
    """Of one rank of a tensor-parallel worker: its leader has the links and exchanges the slices of all ranks."""

    def __init__(self, group: TensorGroup, leader: GroupSum | None) -> None:
        """`leader`: on the leader."""
        self.group, self.leader = group, leader

    def sum(self, step: int, mine: Tensor, wait: Wait) -> int:
        parts, arrived_ns = self.group.gather(mine), 0
        if self.leader is not None:
            whole = torch.cat(parts)
            arrived_ns = self.leader.sum(step, whole, wait)
            parts = list(whole.chunk(self.group.size))
        mine.copy_(self.group.scatter(parts, mine))
        return arrived_ns
