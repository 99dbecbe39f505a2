"""Power and fabrics of a datacenter: counts and prices of the parts, nodes by power, and bad input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from atlas.cli import main
from atlas.errors import SpecError
from atlas.spec import load_cluster, override, parse_job
from atlas.spec.fabric import PARTS_400G, PARTS_800G, FabricParts
from atlas.spec.power import bill, bill_in, it_watts, nodes_allowed

DC: dict[str, Any] = {"name": "east", "nodes": 16, "gpu": "H200"}


def job(**dc: Any) -> Any:
    merged = {key: value for key, value in {**DC, **dc}.items() if value is not None}
    return parse_job(
        {
            "model": {"layers": 8, "hidden": 1024, "heads": 16, "seq_len": 1024},
            "cluster": {"datacenters": [merged]},
            "num_microbatches": 8,
            "pp": 2,
        }
    )


# ---- price -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("nodes", "parts", "rail_w", "light_w", "power_x", "rail_usd", "cost_x"),
    [
        (128, PARTS_400G, 254.29, 10.78, 23.59, 8_102, 4.22),
        (256, PARTS_800G, 259.06, 16.78, 15.4, 6_085, 3.17),
        (16, PARTS_400G, 257.19, 10.78, 23.86, 8_188, 4.27),
        (32, PARTS_400G, 262.79, 10.78, 24.37, 8_354, 4.35),
        (256, PARTS_400G, 257.19, 10.78, 23.86, 8_188, 4.27),
        (64, PARTS_800G, 259.06, 16.78, 15.44, 6_085, 3.17),
    ],
)
def test_watts_and_dollars_are_those_of_the_paper(
    nodes: int, parts: FabricParts, rail_w: float, light_w: float, power_x: float, rail_usd: float, cost_x: float
) -> None:
    rail, light = (bill(kind, nodes, 8, parts) for kind in ("rail", "photonic"))  # type: ignore[arg-type]
    found = [rail.watts_per_gpu, light.watts_per_gpu, rail.watts / light.watts, rail.usd_per_gpu, light.usd_per_gpu]
    assert [*found, rail.usd / light.usd] == pytest.approx(
        [rail_w, light_w, power_x, rail_usd, 1_919, cost_x], rel=0.005
    )


def test_one_switch_a_rail_leaves_little_to_save() -> None:
    flat, light = bill("flat-rail", 64, 8, PARTS_400G), bill("photonic", 64, 8, PARTS_400G)
    assert (flat.watts / light.watts, flat.usd / light.usd) == pytest.approx((5.5, 1.22), rel=0.005)


def test_one_node_has_no_fabric() -> None:
    found = bill("rail", 1, 8, PARTS_400G)
    assert (found.watts, found.usd, found.transceivers) == (0.0, 0.0, 0)


# ---- power -----------------------------------------------------------------------------------------------------------
def test_nodes_left_out_are_what_the_power_allows() -> None:
    rail = job(nodes=None, power_kw=1000.0)
    light = job(nodes=None, power_kw=1000.0, fabric={"kind": "photonic"})
    for one in (rail, light):
        dc = one.cluster.datacenters[0]
        assert it_watts(one.cluster, dc) <= 1_000_000 < it_watts(one.cluster, dc, nodes=dc.nodes + 1)
    assert [one.cluster.datacenters[0].nodes for one in (rail, light)] == [81, 97]


def test_other_power_gives_other_nodes() -> None:
    one = job(nodes=None, power_kw=1000.0)
    half = override(one, ["cluster.datacenters.east.power_kw=500"])
    assert half.cluster.datacenters[0].nodes < 45
    stated = override(job(power_kw=1000.0), ["cluster.datacenters.east.power_kw=500"])
    assert stated.cluster.datacenters[0].nodes == 16


@pytest.mark.parametrize("kw", [11.0, 30.0, 157.0, 900.0, 5_000.0, 200_000.0])
def test_the_most_nodes_that_fit_are_found(kw: float) -> None:
    dc = job(power_kw=1e6).cluster.datacenters[0].model_copy(update={"power_kw": kw})
    cluster = job().cluster
    for kind in ("rail", "fat-tree", "flat-rail", "photonic"):
        most = int(kw * 1e3 / (1275 * 8)) if kind != "flat-rail" else min(64, int(kw * 1e3 / (1275 * 8)))
        fit = [s for s in range(1, most + 1) if it_watts(cluster, dc, kind, s) <= kw * 1e3]  # type: ignore[arg-type]
        assert nodes_allowed(cluster, dc, kind) == max(fit, default=0)  # type: ignore[arg-type]


def test_a_cluster_file_may_leave_out_nodes(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("datacenters: [{name: a, gpu: H200, power_kw: 100}]\n")
    assert load_cluster(tmp_path / "c.yaml").datacenters[0].nodes == 8


def test_a_parts_file_replaces_figures(tmp_path: Path) -> None:
    (tmp_path / "parts.yaml").write_text("switch_watts: 5048\nsource: mine\ndate: 2026-03\n")
    one = job(fabric={"parts": str(tmp_path / "parts.yaml")})
    own, built_in = bill_in(one.cluster, one.cluster.datacenters[0]), bill("rail", 16, 8, PARTS_400G)
    assert own.watts - built_in.watts == pytest.approx(built_in.switch_ports * 2524 / 64)
    assert own.usd == built_in.usd


# ---- bad input -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("dc", "said"),
    [
        ({"power_kw": 100.0}, r"128 GPUs need 196 kW with their fabric; 100 kW are enough for 8 nodes \(64 GPUs\)"),
        ({"power_kw": 5.0, "nodes": None}, r"one node of 8 H200 needs 10.2 kW"),
        ({"power_kw": 100.0, "gpu": "A10"}, r"the power of a A10 server is not known"),
        ({"power_kw": -1.0}, "greater than 0"),
        ({"pue": 0.5}, "at least 1"),
        ({"fabric": {"kind": "photonic", "reconfigure_ms": -1.0}}, "at least 0"),
        ({"fabric": {"kind": "photonic", "reconfigure_ms": float("nan")}}, "finite"),
        ({"fabric": {"kind": "photonic", "reconfigure_ms": 3_600_001.0}}, "at most 3600000"),
        ({"fabric": {"kind": "photonic", "ports_per_gpu": 0}}, "at least 1"),
        ({"fabric": {"kind": "photonic", "ports_per_gpu": 1}}, "needs 2 circuits for each GPU"),
        ({"fabric": {"kind": "photonic", "traffic": "all-to-all"}}, "needs 15 circuits for each GPU with 16 nodes"),
        ({"fabric": {"kind": "flat-rail"}, "nodes": 65}, "one switch per rail, with 64 ports, and there are 65 nodes"),
        ({"fabric": {"kind": "ring"}}, "'rail', 'fat-tree', 'flat-rail' or 'photonic'"),
        ({"fabric": {"knd": "rail"}}, "Did you mean 'kind'"),
        ({"fabric": {"parts": "/nowhere.yaml"}}, "there is no such file"),
    ],
)
def test_bad_power_and_fabrics_are_refused(dc: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError, match=said):
        job(**dc)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("switch_watts: -3", "at least 0"),
        ("optical_port_usd: -1", "at least 0"),
        ("swich_watts: 3", "unknown key. Did you mean 'switch_watts'"),
        ("- 3", "a mapping of keys"),
        ("optical_switch_ports: 31", "has 31 ports, and 16 nodes need 32"),
    ],
)
def test_bad_parts_are_refused(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "parts.yaml").write_text(text)
    with pytest.raises(SpecError, match=said):
        job(fabric={"kind": "photonic", "parts": str(tmp_path / "parts.yaml")})


def test_negative_server_watts_are_refused() -> None:
    with pytest.raises(SpecError, match="greater than 0"):
        override(job(), ["cluster.gpus.mine.server_watts=-3"])


# ---- the command -----------------------------------------------------------------------------------------------------
YAML = """
model: {layers: 8, hidden: 1024, heads: 16, seq_len: 1024}
cluster:
  datacenters:
    - {name: east, nodes: 128, gpu: H200, fabric: {kind: photonic}}
    - {name: west, gpu: H200, power_kw: 1000}
    - {name: one, nodes: 1, gpu: H200}
num_microbatches: 8
pp: 2
"""


def test_atlas_fabric_puts_fabrics_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "job.yaml").write_text(YAML)
    assert main(["fabric", str(tmp_path / "job.yaml")]) == 0
    text = capsys.readouterr().out
    said = " ".join(text.split())
    assert said.startswith("east: for 1,024 H200, photonic rails need 10.78 W a GPU; rail, the electrical fabric with")
    assert "(23.59x)" in said
    assert "one: one node needs no fabric: 0 W, $0." in text
    assert main(["fabric", str(tmp_path / "job.yaml"), "--json"]) == 0
    east, west, _ = json.loads(capsys.readouterr().out)["datacenters"]
    assert [row["kind"] for row in east["fabrics"]] == ["rail", "fat-tree", "flat-rail", "photonic"]
    assert [row["nodes_allowed"] for row in west["fabrics"]] == [81, 80, 64, 97]
    assert main(["fabric", str(tmp_path / "job.yaml"), "--set", "cluster.datacenters.east.power_kw=9"]) == 2
