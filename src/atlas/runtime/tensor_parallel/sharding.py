"""What one rank holds of a worker whose stages are sharded over several processes: the common part of leader and
followers. All ranks call every method here, in the same order; the leader gets the results.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from atlas.runtime.assignment import Assignment
from atlas.runtime.checkpoint.state import LayerState
from atlas.runtime.collectives import GroupStore, torch_exchanges
from atlas.runtime.device import Device
from atlas.runtime.exchange import Exchange
from atlas.runtime.group_sum import LeaderGroupSum
from atlas.runtime.models.parallel import parallelize
from atlas.runtime.models.task import DecoderTask
from atlas.runtime.stage_set import StageSet
from atlas.runtime.tensor_parallel.group import LEADER, ParameterShards, TensorGroup, gather_state, gathered
from atlas.runtime.topology import WorkerRole


class ShardedStageSet(StageSet):
    """One rank's part of the stages."""

    def __init__(self, assignment: Assignment, role: WorkerRole, device: Device, group: TensorGroup) -> None:
        self.group = group
        super().__init__(assignment, role, device)
        named = [item for stage in self.stages.values() for item in stage.module.named_parameters()]
        self.shares = ParameterShards(group.rank, group.size, named)

    def _built(self, task: DecoderTask) -> DecoderTask:
        return replace(task, shard=partial(parallelize, mesh=self.group.mesh))

    # ---- the end of an iteration -------------------------------------------------------------------------------------
    def open_exchanges(self, store: GroupStore) -> Mapping[int, Exchange]:
        """Every rank sums its own shards with the same rank of the other pipelines."""
        return torch_exchanges(self.assignment, self.role, store, self.group.rank)

    def join_pipelines(self, host: str, port: int, prefix: str) -> None:
        """A follower's part of `PipelineGroup.join`."""
        group_sum = LeaderGroupSum(self.group, None) if self.role.groups else None
        self.sum_by(self.open_exchanges(GroupStore(host, port, prefix)), group_sum)

    def gather_gradients(self, number: int) -> list[Tensor]:
        """All ranks' gradients of a stage, as they lie in flat memory, in host memory on the leader."""
        return self.group.gather(self.stages[number].flat.gradients)

    def scatter_sums(self, number: int, sums: Sequence[Tensor] = ()) -> None:
        """Give each rank its part of the leader's `sums`."""
        stage = self.stages[number]
        stage.flat.gradients.copy_(self.group.scatter(sums, stage.flat.gradients))
        stage.adopt()

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
