"""A process that holds its part of a worker's stages and makes the calls that the worker's leader orders (`leader`),
until its orders end. It sees no Program, no link and no clock.

    <- {"call": "forward", "stage": 1, "args": [7, TENSOR], "kwargs": {"keep": true}}    one line per call
                               -> {"error": "...", "user_error": bool}                   and it ends
"""

from __future__ import annotations

import json
import os
from typing import Any, NoReturn, TextIO

import torch

from atlas.runtime.assignment import Assignment
from atlas.runtime.collectives import GroupStore, appear_alone
from atlas.runtime.hardware import make_device
from atlas.runtime.messages import MessageWriter
from atlas.runtime.saving import resume
from atlas.runtime.tensor_parallel.group import TensorGroup
from atlas.runtime.tensor_parallel.sharding import ShardedStageSet

TENSOR = {"tensor": True}
"""In an order: an activation or a gradient, which the leader shares with the group."""


def follow(assignment: Assignment, rank: int, store: GroupStore, orders: TextIO, replies: TextIO) -> NoReturn:
    """Make calls until the leader ends them, or is gone; then this process ends, before anything is destroyed
    (`MessageWriter.fail`)."""
    try:
        role = assignment.role
        if assignment.nccl_on_shared_gpu:
            appear_alone(f"{role.node}.{rank}")
        device = make_device(assignment.device)
        group = TensorGroup(rank, assignment.tp, store, device.place, assignment.patience_s)
        stage_set = ShardedStageSet(assignment, role, device, group)
        if assignment.save is not None:
            resume(assignment.save, stage_set)
        for line in orders:
            order = json.loads(line)
            if order["call"] == "end":
                break
            _call(stage_set, **order)
        os._exit(0)
    except Exception as error:
        MessageWriter(replies).fail(error)


def _call(stage_set: ShardedStageSet, call: str, stage: int | None, args: list[Any], kwargs: dict[str, Any]) -> None:
    task, group = stage_set.task, stage_set.group
    for index, value in enumerate(args):
        if value == TENSOR:
            args[index] = group.share(torch.empty(task.activation_shape, dtype=task.dtype, device=group.place))
    getattr(stage_set if stage is None else stage_set.stages[stage], call)(*args, **kwargs)
