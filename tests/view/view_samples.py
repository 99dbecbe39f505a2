"""Small jobs for the view tests: 1F1B over a few datacenters, priced by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from trunks import trunk_costs

from atlas.cost.table import kind_costs
from atlas.ir.assemble import with_optimizer
from atlas.ir.program import Layout
from atlas.ir.timeline import Timeline
from atlas.schedules.classic import one_f_one_b
from atlas.sim import simulate

MS = 1_000_000


def job(
    num_pipelines: int = 2,
    num_stages: int = 3,
    num_microbatches: int = 6,
    num_dcs: int = 3,
    *,
    sharing: bool = False,
    trunk_pairs: float | None = None,
    optimizer: bool = True,
    name: str = "1f1b",
) -> Timeline:
    layout = Layout.even(num_pipelines, num_stages, num_microbatches, num_dcs)
    program = replace(one_f_one_b(layout), name=name)
    program = replace(program, sharing=sharing)
    if optimizer:
        program = with_optimizer(program, norm=True)
    costs = trunk_costs(
        num_pipelines,
        num_stages,
        kind_costs(forward_ns=60 * MS, backward_ns=120 * MS, sync_ns=200 * MS, norm_ns=30 * MS, step_ns=20 * MS),
        lan_ns=2 * MS,
        wan_boundaries=tuple(np.flatnonzero(program.boundary_crosses).tolist()),
        wan_ns=240 * MS,
        wan_latency_ns=40 * MS,
        sharing=sharing,
        trunk_pairs=trunk_pairs,
    )
    return simulate(program, costs)
