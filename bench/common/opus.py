"""Opus's simulated cases as Programs (arXiv 2602.12521; settings and result files at github.com/opusfabric/Opus).

Their simulator runs one microbatch through the pipeline and sums gradients layer by layer. On circuits it sums in line
with the backward (their row at 0 ms is 2.2 % above the electrical one), on an electrical network beside it. So every
layer is a stage of the Program here, and its SYNC follows the input gradient of the next layer; on the electrical
network only the last SYNC takes time. Each worker begins with a stage without weights, which passes the gradient on
after the last sum.

Taken from the published files: the electrical iteration, and the bytes of gradient sums and of activations. The rest is
divided equally between forward, input gradient and weight gradient. Nothing is taken from a row with circuits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from atlas.cost.table import Circuits, Costs, uniform_costs
from atlas.ir.assemble import assemble
from atlas.ir.program import NUM_KINDS, Kind, Layout, Op, Program
from atlas.sim import simulate

NS = 1_000_000_000
SCALE_OUT_BYTES_S = 50e9
"""Of a GPU: 400 Gbit/s."""


@dataclass(frozen=True)
class OpusCase:
    """One of their cases. Bytes are totals of all GPUs, as their log has them."""

    dp: int
    pp: int
    tp: int
    layers: int
    electrical_s: float
    sum_bytes: float
    hop_bytes: float

    @property
    def layer_sum_s(self) -> float:
        return self.sum_bytes / (self.dp * self.tp * self.pp) / SCALE_OUT_BYTES_S / (self.layers // self.pp)

    @property
    def hop_s(self) -> float:
        num_hops = 2 * (self.pp - 1) * self.dp * self.tp
        return self.hop_bytes / num_hops / SCALE_OUT_BYTES_S

    def program(self) -> Program:
        per_worker = self.layers // self.pp + 1
        ranks = tuple(stage // per_worker for stage in range(per_worker * self.pp))
        layout = Layout(self.dp, len(ranks), 1, ("dc",) * self.pp, ranks)
        orders = []
        for rank in range(self.pp):
            stages = range(rank * per_worker, (rank + 1) * per_worker)
            order = [Op(Kind.F, s, 0) for s in stages]
            for s in stages[:0:-1]:
                behind = [Op(Kind.SYNC, s + 1, 0)] if s + 1 in stages else []
                order += [Op(Kind.I, s, 0), *behind, Op(Kind.W, s, 0)]
            orders.append([*order, Op(Kind.SYNC, stages[1], 0), Op(Kind.B, stages[0], 0)])
        return assemble("opus", layout, orders)

    def costs(self, program: Program, *, in_line: bool) -> Costs:
        """`in_line`: whether sums delay the backward."""
        layer_s = (self.electrical_s - 2 * (self.pp - 1) * self.hop_s - self.layer_sum_s) / self.layers
        per_stage = np.zeros((program.num_stages, NUM_KINDS), np.int64)
        ranks = np.array(program.stage_rank)
        has_weights = np.concatenate([[False], ranks[1:] == ranks[:-1]])
        per_stage[np.ix_(has_weights, [Kind.F, Kind.I, Kind.W])] = round(layer_s / 3 * NS)
        summed = has_weights if in_line else np.arange(program.num_stages) == 1
        per_stage[summed, Kind.SYNC] = round(self.layer_sum_s * NS)
        plain = uniform_costs(self.dp, program.num_stages, np.zeros(NUM_KINDS, np.int64))
        crosses = ranks[1:] != ranks[:-1]
        work_ns = np.where(crosses, round(self.hop_s * NS), 0)[None, None, :] + np.zeros_like(plain.work_ns)
        compute_ns = np.broadcast_to(per_stage, (self.dp, *per_stage.shape)).copy()
        return replace(plain, compute_ns=compute_ns, work_ns=work_ns)

    def overhead(self, delay_ms: float, *, provision: bool) -> float:
        """Against the electrical network."""
        return self.photonic_s(delay_ms, provision=provision) / self.base_s - 1

    @property
    def base_s(self) -> float:
        program = self.program()
        return simulate(program, self.costs(program, in_line=False)).makespan_ns / NS

    def photonic_s(self, delay_ms: float, *, provision: bool) -> float:
        program = self.program()
        delays = (round(delay_ms * 1e6),) * self.pp
        circuits = Circuits((True,) * self.pp, delays, (provision,) * self.pp)
        return simulate(program, replace(self.costs(program, in_line=True), circuits=circuits)).makespan_ns / NS


LLAMA_128 = OpusCase(4, 4, 8, 96, 11.931082455, 518_013_321_216, 51_539_607_552)
"""128 H200, batch 256, one microbatch, 96 layers, 8192 wide, sequences of 4,096."""
LLAMA_128_ON_DEMAND = {10: 2.75, 50: 5.86, 100: 10.05}
LLAMA_128_PROVISIONED = {10: 2.44, 50: 3.45, 100: 5.31}
"""Published overheads by delay, milliseconds: per cent above the electrical network."""
SMOKE = OpusCase(2, 2, 2, 96, 62.2416, 143_831_072_768, 17_179_869_184)
"""8 GPUs; on demand it takes two delays longer."""
SMOKE_PROVISIONED = {1: 0.0, 10: 8.9, 50: 48.9}
"""Published: milliseconds longer, by delay."""
