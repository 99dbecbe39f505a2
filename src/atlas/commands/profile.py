"""Measure a job's model on this machine's accelerator, and write a profile for `profile:` in a job file.

    atlas profile JOB.yaml --gpu H200 --out h200.json
    atlas simulate JOB.yaml --set profile=h200.json

Times the embedding, one layer and the head as the runtime runs them, compiled as `atlas train` compiles them, at the
job's microbatch size and precision, on one device without tensor parallelism. Entries of an existing file for other
GPUs and sizes are kept. A job with another model cannot use the profile. Needs torch.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from atlas.console import job_flags, require_apart, require_writable, whole
from atlas.cost.profile import load_profile, shape_of
from atlas.ir.replace import write_whole
from atlas.spec import Job
from atlas.spec.plan import load_job_or_plan


def configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("job", metavar="JOB.yaml", type=Path, help="job with the model, microbatch and precision")
    add("--gpu", required=True, metavar="NAME", help="the name of this accelerator in the cluster file")
    add("--out", required=True, metavar="FILE", type=Path, help="profile to write or extend")
    add("--device", choices=("cuda", "cpu"), default="cuda", help="device to measure")
    add("--repeats", type=whole(1, 100_000), default=10, metavar="N", help="timed runs, of which the median is used")
    add(
        "--compile",
        action=argparse.BooleanOptionalAction,
        help="compile layers, as `atlas train` does (default: on GPUs)",
    )
    job_flags(parser)


def run(args: argparse.Namespace) -> int:
    require_writable(args.out, "--out")
    job, _ = load_job_or_plan(args.job, args.set)
    require_apart({"--out": args.out}, [file for file in job.files if file != job.profile])  # that one may be added to
    kept = load_profile(args.out) if args.out.exists() else None
    compiled = args.device == "cuda" if args.compile is None else args.compile
    entry = measure(job, args.gpu, args.device, args.repeats, "inductor" if compiled else "")
    same = {key: entry[key] for key in ("gpu", "microbatch", "tp", *shape_of(job))}
    kept_entries = [e.model_dump(exclude_none=True) for e in (kept.entries if kept else ())]
    others = [e for e in kept_entries if any(e.get(key, value) != value for key, value in same.items())]
    write_whole(args.out, (json.dumps({"model": job.name, "entries": [*others, entry]}, indent=2) + "\n").encode())
    layer = entry["layer"]
    print(
        f"{args.gpu}, microbatch {job.microbatch}: a layer takes {layer['forward_s'] * 1e3:.3f} ms forward, "
        f"{layer['backward_s'] * 1e3:.3f} ms backward ({layer['weight_s'] * 1e3:.3f} of it weight gradient). "
        f"Written to {args.out}"
    )
    return 0


def measure(job: Job, gpu: str, device: str, repeats: int, backend: str) -> dict[str, Any]:
    """One entry of a profile file."""
    from atlas.runtime.profile import profile  # torch: 1.9 s

    return {
        "gpu": gpu,
        "microbatch": job.microbatch,
        "tp": 1,
        **shape_of(job),
        **profile(job, device, repeats, backend),
    }
