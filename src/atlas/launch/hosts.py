"""Which host of its datacenter a launcher is on, from the variables that schedulers set, and how many hosts a plan
needs.

Knows environments and counts; starts nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

from atlas.cost.arrange import arrange
from atlas.errors import AtlasError
from atlas.spec import Job

NUM_HOSTS = "ATLAS_NUM_HOSTS"
"""Set by launch files where a scheduler numbers its pods and does not count them."""
SCHEDULERS = (
    ("SLURM_NODEID", "SLURM_NNODES"),
    ("SKYPILOT_NODE_RANK", "SKYPILOT_NUM_NODES"),
    ("JOB_COMPLETION_INDEX", NUM_HOSTS),
)
"""Variables with a host's number from 0, and with the number of hosts."""


def scheduled_place(job: Job, datacenter: str, environment: Mapping[str, str]) -> tuple[int, int] | None:
    """This host's number as a scheduler counts, and how many hosts the plan uses; None without a scheduler. A host with
    a number that is not below that count is a spare. Raises if there are too few hosts."""
    for number, count in SCHEDULERS:
        if number not in environment or count not in environment:
            continue
        part, total = environment[number], environment[count]
        if not (part.isdecimal() and total.isdecimal() and int(part) < int(total)):
            raise AtlasError(
                f"{number}={part}, {count}={total}: the first must be below the second. Give --node I/N instead"
            )
        need = hosts_needed(job).get(datacenter, int(total))
        if int(total) < need:
            raise AtlasError(
                f"{count}={total}: the plan uses {need} hosts in {datacenter}, by its gpus_per_node. Ask the scheduler "
                f"for {need}, or plan for the hosts that are there"
            )
        return int(part), need
    return None


def hosts_needed(job: Job) -> dict[str, int]:
    """By datacenter with workers, in the order of the pipeline: the hosts that the plan uses."""
    return {dc: -(-count // workers_per_host(job, dc)) for dc, count in workers_by_datacenter(job).items()}


def workers_per_host(job: Job, dc: str) -> int:
    return max(1, job.cluster.dc(dc).gpus_per_node // job.tp)


def workers_by_datacenter(job: Job) -> dict[str, int]:
    """In the order of the pipeline, group by group."""
    counts: dict[str, int] = {}
    for part in job.parts:
        found = arrange(part)
        for dc in found.rank_dc:
            counts[dc] = counts.get(dc, 0) + found.num_pipelines * part.cells
    return counts
