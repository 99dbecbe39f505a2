"""The workers that hold the same stages, one of each pipeline of a group: how they find each other and which exchange
they use; and how the group sums with others.

By torch.distributed, through a store of the first pipeline's worker, or over the WAN transport. The store's address and
the prefix of its keys, a secret, travel over the transport, which authenticates. Knows the assignment and links; not
what is exchanged.
"""

from __future__ import annotations

import json
import secrets
import socket
from typing import NamedTuple

import torch

from atlas.errors import AtlasError
from atlas.runtime.assignment import Assignment
from atlas.runtime.collectives import START_S, GroupStore, store_listener
from atlas.runtime.exchange import Exchange, TransportExchange
from atlas.runtime.group_sum import RingGroupSum
from atlas.runtime.links import WorkerLinks
from atlas.runtime.stage_set import StageSet
from atlas.runtime.topology import GRADIENTS

FOUND = (-2, 0, 0, 0)
"""The tag of the message with the store's address."""


class RankSoftware(NamedTuple):
    """What the ranks of a process group must have in common; and where."""

    host: str
    torch: str
    nccl: str
    """Empty without a GPU."""

    @classmethod
    def here(cls) -> RankSoftware:
        nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else ""  # type: ignore[no-untyped-call]
        return cls(socket.gethostname(), torch.__version__, nccl)

    def __str__(self) -> str:
        return f"{self.host} has torch {self.torch}" + (f" with NCCL {self.nccl}" if self.nccl else "")


def require_same(first: RankSoftware, other: RankSoftware) -> None:
    if first[1:] != other[1:]:
        raise AtlasError(
            f"hosts of one datacenter have different software: {first}, {other}. Gradients are summed by torch there: "
            "install the same versions, or train with sums: transport"
        )


class PipelineGroup:
    """`join` when all links are connected."""

    def __init__(self, assignment: Assignment, links: WorkerLinks) -> None:
        self.assignment, self.role, self.links = assignment, links.role, links
        self._exchanges: dict[int, Exchange] = {}

    def join(self, stage_set: StageSet) -> None:
        """Returns when all pipelines have joined."""
        role, training = self.role, self.assignment.training
        if role.num_pipelines == 1 and not role.groups:
            return
        if training.sums == "transport" or role.num_pipelines == 1:
            self._exchanges = dict.fromkeys(role.stages, TransportExchange(self.links))
        else:
            self._exchanges = dict(stage_set.open_exchanges(self._open() if role.pipeline == 0 else self._find()))
        group_sum = RingGroupSum(self.links, training.model.config, self.assignment.tp) if role.groups else None
        stage_set.sum_by(self._exchanges, group_sum)

    def _open(self) -> GroupStore:
        """Start the store, and send its address to the other workers."""
        host = self.assignment.sums_listen
        listener, port = store_listener(host)
        store = GroupStore(host, port, secrets.token_hex(16), listener)
        for pipeline in self.role.other_pipelines:
            what = f"{self.role.who} sends the address of the store to pipeline {pipeline}"
            message = json.dumps([host, port, store.prefix, RankSoftware.here()]).encode()
            self.links.send_to(GRADIENTS, pipeline, self.role.rank, FOUND, message, what)
        return store

    def _find(self) -> GroupStore:
        what = f"{self.role.who} waits for the address of the store of p0.s{self.role.rank}"
        message = self.links.recv_from(GRADIENTS, 0, self.role.rank, FOUND, None, what).wait(START_S)
        host, port, prefix, software = json.loads(bytes(message or b""))
        require_same(RankSoftware(*map(str, software)), RankSoftware.here())
        return GroupStore(str(host), int(port), str(prefix))

    def close(self) -> None:
        """Peers that wait for this worker fail at once."""
        for exchange in self._exchanges.values():
            exchange.close()
