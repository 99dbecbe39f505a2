"""The stages of one worker in one process, with their parameters and the optimizer.

Where stages are sharded over several processes (`leader`), every call runs on all of them. Knows models and optimizers;
not ops, links or time.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from atlas.ir.program import BACKWARDS, Kind, Op
from atlas.runtime.assignment import Assignment
from atlas.runtime.checkpoint import LayerState, states_of
from atlas.runtime.compiling import available
from atlas.runtime.models.config import activation_width
from atlas.runtime.models.decoder import layer_of
from atlas.runtime.models.task import DecoderTask
from atlas.runtime.models.tied import join
from atlas.runtime.optimizer import FlatSlice, clip_factor, make_optimizer, norms_of, squares_of
from atlas.runtime.stage import Stage
from atlas.runtime.training import make_task
from atlas.runtime.wiring import WorkerRole


class StageSet:
    """The stages of a worker that is one process."""

    stage_kind = Stage

    def __init__(self, assignment: Assignment, role: WorkerRole, place: str) -> None:
        program, training = role.program, assignment.training
        self.role = role
        self.backend = available(training.compile, place, assignment.tp)
        """The compiler of its layers; empty: they run eagerly."""
        self.task = make_task(
            training,
            num_stages=program.num_stages,
            num_pipelines=role.num_pipelines,
            num_microbatches=program.num_microbatches,
            place=place,
        )
        self.stages = {stage: self._make_stage(self._built(self.task), stage) for stage in role.stages}
        self.begin(assignment.first_step)
        self.parameters: dict[str, Tensor] = {}
        for stage in self.stages.values():
            self.parameters |= stage.named_parameters
        slices = [FlatSlice.whole(stage.flat) for stage in self.stages.values()]
        self.optimizer = make_optimizer(training.optimizer, self.parameters, slices)
        self.optimizer.num_steps = assignment.first_step
        self._norms: Tensor | None = None

    def _built(self, task: DecoderTask) -> DecoderTask:
        """The task that builds the stages."""
        return task

    def _make_stage(self, task: DecoderTask, stage: int) -> Stage:
        program, role = self.role.program, self.role
        # The mean over the whole batch: all microbatches of all pipelines have the same weight.
        scale = 1.0 / (program.num_microbatches * role.num_pipelines)
        return self.stage_kind(
            task,
            stage,
            program.num_stages,
            role.pipeline,
            scale,
            backend=self.backend,
            by_layer=self._recomputes_by_layer(stage),
        )

    def _recomputes_by_layer(self, stage: int) -> bool:
        """Where every recompute is directly before its backward, and the layers' inputs of all microbatches in flight
        take less than the activations of the layers that need not exist at once: never more than the planner counts."""
        program, config = self.role.program, self.task.config
        ops = [op for op in program.ops(self.role.worker) if op.stage == stage and op.kind <= Kind.W]
        followed = {(op.microbatch, op.kind in BACKWARDS) for op in _after(ops, Kind.R)}
        if not all((op.microbatch, True) in followed for op in ops if op.kind == Kind.R):
            return False
        held = itertools.accumulate((op.kind == Kind.F) - (op.kind in BACKWARDS) for op in ops)
        most = max(held, default=0)
        return most * config.width < activation_width(config)

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

    # ---- the end of an iteration -------------------------------------------------------------------------------------
    def join_tied(self) -> None:
        """Join the gradients of tied embeddings, if both ends are here."""
        join(self.parameters)

    def tied_gradient(self, name: str) -> Tensor:
        """The whole gradient of one end."""
        gradient = self.parameters[name].grad
        assert gradient is not None, f"{name} has no gradient"
        return gradient

    def adopt_tied(self, name: str, gradient: Tensor) -> None:
        self.tied_gradient(name).copy_(gradient)

    def begin_norm(self) -> None:
        """Compute the norms of the gradients and copy them to the host, without waiting for the device."""
        counted = {name for stage in self.stages.values() for name in stage.counted}
        gradients = [p.grad for name, p in self.parameters.items() if name in counted and p.grad is not None]
        norms = norms_of(gradients)
        self._norms = torch.empty(norms.shape, pin_memory=norms.is_cuda).copy_(norms, non_blocking=True)

    def squares(self) -> list[float]:
        """The squared gradient norms of these stages, for the global norm; after the device has done `begin_norm`."""
        assert self._norms is not None, "begin_norm first"
        return squares_of(self._norms)

    def clip(self, norm: float, max_norm: float) -> None:
        """The next step does it, in the pass that it makes over the gradients."""
        self.optimizer.factor = clip_factor(norm, max_norm)

    def step(self, num_done: int) -> None:
        """An optimizer step; `num_done`: steps of the training after it."""
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.begin(num_done)

    # ---- state -------------------------------------------------------------------------------------------------------
    def states(self, layers: Collection[str]) -> dict[str, LayerState]:
        """The whole state of some layers; the tensors may be the live ones."""
        found = states_of(self.parameters.items(), self.optimizer, layer_of)
        return {layer: found[layer] for layer in layers}

    def of_state(self, state: LayerState) -> LayerState:
        """This process's part of a saved layer."""
        return state

    def weights(self) -> dict[str, Tensor]:
        """All parameters, whole."""
        return self.parameters

    def end(self) -> None:
        """No call follows."""


def _after(ops: Sequence[Op], kind: Kind) -> list[Op]:
    """The ops directly after those of a kind."""
    return [then for op, then in itertools.pairwise(ops) if op.kind == kind]
