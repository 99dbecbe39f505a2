"""Atlas compared with the exact optimum (CP-SAT) on small cases, and the lower bound compared with both.

The cases are cells with equal stages, as in `bench/schedules.py`, and cells with random durations. Transfers are whole
(no chunks), as in the exact model. Atlas never lets a link idle while a transfer is ready; the exact optimum may.

Atlas is what `atlas simulate` runs, with its default tries. A case that the solver does not prove in time counts as not
within 1.03. The search at the setting itself, without the grid that makes results monotone, is shown too: the
difference is the cost of the grid. `--quick`: 10 and 15 cases (about two minutes).
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import cast

import numpy as np
from common.cases import MS, cell
from common.report import Report

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "schedules"))
from exact_optimum import optimum

from atlas.cost.table import Costs
from atlas.evaluate import Case, default_budget
from atlas.ir.program import Kind, Memory
from atlas.schedules import Setting, lower_bound
from atlas.schedules.atlas import atlas
from atlas.schedules.search import Family, search

UNIT = 10 * MS
Compared = tuple[float, float, float]
"""Atlas / optimum, search / optimum, bound / optimum."""


def compare(setting: Setting) -> Compared | None:
    """The ratios, or None if the solver did not finish."""
    assert setting.turns is not None
    tries = default_budget(cast(Case, setting))  # of a case it reads only the layout
    setting = replace(setting, apart=setting.turns, budget=tries)  # the exact model has only turns
    ours = setting.simulated_ns(atlas(setting))
    order = search(setting, Family(splits=(True,), sharings=(True,)))[-1]
    bound = lower_bound(
        setting.turns, setting.layout.num_microbatches, setting.memory, recompute=setting.recompute
    )  # fmt: skip
    best = optimum(
        setting.layout, setting.turns, cap=setting.memory.cap, recompute=setting.recompute, split=True, seconds=20,
        upper_ns=max(ours, order.makespan_ns),
    )  # fmt: skip
    if not best.proven:
        return None
    return ours / best.makespan_ns, order.makespan_ns / best.makespan_ns, bound.ns / best.makespan_ns


def drawn(rng: np.random.Generator) -> Setting:
    """A small cell with random sizes and random durations, stage by stage."""
    num_stages, num_mb, num_pipelines = (int(rng.integers(a, b)) for a, b in ((2, 5), (2, 7), (1, 3)))
    setting = cell(num_stages, num_mb, num_pipelines, 1, num_dcs=min(3, num_stages), quantum_ms=0)
    lengths = rng.integers(2, 9, (num_stages, 4)) * UNIT
    wan, latency, lan = int(rng.integers(1, 9)) * UNIT, int(rng.integers(0, 9)) * UNIT, int(rng.integers(0, 3)) * UNIT

    def redraw(costs: Costs, share: int) -> Costs:
        compute = costs.compute_ns.copy()
        for column, kind in enumerate((Kind.F, Kind.R, Kind.I, Kind.W)):
            compute[:, :, kind] = lengths[:, column]
        compute[:, :, Kind.B] = compute[:, :, Kind.I] + compute[:, :, Kind.W]
        crosses = costs.latency_ns > 0
        work = np.where(crosses, wan * num_pipelines // share, lan)
        return replace(costs, compute_ns=compute, work_ns=work, latency_ns=np.where(crosses, latency, 0))

    assert setting.turns is not None
    return replace(
        setting,
        apart=redraw(setting.apart, 1),
        turns=redraw(setting.turns, num_pipelines),
        memory=Memory(int(rng.integers(1, 2 * num_stages + 1))),
        recompute=bool(rng.integers(2)),
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    report = Report("Atlas against the exact optimum, small cases (simulated)", "OR-tools CP-SAT, proven optimal")
    even = [
        compare(cell(s, m, c, k, num_dcs=min(3, s), quantum_ms=0))
        for s, m, c in product((2, 3) if quick else (2, 3, 4), (4,) if quick else (4, 6), (1, 2))
        for k in sorted({2, s, 2 * s})
    ]
    rng = np.random.default_rng(7)
    odd = [compare(drawn(rng)) for _ in range(15 if quick else 60)]
    for name, results in (("equal stages", even), ("random durations", odd)):
        proven = [r for r in results if r is not None]
        ratios = np.array([r[0] for r in proven])
        searched = np.array([r[1] for r in proven])
        report.figure(f"{name}: cases proven of {len(results)}", len(proven), "cases")
        report.figure(f"{name}: mean ratio", ratios.mean(), "x", at_most=1.005)
        report.figure(f"{name}: worst ratio", ratios.max(), "x", at_most=1.03)
        within = float((ratios <= 1.03).sum()) / len(results)
        report.figure(f"{name}: share proven and within 1.03", within, "", at_least=0.9)
        report.figure(f"{name}: search at the setting itself, mean ratio", searched.mean(), "x", at_most=1.01)
        report.figure(f"{name}: search at the setting itself, worst ratio", searched.max(), "x", at_most=1.03)
        report.figure(f"{name}: bound above the optimum", max(r[2] for r in proven), "x", at_most=1.0)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
