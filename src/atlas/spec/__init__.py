"""What a user writes: clusters, models and jobs in YAML, read by `load_job` and validated.

It has shapes and rules, no prices: `atlas.cost` prices a Job. Names are imported on first use (pydantic: 0.4 s without
bytecode), so that `document` can be imported alone.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from atlas.spec.gpus import GPUS, Calibration, Gpu
    from atlas.spec.job import Cluster, DataCenter, Jitter, Job, Link, Model, Place, Route, Wan
    from atlas.spec.load import load_cluster, load_job, override, parse_job
    from atlas.spec.trace import TraceRow, read_trace

_MODULES = {
    "gpus": ("GPUS", "Calibration", "Gpu"),
    "job": ("Cluster", "DataCenter", "Jitter", "Job", "Link", "Model", "Place", "Route", "Wan"),
    "load": ("load_cluster", "load_job", "override", "parse_job"),
    "trace": ("TraceRow", "read_trace"),
}
__all__ = [
    "GPUS",
    "Calibration",
    "Cluster",
    "DataCenter",
    "Gpu",
    "Jitter",
    "Job",
    "Link",
    "Model",
    "Place",
    "Route",
    "TraceRow",
    "Wan",
    "load_cluster",
    "load_job",
    "override",
    "parse_job",
    "read_trace",
]


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
