"""What one rank holds of a worker whose stages are sharded over several processes: the common part of leader and
followers. All ranks call every method here, in the same order; the leader gets the results.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from atlas.runtime.assignment import Assignment
from atlas.runtime.checkpoint import LayerState
from atlas.runtime.collectives import GroupStore, torch_exchanges
from atlas.runtime.device import Device
from atlas.runtime.exchange import Exchange
from atlas.runtime.models.decoder import Decoder
from atlas.runtime.models.parallel import parallelize
from atlas.runtime.models.task import DecoderTask
from atlas.runtime.stage_set import StageSet
from atlas.runtime.tensor_parallel.group import LEADER, ParameterShards, TensorGroup, gather_state, gathered
from atlas.runtime.wiring import WorkerRole


@dataclass(frozen=True)
class ShardedTask(DecoderTask):
    """The same task with its stages sharded over a mesh."""

    mesh: DeviceMesh | None = None

    def build_stage(self, stage: int, num_stages: int) -> Decoder:
        assert self.mesh is not None
        return parallelize(super().build_stage(stage, num_stages), self.mesh)


class ShardedStageSet(StageSet):
    """One rank's part of the stages."""

    def __init__(self, assignment: Assignment, role: WorkerRole, device: Device, group: TensorGroup) -> None:
        self.group = group
        super().__init__(assignment, role, device)
        named = [item for stage in self.stages.values() for item in stage.module.named_parameters()]
        self.shares = ParameterShards(group.rank, group.size, named)

    def _built(self, task: DecoderTask) -> DecoderTask:
        return ShardedTask(**vars(task), mesh=self.group.mesh)

    # ---- the end of an iteration -------------------------------------------------------------------------------------
    def open_exchanges(self, store: GroupStore) -> Mapping[int, Exchange]:
        """Every rank sums its own shards with the same rank of the other pipelines."""
        return torch_exchanges(self.assignment, self.role, store, self.group.rank)

    def join_pipelines(self, host: str, port: int, prefix: str) -> None:
        """A follower's part of `PipelineGroup.join`."""
        self.sum_by(self.open_exchanges(GroupStore(host, port, prefix)))

    def gather_gradients(self, number: int) -> list[Tensor]:
        """A stage's gradients in host memory: unsharded ones once; then the parts of every rank, flat."""
        stage = self.stages[number]
        total = dict(zip(stage.named_parameters, stage.gradients.total(), strict=True))
        cut = torch.cat([gradient.flatten() for name, gradient in total.items() if self.shares.is_sharded(name)])
        parts = self.group.gather(cut)
        return [*(gradient.cpu() for name, gradient in total.items() if not self.shares.is_sharded(name)), *parts]

    def scatter_sums(self, number: int, sums: Sequence[Tensor] = ()) -> None:
        """Give each rank its part of the leader's `sums`, in the layout of `gather_gradients`."""
        named = self.stages[number].named_parameters

        def num_values(names: Sequence[str]) -> int:
            return sum(named[name].numel() for name in names)

        whole = [name for name in named if not self.shares.is_sharded(name)]
        cut = [name for name in named if self.shares.is_sharded(name)]
        flat = torch.cat([s.flatten() for s in sums[: len(whole)]]) if sums else torch.empty(num_values(whole))
        self.group.share(flat)
        self._adopt(number, whole, flat.to(self.group.place))
        self._adopt(number, cut, self.group.scatter(sums[len(whole) :], torch.empty(num_values(cut))))

    def _adopt(self, number: int, names: Sequence[str], flat: Tensor) -> None:
        """Set the gradients from one flat tensor."""
        stage, end = self.stages[number], 0
        for name in names:
            gradient = stage.named_parameters[name].grad = stage.flat.gradient_of[name]
            begin, end = end, end + gradient.numel()
            gradient.copy_(flat[begin:end].view(gradient.shape))

    def gather_tied(self, name: str) -> Tensor | None:
        parts = self.group.gather(super().tied_gradient(name))
        return self.shares.join(name, parts) if parts else None

    def scatter_tied(self, name: str, whole: Tensor | None = None) -> None:
        parts = [] if whole is None else self.shares.parts(name, whole)
        super().adopt_tied(name, self.group.scatter(parts, super().tied_gradient(name)))

    def squares(self) -> list[float]:
        """Squares of sharded parameters from all ranks; of others from the leader only (`Stage.counted`)."""
        mine = super().squares()
        num_parts = sum(map(self.shares.is_sharded, self._counted_gradients()))
        parts = [0.0] * num_parts if self.group.rank == LEADER else mine
        gathered_squares = self.group.gather(torch.tensor(parts, dtype=torch.float64))
        return [*mine, *(square for part in gathered_squares[1:] for square in part.tolist())]

    def step(self, num_done: int) -> None:
        super().step(num_done)
        if self.group.rank != LEADER:  # only the leader reports losses
            for stage in self.stages.values():
                stage.forget_losses()

    # ---- state -------------------------------------------------------------------------------------------------------
    def states(self, layers: Collection[str]) -> dict[str, LayerState]:
        found = super().states(layers)
        return {layer: gather_state(self.group, self.shares, state) for layer, state in found.items()}

    def of_state(self, state: LayerState) -> LayerState:
        return self.shares.of_state(state)

    def weights(self) -> dict[str, Tensor]:
        return gathered(self.group, self.shares, self.parameters)
