"""Prices of one cell against hand arithmetic: links in every mode, collectives, what scales with what."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from shipped_jobs import EXAMPLES, SHIPPED

from atlas.cost.arrange import arrange
from atlas.cost.cluster_arrays import ring_bps, stage_workers_per_node
from atlas.cost.price import layout_of, price
from atlas.cost.runtimes import RUNTIMES
from atlas.cost.table import FAIR, PRIVATE, TURNS, Circuits, Costs
from atlas.errors import InfeasibleError, SpecError
from atlas.ir.program import Kind
from atlas.launch.rendezvous import AgentName
from atlas.spec import Job, load_job

TINY = EXAMPLES / "tiny.yaml"
ACTIVATION_BITS = 2048 * 2048 * 2 * 8
WAN = 1
"""The boundary of tiny.yaml that crosses."""


def wan_links(costs) -> list:
    return [link for link in costs.links if link.name.startswith("wan")]


@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: p.stem)
def test_shipped_jobs_are_priced_in_every_mode(path: Path) -> None:
    job = load_job(path)
    frame = layout_of(job)
    for mode in ({"tcp": "one"}, {"tcp": "many"}, {"sharing": True}):
        costs = price(job, **mode)
        assert costs.compute_ns.shape[:2] == (frame.num_pipelines, frame.num_stages)
        assert costs.work_ns.shape == (2, frame.num_pipelines, frame.num_stages - 1)
        assert (costs.compute_ns[:, :, : Kind.P] > 0).all()
        assert (costs.work_ns > 0).all()
        assert costs.channel_link.max() == len(costs.links) - 1


def test_the_headline_ratio_of_the_testbed() -> None:
    job = load_job(EXAMPLES / "testbed/gpt-a-40ms.yaml")
    one, many = price(job, tcp="one"), price(job, tcp="many")
    assert one.work_ns.max() / many.work_ns.max() == pytest.approx(5000 / 293, rel=0.03)


def test_one_connection_carries_a_window_per_round_trip() -> None:
    costs = price(load_job(TINY), tcp="one")
    assert costs.work_ns[0, 0, WAN] == round(ACTIVATION_BITS / (3e6 * 8 / 0.040) * 1e9)
    assert costs.latency_ns[0, 0, WAN] == 20_000_000
    assert all(link.policy == PRIVATE for link in wan_links(costs))
    assert len(wan_links(costs)) == 4  # two pipelines, two directions


def test_taking_turns_uses_the_paths_of_all_nodes() -> None:
    alone, shared = price(load_job(TINY)), price(load_job(TINY), sharing=True)
    assert alone.work_ns[0, 0, WAN] == round(ACTIVATION_BITS / 5e9 * 1e9)
    assert shared.work_ns[0, 0, WAN] == round(ACTIVATION_BITS / 10e9 * 1e9)
    assert [link.policy for link in wan_links(shared)] == [TURNS, TURNS]
    assert {link.quantum_ns for link in wan_links(shared)} == {5_000_000}
    # The first chunk is 5 ms of 10 Gbit/s; half of it goes to the peer at 100 Gbit/s, 20 us away.
    assert shared.before_ns[0, 0, WAN] == 250_000 + 20_000
    assert shared.latency_ns[0, 0, WAN] == 20_000_000 + 250_000 + 20_000
    assert (shared.before_ns[:, :, [0, 2]] == 0).all()


def test_a_trunk_that_binds_leaves_nothing_to_gain() -> None:
    job = load_job(TINY, ["cluster.wan.trunk_gbps=5"])
    alone, shared = price(job), price(job, sharing=True)
    assert [link.policy for link in wan_links(alone)] == [FAIR, FAIR]
    assert {link.capacity for link in wan_links(alone)} == {1.0}
    assert alone.work_ns[0, 0, WAN] == shared.work_ns[0, 0, WAN]


def test_cells_divide_the_trunk_exactly() -> None:
    sets = ["cluster.datacenters.east.nodes=8", "cluster.datacenters.west.nodes=8", "cells=2"]
    job = load_job(TINY, [*sets, "cluster.wan.trunk_gbps=15"])
    (link, _) = wan_links(price(job))
    assert (link.policy, link.capacity) == (FAIR, 1.5)  # 15 / 2 cells / 5 Gbit/s a pair
    assert price(job, sharing=True).work_ns[0, 0, WAN] == round(ACTIVATION_BITS / 7.5e9 * 1e9)


def test_a_trunk_below_one_pair_slows_every_transfer() -> None:
    costs = price(load_job(TINY, ["cluster.wan.trunk_gbps=1"]))
    assert costs.work_ns[0, 0, WAN] == round(ACTIVATION_BITS / 1e9 * 1e9)
    assert {link.capacity for link in wan_links(costs)} == {1.0}


def test_the_intra_dc_network_limits_sharing() -> None:
    sets = ["cluster.datacenters.east.net_gbps=4"]
    shared = price(load_job(TINY, sets), sharing=True)
    assert shared.work_ns[0, 0, WAN] == round(ACTIVATION_BITS / 8e9 * 1e9)  # 4 x C / (C - 1)


def test_workers_on_one_node_divide_its_pair_cap() -> None:
    sets = [f"cluster.datacenters.{dc}.{key}" for dc in ("east", "west") for key in ("nodes=1", "gpus_per_node=4")]
    assert price(load_job(TINY, sets)).work_ns[0, 0, WAN] == round(ACTIVATION_BITS / 2.5e9 * 1e9)


@pytest.mark.parametrize("sharing", [False, True])
@pytest.mark.parametrize("trunk_gbps", [None, 12])
@pytest.mark.parametrize("order", ["east west", "east west east west"])
@pytest.mark.parametrize("net_gbps", [4, 10, 100])
def test_a_faster_wan_delays_no_transfer(net_gbps: float, order: str, trunk_gbps: float | None, sharing: bool) -> None:
    """Nor the last of several that are ready at the same time."""
    words = order.split()
    placed = "placement=" + str([{"dc": dc, "stages": 4 // len(words)} for dc in words])
    sets = [placed, f"cluster.wan.trunk_gbps={'' if trunk_gbps is None else trunk_gbps}", "pipelines_per_cell=4"]
    nodes = [f"cluster.datacenters.{dc}.{key}" for dc in words for key in ("nodes=8", f"net_gbps={net_gbps}")]
    before: tuple[np.ndarray, np.ndarray] | None = None
    for pair_gbps in (0.5, 1, 1.5, 2, 2.5, 3, 3.5, 4, 5, 8, 10, 50):
        costs = price(load_job(TINY, [*nodes, *sets, f"cluster.wan.pair_gbps={pair_gbps}"]), sharing=sharing)
        one_ns = costs.before_ns + costs.work_ns + costs.latency_ns
        rate = np.array([link.capacity if link.policy == FAIR else 1.0 for link in costs.links])
        all_ns = np.bincount(costs.channel_link.ravel(), costs.work_ns.ravel()) / rate
        found = one_ns, all_ns[costs.channel_link]
        for now, then in zip(found, before or found, strict=True):
            assert (now <= then * (1 + 1e-6)).all(), pair_gbps
        before = found


def test_boundaries_between_the_same_two_datacenters_share_their_trunk() -> None:
    placement = "placement=" + str([{"dc": dc, "stages": 1} for dc in ("east", "west", "east", "west")])
    job = load_job(TINY, [placement, "cluster.wan.trunk_gbps=9"])
    for mode, policy in (({}, FAIR), ({"sharing": True}, TURNS)):
        costs = price(job, **mode)
        assert [link.policy for link in costs.links] == [policy, policy]
        # East to west: forward of boundaries 0 and 2, backward of boundary 1.
        east_west = costs.channel_link[0, 0, 0]
        assert (costs.channel_link[0, :, [0, 2]] == east_west).all()
        assert (costs.channel_link[1, :, 1] == east_west).all()
        assert costs.channel_link[0, 0, 1] != east_west


def test_an_interleaved_pipeline_comes_back_over_the_same_node_pairs() -> None:
    job = load_job(TINY, ["pp=2", "interleave=2"])
    assert layout_of(job).stage_rank == (0, 1, 0, 1)
    costs = price(job)
    assert costs.channel_link[0, 0, 0] == costs.channel_link[0, 0, 2] == costs.channel_link[1, 0, 1]
    assert {link.policy for link in costs.links} == {FAIR}
    assert costs.channel_link[0, 0, 0] != costs.channel_link[0, 1, 0]
    assert {link.policy for link in price(job, sharing=True).links} == {TURNS}
    # The worker's optimizer is charged once, to its first stage.
    assert (costs.compute_ns[:, 2:, Kind.SYNC : Kind.P] == 0).all()
    assert (costs.compute_ns[:, :2, Kind.STEP] > 0).all()


def test_the_backward_is_the_sum_of_its_halves() -> None:
    ns = price(load_job(TINY)).compute_ns
    assert (ns[..., Kind.B] == ns[..., Kind.I] + ns[..., Kind.W]).all()


def test_the_ring_all_reduce_is_the_textbook_one() -> None:
    job = load_job(TINY)
    params = 2 * (12 * 2048**2 + 13 * 2048)  # a middle stage: two layers with biases and norms
    ring_s = 2 * (2 - 1) / 2 * params * 4 * 8 / 100e9 + 2 * 20e-6
    assert price(job).compute_ns[0, 1, Kind.SYNC] == pytest.approx(ring_s * 1e9, abs=2)


def test_one_replica_has_nothing_to_reduce() -> None:
    assert (price(load_job(TINY, ["pipelines_per_cell=1"])).compute_ns[..., Kind.SYNC] == 0).all()


def test_the_norm_takes_a_round_trip_over_the_path() -> None:
    norm_ns = price(load_job(TINY)).compute_ns[..., Kind.NORM]
    assert (norm_ns == 2 * (20_000_000 + 4 * 20_000)).all()


def test_tied_embeddings_cross_the_wan_once_an_iteration() -> None:
    tied, free = (price(load_job(TINY, [f"model.tied_embeddings={t}"])).compute_ns for t in ("true", "false"))
    slice_s = 32_000 * 2048 * 4 * 8 / 2 / 5e9
    extra_ns = (tied - free)[0, :, Kind.SYNC]
    assert extra_ns[0] == pytest.approx(slice_s * 1e9 + 20_080_000, abs=2)
    assert extra_ns[1] == 0


def test_pipelines_that_share_a_node_share_its_path_for_tied_embeddings() -> None:
    """All slices together are one matrix: over two nodes' paths half the time, over the path of one node all of it."""

    def exchange_s(nodes: int, per_node: int) -> float:
        sets = [f"cluster.datacenters.{dc}.{key}" for dc in ("east", "west") for key in (f"nodes={nodes}",
                f"gpus_per_node={per_node}")]  # fmt: skip
        sets += ["pp=2", "pipelines_per_cell=2", "placement=", "cluster.wan.latency_ms=1", "cluster.wan.trunk_gbps="]
        tied, free = (price(load_job(TINY, [*sets, f"model.tied_embeddings={t}"])) for t in ("true", "false"))
        return float((tied.compute_ns - free.compute_ns)[0, 0, Kind.SYNC]) / 1e9 - 1e-3

    assert exchange_s(1, 2) == pytest.approx(2 * exchange_s(2, 1), rel=1e-3)


def test_a_larger_microbatch_takes_longer_everywhere() -> None:
    one, two = (price(load_job(TINY, [f"microbatch={b}"]), sharing=True) for b in (1, 2))
    np.testing.assert_allclose(two.compute_ns[..., : Kind.SYNC], 2 * one.compute_ns[..., : Kind.SYNC], atol=2)
    np.testing.assert_allclose(two.work_ns, 2 * one.work_ns, atol=2)


def test_a_trace_reaches_every_wan_link(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("time_s,rate,extra_latency_ms\n0,1,0\n1.5,0.5,2\n")
    costs = price(load_job(TINY, [f"cluster.wan.trace={tmp_path / 't.csv'}"]))
    assert {link.trace is None for link in costs.links if link.name.startswith("lan")} == {True}
    for link in wan_links(costs):
        assert link.trace.at_ns == (0, 1_500_000_000)
        assert link.trace.rate == (1, 0.5)
        assert link.trace.extra_latency_ns == (0, 2_000_000)


def test_sharing_needs_many_connections() -> None:
    with pytest.raises(SpecError, match="many connections"):
        price(load_job(TINY), tcp="one", sharing=True)


@pytest.mark.parametrize("text", ["cluster.wan.pair_gbps=1e-9", "efficiency=1e-12", "cluster.wan.latency_ms=1e9"])
def test_absurd_durations_are_refused(text: str) -> None:
    with pytest.raises(InfeasibleError, match="units"):
        price(load_job(TINY, [text]))


def test_replicas_that_share_a_node_leave_it_once() -> None:
    """Eight replicas of a stage on one-GPU nodes, on two nodes of four, on one node of eight."""
    shared = ["pp=2", "pipelines_per_cell=8"]

    def sync_s(nodes: int, per_node: int) -> float:
        sizes = [f"cluster.datacenters.{dc}.{key}" for dc in ("east", "west") for key in ("nodes", "gpus_per_node")]
        changes = [f"{key}={nodes if key.endswith('nodes') else per_node}" for key in sizes]
        job = load_job(TINY, [*shared, *changes, "cluster.datacenters.east.net_latency_us=0"])
        return float(price(job).compute_ns[0, 0, Kind.SYNC]) / 1e9

    alone = sync_s(8, 1)
    assert sync_s(2, 4) == pytest.approx(alone)  # the whole network of a node, though four divide it
    peer_gbps = load_job(TINY).cluster.gpu("east").peer_gbps
    assert sync_s(1, 8) == pytest.approx(alone * 100 / peer_gbps)  # nothing leaves the node
    assert sync_s(8, 4) == sync_s(2, 4)  # a plan takes the fewest nodes that hold its workers


@pytest.mark.parametrize("cells", [1, 3])
@pytest.mark.parametrize("tp", [1, 2, 8])
@pytest.mark.parametrize("runtime", RUNTIMES)
def test_nodes_that_no_worker_needs_change_no_price(runtime: str, tp: int, cells: int) -> None:
    """Four workers of each cell in each datacenter, on nodes of eight GPUs."""

    def costs(nodes: int) -> Costs:
        sets = [
            f"cluster.datacenters.{dc}.{key}"
            for dc in ("east", "west")
            for key in ("gpus_per_node=8", f"nodes={nodes}")
        ]
        placed = "placement=[{dc: east, stages: 2}, {dc: west, stages: 2}]"
        return price(load_job(TINY, [*sets, placed, f"tp={tp}", f"runtime={runtime}", f"cells={cells}"]))

    few = costs(-(-4 * cells * tp // 8))
    for nodes in (13, 14, 64):
        many = costs(nodes)
        for field in ("compute_ns", "work_ns", "before_ns", "latency_ns"):
            assert np.array_equal(getattr(many, field), getattr(few, field)), field


def test_a_plan_changes_no_circuits_because_of_nodes_without_workers() -> None:
    """Three nodes with a worker each: two circuits of a GPU join it to both others."""

    def circuits(nodes: int) -> Circuits | None:
        east = f"{{name: east, nodes: {nodes}, gpus_per_node: 1, fabric: {{kind: photonic}}}}"
        west = "{name: west, nodes: 3, gpus_per_node: 1}"
        sets = [f"cluster.datacenters=[{east}, {west}]", "placement=[{dc: east, stages: 1}, {dc: west, stages: 1}]"]
        return price(load_job(TINY, [*sets, "pp=2", "pipelines_per_cell=3"])).circuits

    assert circuits(3) is circuits(16) is None


@pytest.mark.parametrize("replicas", [2, 3, 8])
@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("per_node", [1, 2, 3, 8])
def test_networks_are_priced_where_the_launcher_places_the_workers(replicas: int, stages: int, per_node: int) -> None:
    """Of a node with the most rings that leave it, and of one with the most workers of one stage."""
    workers = [stage for _ in range(replicas) for stage in range(stages)]
    hosts = -(-len(workers) // per_node)
    shares = [workers[AgentName("a", part, hosts).share(len(workers))] for part in range(hosts)]
    rings = max(len(set(share)) for share in shares)
    rate_bps, is_inside = ring_bps(replicas, stages, 1, per_node, 100e9, 1e15)
    assert is_inside == (hosts == 1)
    assert rate_bps == (1e15 if hosts == 1 else pytest.approx(100e9 / rings))
    east = f"{{name: east, nodes: 64, gpus_per_node: {per_node}, gpu: A100-40}}"
    cluster = arrange(load_job(TINY, [f"cluster.datacenters=[{east}]", "pp=1", "pipelines_per_cell=1"])).cluster
    most = max(share.count(stage) for share in shares for stage in range(stages))
    assert stage_workers_per_node(cluster, 1, 0, replicas, stages) == most


def test_the_weight_gradient_of_the_head_is_not_put_off() -> None:
    job = load_job(TINY)
    ns = price(job).compute_ns[0]
    assert ns[-1, Kind.W] == pytest.approx(ns[-2, Kind.W] * layers_of(job)[-1] / layers_of(job)[-2], abs=2)
    assert ns[-1, Kind.I] > ns[-1, Kind.W]
    assert (ns[:, Kind.B] == ns[:, Kind.I] + ns[:, Kind.W]).all()


def layers_of(job: Job) -> tuple[int, ...]:
    return arrange(job).layers_per_stage
