"""A measured run described by its shape, and its iteration time: in closed form, and as Costs for the simulator.

The order of things is Megatron's: 1F1B, every layer recomputed before its backward, a sender that waits until its
tensor is sent, gradients reduced after the last backward, then the optimizer. Ranks are dealt tp first, then dp, then
pp, so that neighbours in the pipeline sit in different nodes once tp x dp fills one. Knows no file and no fit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from atlas.cost import flops
from atlas.cost.kernels import Rates, head_pass, layer_pass, rates
from atlas.cost.table import PRIVATE, Costs, LinkCost, kind_costs
from atlas.spec.gpus import Calibration, Gpu
from atlas.spec.model import Model

ELEMENT_BYTES = 2
"""Weights, activations and reduced gradients in fp16."""
UPDATE_BYTES = 28
"""Memory traffic of Adam per parameter: gradient and weight in fp16, three fp32 states read and written."""


@dataclass(frozen=True)
class Machine:
    """What the runs were measured on."""

    gpu: Gpu
    gpus_per_node: int
    net_bytes_per_s: float
    """Of one node, one direction: as its data sheet says, not fitted."""


@dataclass(frozen=True)
class Run:
    """One training configuration."""

    model: Model
    microbatch: int
    num_microbatches: int
    tp: int
    dp: int
    pp: int

    @property
    def key(self) -> str:
        """Says which run this is, without its time."""
        m = self.model
        shape = f"H{m.hidden} layers {m.layers} b{self.microbatch} M{self.num_microbatches}"
        return f"{shape} tp{self.tp} dp{self.dp} pp{self.pp}"


@dataclass(frozen=True)
class StageSeconds:
    """One stage of a pipeline: per microbatch, and once at the end."""

    forward_s: float
    backward_s: float
    """Recompute included."""
    sync_s: float
    """Gradient reduction."""
    step_s: float
    """Optimizer."""

    @property
    def close_s(self) -> float:
        """What ends an iteration."""
        return self.sync_s + self.step_s


def stage_seconds(run: Run, machine: Machine, rates_of: Callable[[int], Rates]) -> tuple[list[StageSeconds], float]:
    """The stages of a run and what one tensor takes to the next stage. `rates_of` is by tp."""
    at = rates_of(run.tp)
    layer = layer_pass(run.model, run.microbatch, run.tp, ELEMENT_BYTES, at)
    head = head_pass(run.model, run.microbatch, run.tp, at)
    num_layers = run.model.layers / run.pp
    forward_s, backward_s = num_layers * layer.forward_s, num_layers * (layer.forward_s + layer.backward_s)
    close = _close_s(run, machine, at)
    stages = [StageSeconds(forward_s, backward_s, *close)] * (run.pp - 1)
    stages.append(StageSeconds(forward_s + head.forward_s, backward_s + head.backward_s, *close))
    return stages, _transfer_s(run, machine, at)


def _transfer_s(run: Run, machine: Machine, at: Rates) -> float:
    """Every GPU sends the whole activation to its peer in the next stage, and all GPUs of a node at once."""
    if run.pp == 1:
        return 0.0
    activation_bytes = run.microbatch * run.model.seq_len * run.model.hidden * ELEMENT_BYTES
    if run.tp * run.dp * run.pp <= machine.gpus_per_node:
        return activation_bytes / at.peer_bytes_per_s
    return machine.gpus_per_node * activation_bytes / machine.net_bytes_per_s


def _close_s(run: Run, machine: Machine, at: Rates) -> tuple[float, float]:
    """Ring all-reduce over the replicas, then the optimizer. Replicas in one node pass its network together, as one
    ring; what divides the network are the rings of the node's different tp ranks."""
    params = run.model.layers / run.pp * flops.layer_params(run.model) + run.model.vocab * run.model.hidden
    ring_bytes = 2 * (run.dp - 1) / run.dp * params / run.tp * ELEMENT_BYTES
    if run.tp * run.dp <= machine.gpus_per_node:
        ring_s = ring_bytes / at.peer_bytes_per_s
    else:
        ring_s = ring_bytes * min(run.tp, machine.gpus_per_node) / machine.net_bytes_per_s
    return ring_s, params / run.tp * UPDATE_BYTES / at.bytes_per_s


def iteration_s(run: Run, machine: Machine, rates_of: Callable[[int], Rates]) -> float:
    """Closed form of 1F1B with senders that wait: one microbatch through all stages and back, and the slowest stage's
    work on every other one."""
    stages, transfer_s = stage_seconds(run, machine, rates_of)
    busy_s = []
    for s, stage in enumerate(stages):
        sends = (s < run.pp - 1) + (s > 0)
        busy_s.append(stage.forward_s + stage.backward_s + sends * transfer_s)
    return sum(busy_s) + (run.num_microbatches - 1) * max(busy_s) + max(stage.close_s for stage in stages)


def rates_by_tp(machine: Machine, calibration: Calibration) -> Callable[[int], Rates]:
    """A tp group wider than a node reduces over the network."""

    @cache
    def of(tp: int) -> Rates:
        wide = tp > machine.gpus_per_node
        return rates(machine.gpu, calibration, peer_bytes_per_s=machine.net_bytes_per_s if wide else None)

    return of


def blocking_costs(stages: Sequence[StageSeconds], transfer_s: float, *, receiver_waits: bool) -> Costs:
    """One pipeline whose workers stand still while they send, and with `receiver_waits` also while they receive (send
    and receive one after the other, not paired). Transfers are part of the ops; the links themselves take no time."""
    last = len(stages) - 1
    rows = []
    for s, stage in enumerate(stages):
        forward = (s < last) + (receiver_waits and s > 0)
        backward = (s > 0) + (receiver_waits and s < last)
        rows.append(
            kind_costs(
                forward_ns=round((stage.forward_s + forward * transfer_s) * 1e9),
                backward_ns=round((stage.backward_s + backward * transfer_s) * 1e9),
                sync_ns=round(stage.sync_s * 1e9),
                step_ns=round(stage.step_s * 1e9),
            )
        )
    shape = (2, 1, last)
    links = tuple(LinkCost(f"{kind} {b}", PRIVATE) for kind in ("forward", "backward") for b in range(last))
    channel = np.arange(2 * last, dtype=np.int32).reshape(shape)
    none = np.zeros(shape, np.int64)
    return Costs(np.stack(rows)[None], links, channel, none, none, none)
