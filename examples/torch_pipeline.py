"""A pipeline written with torch alone (PipelineStage and Schedule1F1B), without code for datacenters. With `--backend
atlas` the same script uses many connections across a WAN.

    torchrun --nproc-per-node 2 examples/torch_pipeline.py --backend gloo
    torchrun --nproc-per-node 2 examples/torch_pipeline.py --backend atlas
    python examples/torch_pipeline_wan.py                   # both, between two emulated datacenters

With `--csv FILE` torch runs a schedule of Atlas: `atlas schedules --show zero-bubble JOB --torch` writes it.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

import atlas.runtime.process_group  # noqa: F401 - makes the backend `atlas` known


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=("gloo", "atlas"), default="gloo")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--microbatch", type=int, default=256, metavar="ROWS")
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--device", default="cpu", metavar="NAME", help="of every rank: cpu, or cuda:0 (backend atlas)")
    parser.add_argument("--csv", metavar="FILE", help="a schedule in torch's format, one stage a rank")
    args = parser.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group(args.backend)
    rank, num_stages = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    device = torch.device(args.device)
    module = nn.Sequential(*(nn.Sequential(nn.Linear(args.width, args.width), nn.Tanh()) for _ in range(2))).to(device)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    stage = PipelineStage(module, rank, num_stages, device)
    if args.csv:
        schedule = _PipelineScheduleRuntime([stage], args.microbatches, loss_fn=nn.functional.mse_loss)
        schedule._load_csv(args.csv)
    else:
        schedule = Schedule1F1B(stage, args.microbatches, loss_fn=nn.functional.mse_loss)

    took_s = []
    for step in range(args.steps):
        rows, drawn = args.microbatches * args.microbatch, torch.Generator().manual_seed(step)
        x = torch.randn(rows, args.width, generator=drawn).to(device)
        losses: list[Tensor] = []
        dist.barrier()
        began = time.perf_counter()
        if rank == 0:
            schedule.step(x)
        elif rank == num_stages - 1:
            schedule.step(target=x.flip(-1), losses=losses)
        else:
            schedule.step()
        optimizer.step()
        optimizer.zero_grad()
        took_s.append(time.perf_counter() - began)
        if losses:
            loss = torch.stack(losses).mean().item()
            print(f"step {step}  loss {loss:.9f}  iteration {took_s[-1] * 1e3:.1f} ms", flush=True)
    if rank == num_stages - 1:
        print(f"{args.backend}: median iteration {statistics.median(took_s[1:] or took_s) * 1e3:.1f} ms", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
