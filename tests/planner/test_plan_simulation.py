"""A whole plan: groups share a simulation only where nothing that is priced tells them apart."""

from __future__ import annotations

from typing import Any

from atlas.cost.cluster_arrays import cluster_arrays
from atlas.planner.candidate import Candidate, Group
from atlas.planner.plan_simulation import PlanSimulation, simulate_plan
from atlas.spec import parse_job


def two_groups(
    left: dict[str, Any], right: dict[str, Any], memory_gib: tuple[float, float] = (40.0, 40.0)
) -> PlanSimulation:
    """Two groups, each of two datacenters joined by its own link."""
    far = {"latency_ms": 10.0, "pair_gbps": 5.0}
    links = [{"between": ["a", "b"], **far, **left}, {"between": ["c", "d"], **far, **right}]
    links += [{"between": pair, **far} for pair in (["a", "c"], ["b", "d"], ["a", "d"], ["b", "c"])]
    alike = {"bf16_tflops": 300.0, "fp32_tflops": 20.0, "memory_gbytes_per_s": 1500.0}
    types = {f"gpu{k}": {**alike, "memory_gib": gib} for k, gib in enumerate(memory_gib)}
    job = parse_job(
        {
            "name": "two groups",
            "model": {"layers": 8, "hidden": 2048, "heads": 16, "vocab": 32_000, "seq_len": 2048},
            "cluster": {
                "gpus": types,
                "links": links,
                "datacenters": [
                    {"name": name, "nodes": 4, "gpus_per_node": 1, "gpu": f"gpu{int(name in 'cd')}", "net_gbps": 100.0}
                    for name in "abcd"
                ],
            },
            "num_microbatches": 8,
            "pp": 4,
            "pipelines_per_cell": 2,
        }
    )
    groups = tuple(Group(((x, 2), (y, 2)), (2, 2, 2, 2), 1, 2, 8) for x, y in ("ab", "cd"))
    return simulate_plan(job, cluster_arrays(job), Candidate(1, 1, groups, True), "1f1b", sharing=False)


def test_a_group_with_a_trunk_and_one_without_are_simulated_apart() -> None:
    whole = two_groups({}, {"trunk_gbps": 6.0})
    free, trunk = (result.single.makespan_ns for result in whole.results)
    assert trunk > free


def test_groups_whose_links_alone_differ_are_simulated_apart() -> None:
    slow, fast = (result.single.makespan_ns for result in two_groups({"trunk_gbps": 6.0}, {"trunk_gbps": 8.0}).results)
    assert fast < slow


def test_groups_with_different_memory_are_simulated_apart() -> None:
    first, second = two_groups({}, {}, (40.0, 20.0)).results
    assert first.case.memory != second.case.memory


def test_equal_groups_are_simulated_once() -> None:
    first, second = two_groups({}, {}).results
    assert first is second
