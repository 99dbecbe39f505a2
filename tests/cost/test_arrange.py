"""What a user leaves out is filled in by stated rules, within the room there is."""

from __future__ import annotations

import re
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shipped_jobs import EXAMPLES, SHIPPED

from atlas.cost.arrange import arrange, balanced_split
from atlas.cost.memory import memory_rule, worker_memory
from atlas.errors import InfeasibleError, SpecError
from atlas.spec import load_job

TINY = EXAMPLES / "tiny.yaml"


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(1, 9), min_size=2, max_size=9), st.integers(0, 20), st.integers(0, 20), st.data())
def test_the_split_is_the_best_of_all_splits(layers: list[int], first: int, last: int, data: st.DataObject) -> None:
    num_stages = data.draw(st.integers(1, len(layers)))
    speeds = data.draw(st.lists(st.integers(1, 3), min_size=num_stages, max_size=num_stages))
    sums = np.cumsum([0, *layers]) / np.array(speeds)[:, None]
    fixed = np.zeros(num_stages)
    fixed[0] += first / speeds[0]
    fixed[-1] += last / speeds[-1]

    def slowest(split: tuple[int, ...]) -> float:
        ends = [sum(split[: i + 1]) for i in range(num_stages)]
        work = [sum(layers[end - size : end]) for end, size in zip(ends, split, strict=True)]
        work[0] += first
        work[-1] += last
        return max(w / v for w, v in zip(work, speeds, strict=True))

    cuts = combinations(range(1, len(layers)), num_stages - 1)
    splits = [tuple(b - a for a, b in zip((0, *cut), (*cut, len(layers)), strict=True)) for cut in cuts]
    found = balanced_split(sums, fixed, np.full(len(fixed), sums.shape[1] - 1))
    assert sum(found) == len(layers)
    assert min(found) >= 1
    assert slowest(found) == pytest.approx(min(map(slowest, splits)))


def test_equal_layers_are_dealt_evenly() -> None:
    assert sorted(balanced_split(np.tile(np.arange(11.0), (4, 1)), np.zeros(4), np.full(4, 10))) == [2, 2, 3, 3]


def test_no_stage_has_more_layers_than_fit() -> None:
    """All GPUs are equally fast, so an equal split would be fastest, but it does not fit on the small ones."""
    changes = ["cluster.datacenters.east.gpu=A100-80", "model.hidden=4096", "model.heads=32", "model.layers=40"]
    small = arrange(load_job(TINY, changes))
    assert small.layers_per_stage[0] > small.layers_per_stage[-1]
    assert worker_memory(load_job(TINY, changes), small)[-1].free > 0
    large = arrange(load_job(TINY, [*changes, "cluster.datacenters.west.gpu=A100-80"]))
    assert max(large.layers_per_stage) - min(large.layers_per_stage) <= 1
    memory_rule(load_job(TINY, changes), small)  # raises if not one microbatch fits


def test_a_model_that_no_split_fits_is_refused_for_memory() -> None:
    changes = ["model.hidden=4096", "model.heads=32", "model.layers=400"]
    with pytest.raises(InfeasibleError, match="GiB"):
        memory_rule(load_job(TINY, changes), arrange(load_job(TINY, changes)))


def test_the_stage_with_the_lm_head_has_fewer_layers() -> None:
    assert arrange(load_job(EXAMPLES / "gpt-a.yaml")).layers_per_stage == (2, 2, 1)


def test_the_default_split_counts_recompute_only_where_there_is_any() -> None:
    """The head is not recomputed, so it weighs more in a job without recompute."""

    def slowest_s(split: str = "") -> float:
        changes = ["recompute=false", "pp=2", "model.layers=24", "model.vocab=128000", f"layers_per_stage={split}"]
        times = arrange(load_job(TINY, changes)).stage_times
        return max(time.forward_s + time.input_s + time.weight_s for time in times)

    every = [slowest_s(f"[{first}, {24 - first}]") for first in range(1, 24)]
    assert slowest_s() == pytest.approx(min(every))


def test_the_default_placement_is_proportional_in_file_order() -> None:
    job = load_job(TINY, ["cluster.datacenters.west.nodes=12", "pp=8"])
    assert arrange(job).rank_dc == ("east",) * 2 + ("west",) * 6


def test_fewer_stages_than_datacenters_go_to_the_roomiest() -> None:
    job = load_job(EXAMPLES / "three-dcs.yaml", ["pp=2", "cluster.datacenters.east.nodes=4", "pipelines_per_cell=2"])
    assert arrange(job).rank_dc == ("west", "central")


def test_a_placement_may_be_given() -> None:
    job = load_job(TINY, ["placement=[{dc: west, stages: 1}, {dc: east, stages: 2}, {dc: west, stages: 1}]"])
    assert arrange(job).rank_dc == ("west", "east", "east", "west")


def test_pipelines_per_cell_is_wan_time_over_forward_time_within_the_room() -> None:
    job = load_job(EXAMPLES / "gpt-a.yaml", ["pipelines_per_cell="])
    arrangement = arrange(job)
    wan_s = job.activation_bytes * 8 / 5e9
    assert arrangement.num_pipelines == round(wan_s / max(t.forward_s for t in arrangement.stage_times)) == 2
    slow = load_job(EXAMPLES / "gpt-a.yaml", ["pipelines_per_cell=", "cluster.wan.pair_gbps=0.1"])
    assert arrange(slow).num_pipelines == 4  # four nodes in each datacenter, one stage each
    near = load_job(EXAMPLES / "gpt-a.yaml", ["pipelines_per_cell=", "cluster.wan.pair_gbps=1000"])
    assert arrange(near).num_pipelines == 1


@pytest.mark.parametrize(
    ("sets", "words"),
    [
        (["cells=3"], "need 24 GPUs; the datacenters have 8"),
        (["placement=[{dc: east, stages: 3}, {dc: west, stages: 1}]"], "need 6 GPUs, east has 4"),
        (["placement=[{dc: east, stages: 4}]", "tp=2"], "need 16 GPUs, east has 4 that a tp group can use"),
        (["tp=2"], "need 16 GPUs; the datacenters have 8, enough for 2 stages of all replicas"),
        (["cluster.links=[]"], "no link joins them"),
    ],
)
def test_a_job_that_does_not_fit_the_cluster_is_an_error(sets: list[str], words: str) -> None:
    with pytest.raises(InfeasibleError, match=words):
        arrange(load_job(TINY, sets))


def test_a_path_without_latency_is_an_error() -> None:
    with pytest.raises(SpecError, match="latency_ms"):
        arrange(load_job(TINY, ["cluster.wan.latency_ms="]))


def test_a_single_datacenter_needs_no_path() -> None:
    job = load_job(TINY, ["cluster.wan.latency_ms=", "pp=2", "placement=[{dc: east, stages: 2}]"])
    assert set(arrange(job).rank_dc) == {"east"}


@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: p.stem)
def test_the_commands_in_the_examples_comments_work(path: Path) -> None:
    for line in path.read_text().splitlines():
        if line.startswith("#   atlas simulate"):
            arrange(load_job(path, re.findall(r"--set (\S+)", line)))


def test_the_large_example_uses_every_gpu_it_has() -> None:
    job = load_job(EXAMPLES / "llama-70b-5-regions.yaml")
    used = job.tp * job.pp * arrange(job).num_pipelines * job.cells
    assert used == sum(dc.nodes * dc.gpus_per_node for dc in job.cluster.datacenters) == 10_240
