"""The stages of one worker in one process, with their parameters and the optimizer.

Where stages are sharded over several processes (`leader`), every call runs on all of them. Knows models and optimizers;
not ops, links or time.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from atlas.ir.program import BACKWARDS, Kind
from atlas.runtime.assignment import Assignment
from atlas.runtime.checkpoint.state import LayerState, restore, share, states_of
from atlas.runtime.collectives import GroupStore, torch_exchanges
from atlas.runtime.compiling import available, load_ahead, require_fixed_kernels
from atlas.runtime.device import Device
from atlas.runtime.exchange import Exchange
from atlas.runtime.group_sum import GroupSum
from atlas.runtime.models.config import activation_width, layer_of
from atlas.runtime.models.decoder import TIED_EMBEDDING, TIED_HEAD
from atlas.runtime.models.task import DecoderTask
from atlas.runtime.optimizer import FlatSlice, clip_factor, make_optimizer, norms_of, squares_of
from atlas.runtime.stage import Stage
from atlas.runtime.sync import GradientSync
from atlas.runtime.topology import WorkerRole
from atlas.runtime.training import make_task
from atlas.runtime.waits import Pending, Wait
from atlas.runtime.zero import ShardedState, gather_weights


class StageSet:
    """The stages of a worker that is one process."""

    stage_kind = Stage

    def __init__(self, assignment: Assignment, role: WorkerRole, device: Device) -> None:
        program, training = role.program, assignment.training
        self.assignment, self.role, self.device = assignment, role, device
        self.backend = available(training.compile, device.place, assignment.tp)
        """The compiler of its layers; empty: they run eagerly."""
        require_fixed_kernels(self.backend, training.sums)
        load_ahead(self.backend)
        task = make_task(
            training,
            num_stages=program.num_stages,
            share=role.share,
            num_microbatches=program.num_microbatches,
            place=device.place,
        )
        resumes = assignment.save is not None and assignment.save.resume is not None
        self.task = replace(task, filled=not resumes)
        self.stages = {stage: self._make_stage(self._built(self.task), stage) for stage in role.stages}
        self.begin(assignment.first_step)
        self.parameters: dict[str, Tensor] = {}
        for stage in self.stages.values():
            self.parameters |= stage.named_parameters
        self.zero = training.zero > 0 and role.num_pipelines > 1
        """Whether this pipeline steps, and keeps optimizer state of, its own slice of each stage only (ZeRO-1)."""
        slices = [self._stepped(stage) for stage in self.stages.values()]
        self.optimizer = make_optimizer(training.optimizer, self.parameters, slices)
        self.optimizer.num_steps = assignment.first_step
        self._norms: Tensor | None = None
        self.sync: GradientSync | None = None
        """None without other pipelines."""

    def _stepped(self, stage: Stage) -> FlatSlice:
        mine = stage.flat.slice_of(self.role.pipeline)
        return FlatSlice(stage.flat, mine.start, mine.stop) if self.zero else FlatSlice.whole(stage.flat)

    def _built(self, task: DecoderTask) -> DecoderTask:
        """The task that builds the stages."""
        return task

    def _make_stage(self, task: DecoderTask, stage: int) -> Stage:
        program, role = self.role.program, self.role
        # The mean over the whole batch: all microbatches of all pipelines have the same weight.
        scale = 1.0 / role.share.total
        return self.stage_kind(
            task,
            stage,
            program.num_stages,
            role.pipeline,
            scale,
            backend=self.backend,
            by_layer=self._recomputes_by_layer(stage),
            num_slices=role.num_pipelines,
        )

    def _recomputes_by_layer(self, stage: int) -> bool:
        """Whether a stage recomputes layer by layer, inside the backward: if every recompute is directly before its
        backward, and if a layer's inputs of all microbatches in flight, which are kept for it, take less memory than
        the layer's activations. So a stage never takes more memory than the planner counts."""
        program, config = self.role.program, self.task.config
        ops = [op for op in program.ops(self.role.worker) if op.stage == stage and op.kind <= Kind.W]
        recomputes = [(op, then) for op, then in itertools.pairwise(ops) if op.kind == Kind.R]
        if not all(then.kind in BACKWARDS and then.microbatch == op.microbatch for op, then in recomputes):
            return False
        held = itertools.accumulate((op.kind == Kind.F) - (op.kind in BACKWARDS) for op in ops)
        most = max(held, default=0)
        return most * config.width < activation_width(config, self.assignment.tp)

    @property
    def layers(self) -> list[str]:
        """The layers of these stages, as checkpoints name them."""
        return list(dict.fromkeys(layer_of(name) for name in self.parameters))

    def begin(self, step: int) -> None:
        """Start to sum the gradients of this step."""
        for stage in self.stages.values():
            stage.gradients.begin(step * self.role.program.num_microbatches)

    def warm_up(self) -> None:
        for stage in self.stages.values():
            stage.warm_up()

    # ---- sums over pipelines -----------------------------------------------------------------------------------------
    def open_exchanges(self, store: GroupStore) -> Mapping[int, Exchange]:
        """Join the process groups of these stages."""
        return torch_exchanges(self.assignment, self.role, store)

    def sum_by(self, exchanges: Mapping[int, Exchange], group_sum: GroupSum | None = None) -> None:
        """Sum over the other pipelines by these exchanges, and over other groups of pipelines."""
        self.sync = GradientSync(exchanges, self.device, self.role.who, group_sum)

    def begin_sum(self, step: int, number: int) -> None:
        """Start to sum a stage's gradients over pipelines: its last one is computed."""
        if self.sync is not None:
            self.sync.begin(step, number, self.stages[number].flat.gradients)

    def finish_sum(self, step: int, number: int, wait: Wait | None = None) -> int:
        """Use the sums as gradients; when the last of them arrived. With ZeRO-1, of this pipeline's slice only."""
        arrived_ns = 0
        if self.sync is not None:
            whole = not self.zero or self._is_tied(number)
            arrived_ns = self.sync.finish(step, number, wait or self._wait, whole=whole)
        self.stages[number].adopt()
        return arrived_ns

    def _is_tied(self, number: int) -> bool:
        """Whether a stage has an end of tied embeddings: the ends are joined as whole gradients."""
        named, tied = self.stages[number].named_parameters, self.task.config.tied
        return tied and (TIED_EMBEDDING in named or TIED_HEAD in named)

    def _wait(self, pending: Sequence[Pending]) -> None:
        for each in pending:
            each.wait(self.assignment.patience_s)

    # ---- the end of an iteration -------------------------------------------------------------------------------------
    def join_tied(self) -> None:
        add_tied(self.parameters)

    def tied_gradient(self, name: str) -> Tensor:
        """The whole gradient of one end."""
        gradient = self.parameters[name].grad
        assert gradient is not None, f"{name} has no gradient"
        return gradient

    def adopt_tied(self, name: str, gradient: Tensor) -> None:
        own = self.parameters[name].grad  # `tied_gradient` may gather those of all ranks
        assert own is not None, f"{name} has no gradient"
        own.copy_(gradient)

    def begin_norm(self) -> None:
        """Compute the norms of the gradients and copy them to the host, without waiting for the device."""
        gradients = list(self._counted_gradients().values())
        norms = norms_of(gradients) if gradients else torch.empty(0)
        self._norms = torch.empty(norms.shape, pin_memory=norms.is_cuda).copy_(norms, non_blocking=True)

    def squares(self) -> list[float]:
        """The squared gradient norms of this pipeline's slices, for the global norm; after the device has done
        `begin_norm`."""
        assert self._norms is not None, "begin_norm first"
        return squares_of(self._norms)

    def _counted_gradients(self) -> dict[str, Tensor]:
        """What this process counts in the global norm: its pipeline's part of the gradients that its stages count. The
        same with and without ZeRO-1."""
        return {
            name: stage.flat.gradients[piece.at]
            for stage in self.stages.values()
            for name, piece in stage.flat.pieces(stage.flat.slice_of(self.role.pipeline)).items()
            if name in stage.counted
        }

    def clip(self, norm: float, max_norm: float) -> None:
        """The next step does it, in the pass that it makes over the gradients."""
        self.optimizer.factor = clip_factor(norm, max_norm)

    def step(self, num_done: int) -> None:
        """An optimizer step; `num_done`: steps of the training after it."""
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.zero:
            assert self.sync is not None, "there are other pipelines"
            flats = {number: stage.flat for number, stage in self.stages.items()}
            gather_weights(num_done, flats, self.sync.exchanges, self._wait)
        self.begin(num_done)

    # ---- state -------------------------------------------------------------------------------------------------------
    def states(self, layers: Collection[str]) -> dict[str, LayerState]:
        """The whole state of some layers; the tensors may be the live ones."""
        found = states_of(self.parameters.items(), None if self.zero else self.optimizer)
        if not self.zero:
            return {layer: found[layer] for layer in layers}
        kept = self._whole_optimizer_state()
        return {
            layer: LayerState(weights, {name: kept[name] for name in weights if name in kept})
            for layer in layers
            if (weights := found[layer].parameters)
        }

    def _whole_optimizer_state(self) -> dict[str, dict[str, Tensor]]:
        """Of the layers that this pipeline saves; all pipelines take part."""
        assert self.sync is not None, "there are other pipelines"
        names: list[list[str]] = []
        for pipeline in range(self.role.num_pipelines):
            theirs = set(share(self.layers, pipeline, self.role.num_pipelines))
            names.append([name for name in self.parameters if layer_of(name) in theirs])
        return self._sharded_state.gather(names, self.sync.exchanges, self._wait)

    @cached_property
    def _sharded_state(self) -> ShardedState:
        by_stage = zip(self.stages.items(), self.optimizer.flat_state, strict=True)
        return ShardedState({n: (stage.flat, kept) for (n, stage), kept in by_stage}, self.role.pipeline)

    def restore(self, states: Mapping[str, LayerState]) -> None:
        """Use saved states: this process's part of each (`of_state`)."""
        restore(states, self.parameters.items(), None if self.zero else self.optimizer)
        if not any(state.optimizer for state in states.values()):
            self.optimizer.start_from_weights()
        if self.zero:
            self._sharded_state.restore({name: kept for s in states.values() for name, kept in s.optimizer.items()})

    def of_state(self, state: LayerState) -> LayerState:
        """This process's part of a saved layer."""
        return state

    def weights(self) -> dict[str, Tensor]:
        """All parameters, whole."""
        return self.parameters

    def end(self) -> None:
        """No call follows."""


def add_tied(parameters: Mapping[str, Tensor]) -> None:
    """Give both ends of tied embeddings, if both are here, the gradient of the whole matrix: the sum of theirs."""
    embedding, head = (parameters[name].grad for name in (TIED_EMBEDDING, TIED_HEAD))
    assert embedding is not None, "the embedding's gradient is missing"
    assert head is not None, "the head's gradient is missing"
    head.copy_(embedding.add_(head))
