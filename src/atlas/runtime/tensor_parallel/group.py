"""The processes that share each stage of one worker by tensor parallelism, on one node: one leads, the others follow.

Which part of a parameter each rank holds, and how parts travel inside the node: by torch.distributed. The leader is the
worker that peers connect to (`leader`, `follower`). Knows ranks and tensors; not ops, not the WAN.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from atlas.runtime.checkpoint.state import LayerState
from atlas.runtime.collectives import GroupStore
from atlas.runtime.models.shards import sharded_dimension

LOOPBACK = "lo" if sys.platform == "linux" else "lo0"
LEADER = 0


class TensorGroup:
    """This process's rank in the group, and the collectives that torch does not do itself (`models.parallel`)."""

    def __init__(self, rank: int, size: int, found: GroupStore, place: str, patience_s: float) -> None:
        """`found`: the leader's store on loopback."""
        self.rank, self.size, self.place = rank, size, torch.device(place)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", LOOPBACK)
        store = found.open(patience_s)
        backend = "gloo"
        if self.place.type == "cuda":
            torch.cuda.set_device(self.place)
            backend = "cpu:gloo,cuda:nccl"
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=store.timeout)  # type: ignore[attr-defined]
        self.mesh: DeviceMesh = init_device_mesh(self.place.type, (size,))

    def share(self, tensor: Tensor) -> Tensor:
        """The leader's tensor, on every rank."""
        dist.broadcast(tensor, LEADER)
        return tensor

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """The tensors of all ranks in host memory, on the leader; empty elsewhere. All have one shape."""
        mine = tensor.detach().cpu().contiguous()
        found = [torch.empty_like(mine) for _ in range(self.size)] if self.rank == LEADER else []
        dist.gather(mine, found or None, LEADER)
        return found

    def scatter(self, tensors: Sequence[Tensor], like: Tensor) -> Tensor:
        """Each rank's part of the leader's host tensors, on its device; `like` has its shape."""
        mine = torch.empty(like.shape, dtype=like.dtype)
        dist.scatter(mine, [tensor.contiguous() for tensor in tensors] or None, LEADER)
        return mine.to(self.place)


def place_of(place: str, rank: int) -> str:
    """The device of a rank: a group has consecutive GPUs."""
    kind, _, number = place.partition(":")
    return f"{kind}:{int(number or 0) + rank}" if kind == "cuda" else place


class ParameterShards:
    """Which part of each parameter a rank holds."""

    def __init__(self, rank: int, size: int, parameters: Iterable[tuple[str, Tensor]]) -> None:
        """`parameters`: of a module that `models.parallel` has sharded."""
        self.rank, self.size = rank, size
        self.dimension: dict[str, int | None] = {name: sharded_dimension(p) for name, p in parameters}
        """The sharded dimension; None: every rank holds the whole parameter."""

    def is_sharded(self, name: str) -> bool:
        return self.dimension[name] is not None

    def of(self, name: str, whole: Tensor) -> Tensor:
        """This rank's part of a parameter, or of what an optimizer keeps for it; the rest can be freed."""
        dimension = self.dimension[name]
        return whole if dimension is None or not whole.dim() else whole.chunk(self.size, dimension)[self.rank].clone()

    def parts(self, name: str, whole: Tensor) -> list[Tensor]:
        """All ranks' parts of a sharded parameter."""
        dimension = self.dimension[name]
        assert dimension is not None, f"{name} is not sharded"
        return [part.contiguous() for part in whole.chunk(self.size, dimension)]

    def join(self, name: str, parts: Sequence[Tensor]) -> Tensor:
        """The whole parameter from all ranks' parts."""
        dimension = self.dimension[name]
        return parts[LEADER] if dimension is None else torch.cat(list(parts), dimension)

    def of_state(self, state: LayerState) -> LayerState:
        """This rank's part of a saved layer; unknown parameters stay whole."""

        def mine(name: str, tensor: Tensor) -> Tensor:
            return self.of(name, tensor) if name in self.dimension else tensor

        return LayerState(
            {name: mine(name, tensor) for name, tensor in state.parameters.items()},
            {name: {entry: mine(name, t) for entry, t in kept.items()} for name, kept in state.optimizer.items()},
        )


def gather_state(group: TensorGroup, shares: ParameterShards, state: LayerState) -> LayerState:
    """The whole layer in host memory on the leader, an empty one elsewhere. All ranks must call it."""
    parameters = gathered(group, shares, state.parameters)
    optimizer: dict[str, dict[str, Tensor]] = {}
    for name, kept in state.optimizer.items():
        for entry, tensor in kept.items():
            whole = gathered(group, shares, {name: tensor})
            if whole:
                optimizer.setdefault(name, {})[entry] = whole[name]
    return LayerState(parameters, optimizer)


def gathered(group: TensorGroup, shares: ParameterShards, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Whole parameters, or their optimizer state, in host memory on the leader; empty elsewhere."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if not shares.is_sharded(name):
            parts = [tensor.detach().cpu()] if group.rank == LEADER else []
        else:
            parts = group.gather(tensor)
        if parts:
            found[name] = shares.join(name, parts)
    return found
