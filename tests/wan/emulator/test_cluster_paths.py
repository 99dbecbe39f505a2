"""Paths from a cluster file, and their arguments for netem."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest

from atlas.commands.wan_emulate import cluster_paths
from atlas.errors import AtlasError
from atlas.spec.job import Cluster
from atlas.wan.emulator.kernel_shaping import netem_arguments, path_of_node
from atlas.wan.emulator.lateness import Histogram, summarize
from atlas.wan.emulator.paths import PathSpec, Trunk, nodes_of, scaled

CLUSTER = Cluster.model_validate(
    {
        "datacenters": [{"name": "east", "nodes": 2}, {"name": "west", "nodes": 3}, {"name": "far", "nodes": 1}],
        "wan": {"latency_ms": 20.0, "pair_gbps": 5.0},
        "links": [{"between": ["east", "west"], "trunk_gbps": 8.0}, {"between": ["east", "far"], "latency_ms": 60.0}],
    }
)


def test_every_link_gives_a_path_to_every_node_pair() -> None:
    paths = cluster_paths(CLUSTER)
    assert len(paths) == 2 * 3 + 2 * 1
    assert paths["east-0", "west-2"] == PathSpec(0.02, 3_000_000, 5e9, Trunk("east~west", 8e9))
    assert paths["east-1", "far-0"].latency_s == 0.06
    assert ("west-0", "far-0") not in paths


def test_nodes_of_one_datacenter_have_paths_where_asked_for() -> None:
    paths = cluster_paths(CLUSTER, lan=True, nodes_per_dc=2)
    assert paths["west-0", "west-1"].pair_bps is None
    assert nodes_of(paths) == ["east-0", "west-0", "west-1", "east-1", "far-0"]


def test_scaled_paths_take_as_many_round_trips() -> None:
    before, after = (p["east-0", "west-0"] for p in (cluster_paths(CLUSTER), scaled(cluster_paths(CLUSTER), 0.01)))
    assert after.pair_bps == pytest.approx(50e6)
    assert after.trunk == Trunk("east~west", 8e7)
    assert after.window_bytes == 30_000
    assert after.latency_s == before.latency_s


def test_a_path_survives_json() -> None:
    path = PathSpec(0.02, None, 5e9, Trunk("t", 1e9), 0.001, 0.01, 100)
    assert PathSpec.from_json(asdict(path)) == path


def test_too_many_nodes_are_refused() -> None:
    many = Cluster.model_validate(
        {"datacenters": [{"name": "a", "nodes": 90}, {"name": "b", "nodes": 1}], "wan": {"latency_ms": 1.0}}
    )
    with pytest.raises(AtlasError, match="--nodes-per-dc"):
        cluster_paths(many)


def test_percentiles_are_never_too_small() -> None:
    late = Histogram()
    for late_us in range(1, 1001):
        late.note(late_us * 1000)
    found = summarize(late.bins, late.worst_ns)
    assert (found.num_pieces, found.worst_s) == (1000, 0.001)
    assert 0.0005 <= found.p50_s <= 0.00056
    assert 0.00099 <= found.p99_s <= 0.00105
    assert found.reason(p99_s=0.002) is None


def test_netem_gets_the_path_or_an_error_is_raised() -> None:
    path = PathSpec(0.02, pair_bps=300e6, loss=0.0005, queue_bytes=1_500_000)
    assert netem_arguments(path) == (
        ["netem", "delay", "20000us", "loss", "0.05%", "rate", "300000000bit", "limit", "1500"]
    )
    with pytest.raises(AtlasError, match="differ"):
        path_of_node({("a", "b"): path, ("a", "c"): PathSpec()}, "a")
    with pytest.raises(AtlasError, match="several pairs"):
        path_of_node({("a", "b"): path, ("a", "c"): path}, "a")


def test_the_command_prints_the_paths(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import argparse

    from atlas.commands import wan_emulate

    file = tmp_path / "cluster.yaml"
    file.write_text("wan: {latency_ms: 5}\ndatacenters:\n  - {name: a, nodes: 1}\n  - {name: b, nodes: 2}\n")
    parser = argparse.ArgumentParser()
    wan_emulate.configure(parser)
    assert wan_emulate.run(parser.parse_args([str(file), "--scale", "0.01"])) == 0
    assert '"from": "a-0", "to": "b-1", "latency_s": 0.005' in capsys.readouterr().out
    with pytest.raises(AtlasError, match="SRC:DST=HOST:PORT"):
        wan_emulate.run(parser.parse_args([str(file), "--forward", "a-0>b-0"]))
