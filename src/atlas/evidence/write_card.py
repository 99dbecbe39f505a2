"""Writes a data point: the workload card with every key of CCL-Bench's template, the traces, and the launch files.

Strict: the card is checked against the traces that were just written, and the folder must be new or empty. Knows jobs
and Timelines, not where they came from.
"""

from __future__ import annotations

import os
import platform
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from atlas import __version__
from atlas.cost.arrange import Arrangement
from atlas.cost.compute import embedding_params, model_params
from atlas.errors import AtlasError
from atlas.evidence.data_point import DataPoint, read_data_point
from atlas.evidence.write_trace import PRECISION, TraceSizes, write_traces
from atlas.ir.replace import write_whole
from atlas.ir.timeline import Timeline
from atlas.spec.document import YAML_WIDTH
from atlas.spec.job import Job
from atlas.spec.plan import job_text

CARD = "workload_card.yaml"
LAUNCH = "launch"
"""Folder of the launch files. CCL-Bench reads the files beside it, and takes any YAML for the card."""
UNKNOWN = "unknown"
CARD_MODELS = {"A100": "nvidia_a100", "H100": "nvidia_h100", "H200": "nvidia_h200", "GH200": "nvidia_gh200"}
"""By our device type, without its memory size: CCL-Bench's name."""


@dataclass(frozen=True)
class RunFacts:
    """What a card says beside the job and the Timeline."""

    schedule: str
    tcp: str = "many"
    command: Sequence[str] = ()
    plan_text: str = ""
    """The plan file's text, where there is one."""
    dataset: str = "made up"
    trained: str = ""
    """The model that really ran, where it is not the job's: a stand-in."""
    device: str = ""
    """What computed, where it is not the GPU of the plan: cpu."""
    slower: int = 1
    """Every duration was multiplied by this."""
    contributor: str = ""
    contact: str = ""


def require_new(folder: Path) -> None:
    """Raise AtlasError where the folder has files: those of two runs must not mix."""
    if folder.is_dir() and any(folder.iterdir()):
        raise AtlasError(f"{folder}: is not empty. Name a new folder: one data point has one card")


def write_data_point(
    folder: Path, timeline: Timeline, job: Job, arrangement: Arrangement, facts: RunFacts, *, traced: bool = False
) -> DataPoint:
    """Write the folder, then read it back: the metrics of the run. `traced`: the workers have written their traces."""
    if not traced:
        require_new(folder)
    card = card_of(timeline, job, arrangement, facts)
    if traced:
        card["atlas"] |= {
            "num_traces": len(list(folder.glob("rank*_trace.json"))),
            "traced": "the workers of this host, each with torch.profiler",
        }
    try:
        (folder / LAUNCH).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise AtlasError(f"{folder}: cannot be created: {error.strerror}. Choose another place") from error
    if not traced:
        write_traces(folder, timeline, sizes_of(timeline, job, arrangement))
    _write_launch(folder / LAUNCH, job, facts)
    # The card last: a folder with a card is complete.
    write_whole(folder / CARD, yaml.safe_dump(card, sort_keys=False, width=YAML_WIDTH, allow_unicode=True).encode())
    return read_data_point(folder)


def sizes_of(timeline: Timeline, job: Job, arrangement: Arrangement) -> TraceSizes:
    program = timeline.program
    by_rank = [0] * program.num_ranks
    for stage, rank in enumerate(program.stage_rank):
        by_rank[rank] += int(arrangement.stage_params[stage])
    return TraceSizes(
        tp=job.tp,
        num_cells=job.cells,
        gradient_elements=tuple(-(-count // job.tp) for count in by_rank),
        gradient_type="Float" if job.gradient_bytes == 4 else PRECISION[job.precision],
        activation_elements=job.activation_bytes // job.element_bytes,
        activation_type=PRECISION[job.precision],
        device=job.cluster.dc(program.rank_dc[0]).gpu,
    )


# ---- the card --------------------------------------------------------------------------------------------------
def card_of(timeline: Timeline, job: Job, arrangement: Arrangement, facts: RunFacts) -> dict[str, Any]:
    """Every key of the template; `workload.hardware.datacenters` and `atlas` are ours."""
    model, program = job.model, timeline.program
    dp = program.num_pipelines * job.cells
    params = model_params(model)
    slowed = "" if facts.slower == 1 else f", every duration times {facts.slower}"
    what = f"{job.name}: {model.family} of {params / 1e9:.3g}B parameters over {_places(job, arrangement)}"
    return {
        "version": 1,
        "description": f"{what}, schedule {facts.schedule}. Times are {timeline.source}{slowed}.",
        "hf_url": "",
        "trace_url": "",
        "contributor": facts.contributor,
        "contact": facts.contact,
        "workload": {
            "model": {
                "phase": "training",
                "moe": False,
                "granularity": "model_fwd_bwd_pass",
                "model_family": f"{model.family}-{params / 1e9:.3g}b",
                "precision": job.precision,
                "epochs": 1,
                "iteration": program.num_iterations,
                "model_arch": {
                    "num_params": params,
                    "num_params_embedding": embedding_params(model),
                    "num_layers": model.layers,
                    "num_heads": model.heads,
                    "head_dim": model.head_width,
                },
            },
            "data": {
                "batch_size": job.microbatch * job.num_microbatches * dp,
                "seq_len": model.seq_len,
                "input_len": model.seq_len,
                "output_len": 0,
                "dataset": facts.dataset,
            },
            "hardware": _hardware(job, arrangement, timeline.source, facts.device, job.tp * job.pp * dp),
        },
        "Model-executor": {
            "framework": {"name": "atlas", "compiler_tool_selection": "plain_pytorch"},
            "model_plan_parallelization": {
                **{"dp_replicate": dp, "dp_shard": 1, "tp": job.tp, "pp": job.pp, "cp": 1, "ep": 1},
                "pp_mb": job.microbatch,
            },
            "communication_library": {
                "name": "atlas",
                "version": __version__,
                "env": {"tcp": facts.tcp, "sharing": program.sharing},
            },
            "protocol_selection": ["tcp", "p2p"],
        },
        "metric_source": {"traces": ["json"], "metrics_specific_trace": []},
        "atlas": _own_part(timeline, job, arrangement, facts),
    }


def _own_part(timeline: Timeline, job: Job, arrangement: Arrangement, facts: RunFacts) -> dict[str, Any]:
    part: dict[str, Any] = {
        "source": timeline.source,
        "schedule": facts.schedule,
        "num_microbatches": job.num_microbatches,
        "layers_per_stage": list(arrangement.layers_per_stage),
        "gpu": job.cluster.dc(arrangement.rank_dc[0]).gpu,
        "num_traces": timeline.program.num_workers,
        "traced": f"the {timeline.program.num_workers} workers of one of {job.cells} cells, {job.tp} GPUs each",
        "iteration_s": timeline.iteration_ns / 1e9,
        "recompute": job.recompute,
    }
    if facts.trained:
        part["trained"] = facts.trained
    if facts.slower != 1:
        part["slower"] = facts.slower
    return part


def _places(job: Job, arrangement: Arrangement) -> str:
    names = list(dict.fromkeys(arrangement.rank_dc))
    return f"{len(names)} datacenter{'s' if len(names) > 1 else ''} ({', '.join(names)})"


def _hardware(job: Job, arrangement: Arrangement, source: str, device: str, num_devices: int) -> dict[str, Any]:
    used = [job.cluster.dc(name) for name in dict.fromkeys(arrangement.rank_dc)]
    kinds = list(dict.fromkeys(dc.gpu for dc in used))
    first = used[0]
    datacenters = [
        {
            "name": dc.name,
            "gpu": dc.gpu,
            "workers_per_pipeline": arrangement.rank_dc.count(dc.name),
            "gpus_per_node": dc.gpus_per_node,
            "net_gbps": job.cluster.node_gbps(dc),
            "links": _links(job, dc.name, [other.name for other in used]),
        }
        for dc in used
    ]
    return {
        "network_topo": {
            "topology": "datacenters over a WAN" if len(used) > 1 else "one datacenter",
            "bandwidth_gbps": [job.cluster.node_gbps(first), job.cluster.gpu_type(first.gpu).peer_gbps],
        },
        "xpu_spec": {
            "type": device.upper() or "GPU",
            "model": device or (card_model(kinds[0]) if len(kinds) == 1 else "mixed: " + ", ".join(kinds)),
            "total_count": num_devices,
            "count_per_node": first.gpus_per_node,
        },
        "driver_version": _driver() if source == "measured" else f"none ({source})",
        "datacenters": datacenters,
    }


def _links(job: Job, name: str, others: Sequence[str]) -> dict[str, Any]:
    """By other datacenter: latency and the rate of a node pair."""
    routes = {other: job.cluster.route(name, other) for other in others if other != name}
    return {
        other: {"latency_ms": route.latency_ms, "pair_gbps": route.pair_gbps}
        for other, route in routes.items()
        if route is not None
    }


def card_model(gpu: str) -> str:
    """`nvidia_a100` for A100-80; others in the same style."""
    return CARD_MODELS.get(gpu.partition("-")[0], f"nvidia_{gpu.lower().replace('-', '_')}")


def _driver() -> str:
    try:
        words = Path("/proc/driver/nvidia/version").read_text().split()
    except OSError:
        return UNKNOWN
    return next((f"nvidia_{word}" for word in words if word[:1].isdigit() and "." in word), UNKNOWN)


# ---- the launch files --------------------------------------------------------------------------------------------
def _write_launch(folder: Path, job: Job, facts: RunFacts) -> None:
    command = shlex.join(facts.command) if facts.command else "# made from Python"
    write_whole(folder / "command.sh", f"#!/bin/sh\n# The command that made this data point.\n{command}\n".encode())
    write_whole(folder / "job.yaml", job_text(job).encode())
    if facts.plan_text:
        write_whole(folder / "plan.yaml", facts.plan_text.encode())
    write_whole(folder / "environment.txt", environment_text().encode())


def environment_text() -> str:
    """Versions and the machine; no host name, no user, no variables beyond those of launchers."""
    lines = [f"atlas {__version__}", f"python {platform.python_version()}", f"system {platform.system()}"]
    lines += [f"machine {platform.machine()}, {os.cpu_count()} cores"]
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        lines.append(f"torch {torch.__version__}")
    shown = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "NCCL_", "GLOO_", "ATLAS_")
    lines += [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith(shown)]
    return "\n".join(lines) + "\n"
