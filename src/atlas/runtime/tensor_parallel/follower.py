"""A process that holds its part of a worker's stages and does what the worker's leader says (`leading`), until its
orders end. It sees no Program, no link and no clock.

    <- {"do": "forward", "stage": 1, "slot": 7, "keep": true, "has_input": true}     one line an order, and so on
                               -> {"error": "...", "mend": bool}                     and it ends
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable
from typing import Any, TextIO

import torch
from torch import Tensor

from atlas.errors import AtlasError, WorkerError
from atlas.ir.parse import from_text
from atlas.runtime.assignment import Assignment
from atlas.runtime.device import make_device
from atlas.runtime.saving import resume
from atlas.runtime.tensor_parallel.group import TensorGroup
from atlas.runtime.tensor_parallel.sharding import ShardedStageSet
from atlas.runtime.wiring import WorkerRole


def follow(assignment: Assignment, rank: int, port: int, orders: TextIO, answers: TextIO) -> None:
    """Until the leader says that it is over, or is gone."""
    try:
        follower = Follower(assignment, rank, port)
        for line in orders:
            order = json.loads(line)
            if order["do"] == "end":
                return
            follower.do(**order)
    except AtlasError as error:
        _say(answers, str(error), mend=not isinstance(error, WorkerError))
    except Exception:
        _say(answers, f"a bug, not a mistake of yours:\n{traceback.format_exc()}", mend=False)


def _say(answers: TextIO, error: str, *, mend: bool) -> None:
    answers.write(json.dumps({"error": error, "mend": mend}) + "\n")
    answers.flush()


class Follower:
    """`do` is called with one order after the other."""

    def __init__(self, assignment: Assignment, rank: int, port: int) -> None:
        role = WorkerRole(from_text(assignment.program), assignment.worker, assignment.cell, assignment.num_cells)
        place = make_device(assignment.device).place
        self.group = TensorGroup(rank, assignment.tp, port, place, assignment.patience_s)
        self.stage_set = stage_set = ShardedStageSet(assignment, role, place, self.group)
        if assignment.save is not None:
            resume(assignment.training, assignment.save, role, stage_set)
        self._calls: dict[str, Callable[..., Any]] = {
            "join_tied": stage_set.join_tied,
            "gather_tied": stage_set.gather_tied,
            "scatter_tied": stage_set.scatter_tied,
            "gather_squares": stage_set.gather_squares,
            "clip": stage_set.clip,
            "step": self._step,
            "states": stage_set.states,
            "weights": stage_set.weights,
            "gather_gradients": lambda stage: stage_set.gather_gradients(stage_set.stages[stage]),
            "scatter_sums": lambda stage: stage_set.scatter_sums(stage_set.stages[stage]),
            "adopt": lambda stage: stage_set.stages[stage].adopt(stage_set.stages[stage].outgoing()),
            "warm_up": lambda stage: stage_set.stages[stage].warm_up(),
            "forward": self._forward,
            "recompute": lambda stage, slot: stage_set.stages[stage].recompute(slot),
            "backward": lambda stage, slot, has_input: stage_set.stages[stage].backward(slot, self._input(has_input)),
            "backward_input": lambda stage, slot, has_input: stage_set.stages[stage].backward_input(
                slot, self._input(has_input)
            ),
            "backward_weight": lambda stage, slot: stage_set.stages[stage].backward_weight(slot),
        }

    def do(self, do: str, **details: Any) -> None:
        self._calls[do](**details)

    def _forward(self, stage: int, slot: int, keep: bool, has_input: bool) -> None:
        self.stage_set.stages[stage].forward(slot, self._input(has_input), keep=keep)

    def _step(self, num_done: int) -> None:
        self.stage_set.step(num_done)
        for stage in self.stage_set.stages.values():
            stage.forget_losses()

    def _input(self, has_input: bool) -> Tensor | None:
        """An activation or a gradient that came to the leader."""
        if not has_input:
            return None
        task = self.stage_set.task
        return self.group.share(torch.empty(task.activation_shape, dtype=task.dtype, device=self.group.place))
