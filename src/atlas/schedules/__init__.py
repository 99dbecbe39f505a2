"""The schedules: each turns a Setting (layout, costs, memory) into a Program.

    SCHEDULES[name].build(setting, progress) -> Program

Importing this package loads no numba; a searched schedule loads it when it is built.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module

from atlas.cost.table import Bound, lower_bound
from atlas.ir.program import Program
from atlas.schedules.classic import gpipe, interleaved, one_f_one_b, without_costs
from atlas.schedules.eager import eager_of
from atlas.schedules.setting import Builder, Progress, Setting


@dataclass(frozen=True)
class Schedule:
    """A schedule and its name on the command line."""

    name: str
    summary: str
    build: Builder
    virtual_stages: bool = False
    """Whether every worker holds several stages."""
    shares: bool = False
    """Whether its pipelines may take turns on the WAN (which needs many connections)."""
    may_interleave: bool = False
    """Whether a worker may hold one stage or several, whichever is faster."""


def _dispatched(name: str) -> Builder:
    """A schedule whose order the compiled dispatcher finds. Its module loads numba (half a second), so it is imported
    when it is first built."""

    def build(setting: Setting, progress: Progress | None) -> Program:
        program: Program = getattr(import_module(f"{__name__}.{name}"), name)(setting, progress)
        return program

    return build


SCHEDULES: dict[str, Schedule] = {
    schedule.name: schedule
    for schedule in (
        Schedule(
            "gpipe",
            "all forwards, then all backwards; holds every microbatch, whatever the memory cap",
            without_costs(gpipe),
        ),
        Schedule(
            "1f1b",
            "Megatron's order: forwards and backwards alternate, at most one microbatch in flight per remaining stage",
            without_costs(one_f_one_b),
        ),
        Schedule(
            "1f1b-eager",
            "1F1B with a longer warm-up: the fastest of a few lengths that fit in memory; used to compare plans",
            eager_of,
            shares=True,
        ),
        Schedule(
            "interleaved",
            "1F1B with several stages per worker: less fill and drain, more traffic",
            without_costs(interleaved),
            virtual_stages=True,
        ),
        Schedule(
            "varuna",
            "whatever is ready: backward before recompute before forward; forwards run ahead",
            _dispatched("varuna"),
        ),
        Schedule(
            "zero-bubble",
            "backward split in two, weight gradients fill the bubbles; the order is searched",
            _dispatched("zero_bubble"),
        ),
        Schedule(
            "atlas",
            "pipelines take turns on the WAN of their cell, backward split where that is faster; the order is searched",
            _dispatched("atlas"),
            shares=True,
            may_interleave=True,
        ),
    )
}

__all__ = [
    "SCHEDULES",
    "Bound",
    "Progress",
    "Schedule",
    "Setting",
    "gpipe",
    "interleaved",
    "lower_bound",
    "one_f_one_b",
]
