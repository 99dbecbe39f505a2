"""The schedules: each turns a Setting (layout, costs, memory) into a Program.

    SCHEDULES[name].build(setting, progress) -> Program

Importing this package loads no numba; a searched schedule loads it when it is built.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from atlas.ir.program import Program
from atlas.schedules.atlas import atlas
from atlas.schedules.bound import Bound, lower_bound
from atlas.schedules.classic import gpipe, interleaved, one_f_one_b
from atlas.schedules.eager import eager_of
from atlas.schedules.setting import Progress, Setting
from atlas.schedules.varuna import varuna
from atlas.schedules.zero_bubble import zero_bubble


@dataclass(frozen=True)
class Schedule:
    """A schedule and its name on the command line."""

    name: str
    summary: str
    build: Callable[[Setting, Progress | None], Program]
    virtual_stages: bool = False
    """Whether a worker may hold several stages; all others need exactly one."""
    shares: bool = False
    """Whether its pipelines may take turns on the WAN (which needs many connections)."""


SCHEDULES: dict[str, Schedule] = {
    schedule.name: schedule
    for schedule in (
        Schedule(
            "gpipe",
            "all forwards, then all backwards; holds every microbatch, whatever the memory cap",
            lambda setting, _: gpipe(setting.layout, recompute=setting.recompute),
        ),
        Schedule(
            "1f1b",
            "Megatron's: forwards and backwards in turn, at most one microbatch in flight per remaining stage",
            lambda setting, _: one_f_one_b(setting.layout, recompute=setting.recompute),
        ),
        Schedule(
            "1f1b-eager",
            "1F1B with a warm-up as long as the way to the end and back, within memory; what plans are compared by",
            eager_of,
            shares=True,
        ),
        Schedule(
            "interleaved",
            "1F1B with several stages per worker: less fill and drain, more traffic",
            lambda setting, _: interleaved(setting.layout, recompute=setting.recompute),
            virtual_stages=True,
        ),
        Schedule("varuna", "opportunistic: backward before recompute before forward, forwards pulled ahead", varuna),
        Schedule("zero-bubble", "backward split in two, weight gradients fill the bubbles; searched", zero_bubble),
        Schedule(
            "atlas",
            "turns on the WAN with the capacity of the whole cell, split backward where it pays; searched",
            atlas,
            shares=True,
        ),
    )
}

__all__ = [
    "SCHEDULES",
    "Bound",
    "Progress",
    "Schedule",
    "Setting",
    "atlas",
    "gpipe",
    "interleaved",
    "lower_bound",
    "one_f_one_b",
    "varuna",
    "zero_bubble",
]
