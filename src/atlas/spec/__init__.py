"""What a user writes: clusters, models and jobs in YAML, read by `load_job` and validated.

Knows shapes and rules, no prices: `atlas.cost` reads a Job and says what it costs.
"""

from atlas.spec.cluster import Cluster, DataCenter, Link, Route, Wan
from atlas.spec.gpus import GPUS, Calibration, Gpu
from atlas.spec.job import Jitter, Job, Place
from atlas.spec.load import load_cluster, load_job, override, parse_job
from atlas.spec.model import Model
from atlas.spec.trace import TraceRow, read_trace

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
