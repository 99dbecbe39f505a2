"""The catalogue of regions: every figure has a source, priors are as good as stated, nothing is invented."""

from __future__ import annotations

import csv
import importlib
import statistics
from datetime import date
from pathlib import Path

import pytest

from atlas.catalogue.priors import cable_km, gbps, great_circle_km, latency, link_priors
from atlas.catalogue.rebuild import DATA
from atlas.catalogue.table import days_old, egress_price, gpu_prices, region, regions, throughput
from atlas.errors import SpecError
from atlas.spec.gpus import GPUS

CLOUD = Path(__file__).parents[3] / "shared" / "data" / "cloud"
DT_FM_MS = {
    ("us-west-2", "us-east-1"): 67,
    ("us-west-2", "ap-northeast-1"): 96,
    ("us-east-1", "eu-west-2"): 76,
    ("ap-northeast-1", "ap-southeast-1"): 73,
    ("ap-southeast-1", "ap-southeast-2"): 92,
    ("eu-west-2", "eu-central-1"): 14,
}
"""A sample of DT-FM's measured round trips; bench/regions.py judges all."""


@pytest.mark.parametrize("name", ["regions.csv", "throughput.csv", "egress.csv", "prices.csv"])
def test_every_row_names_a_known_source_with_its_date_and_licence(name: str) -> None:
    with (DATA / "sources.csv").open() as file:
        sources = {row["source"]: row for row in csv.DictReader(file)}
    with (DATA / name).open() as file:
        rows = list(csv.DictReader(file))
    assert rows
    for row in rows:
        known = sources[row["source"]]
        assert (row["date"], row["licence"]) == (known["date"], known["licence"])
        assert known["licence"].split(" ")[0] in ("Apache-2.0", "MIT")


def test_three_clouds_have_regions_and_prices_of_known_gpu_types() -> None:
    for cloud in ("aws", "gcp", "azure"):
        assert sum(one.cloud == cloud for one in regions().values()) >= 25
        assert any(name.startswith(cloud) for name, gpu in gpu_prices() if gpu == "H100")
    assert {gpu for _, gpu in gpu_prices()} <= set(GPUS)
    assert all(price.usd_per_gpu_hour > 0 for price in gpu_prices().values())


def test_latency_prior_is_close_to_measured_pairs_that_it_was_not_fitted_on() -> None:
    errors = []
    for (a, b), ms in DT_FM_MS.items():
        found = latency(region(f"aws:{a}", ""), region(f"aws:{b}", "")).value
        assert found is not None
        errors.append(abs(found / ms - 1))
    assert statistics.median(errors) <= 0.20
    assert max(errors) <= 0.40


def test_cables_between_europe_and_asia_are_longer_than_the_great_circle() -> None:
    london, tokyo, virginia = (51.5, -0.1), (35.7, 139.7), (39.0, -77.5)
    assert cable_km(london, tokyo) > 1.3 * great_circle_km(london, tokyo)
    assert cable_km(london, virginia) == pytest.approx(great_circle_km(london, virginia))
    assert cable_km(london, tokyo) == pytest.approx(cable_km(tokyo, london))
    assert all(
        cable_km(a.location, b.location) < 40_000 for a in regions().values() for b in list(regions().values())[::9]
    )


def test_a_pair_outside_the_grid_gets_a_value_with_its_error() -> None:
    a, b = region("azure:swedencentral", ""), region("gcp:us-east5", "")
    assert a.name not in throughput()
    found = gbps(a, b)
    assert found.value is not None
    assert 0.3 < found.value < 20
    assert "+-35 %" in found.basis
    assert "azure:" in found.basis


def test_a_measured_pair_keeps_its_measurement() -> None:
    a, b = region("aws:us-east-1", ""), region("gcp:europe-west4", "")
    assert gbps(a, b).value == throughput()[a.name][b.name]
    assert "measured in 2022-01" in gbps(a, b).basis


def test_an_egress_price_without_a_source_is_unknown() -> None:
    a, b = region("aws:eu-south-2", ""), region("gcp:europe-west4", "")
    assert egress_price(a, b) is None
    found = link_priors(a, b).egress_usd_per_gb
    assert found.value is None
    assert "unknown" in found.basis


def test_egress_rules_of_google_and_azure() -> None:
    def price(a: str, b: str) -> float:
        found = egress_price(region(a, ""), region(b, ""))
        assert found is not None
        return found.usd_per_gb

    assert price("gcp:us-central1", "gcp:us-east4") == 0.01
    assert price("gcp:europe-west4", "gcp:us-east4") == 0.08
    assert price("gcp:australia-southeast1", "gcp:us-east4") == 0.15
    assert price("azure:westeurope", "azure:northeurope") == 0.02
    assert price("azure:westeurope", "azure:eastus") == 0.05
    assert price("azure:japaneast", "aws:us-east-1") == 0.12


@pytest.mark.skipif(not CLOUD.is_dir(), reason="needs ../shared/data/cloud")
def test_aws_egress_prices_equal_the_list() -> None:
    with (CLOUD / "aws_transfer_usd_per_gb.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["src"] != row["dst"]]
    known = regions()
    checked = 0
    for row in rows:
        a, b = known.get(f"aws:{row['src']}"), known.get(f"aws:{row['dst']}")
        if a is not None and b is not None:
            found = egress_price(a, b)
            assert found is not None
            assert found.usd_per_gb == float(row["cost"])
            checked += 1
    assert checked > 300


def test_the_age_of_a_date(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atlas.catalogue.table.today", lambda: date(2026, 7, 30))
    assert days_old("2026-07-20") == 10
    assert days_old("2025-07") == 394


@pytest.mark.parametrize(
    ("given", "suggested"),
    [
        ("aws:us-east1", "aws:us-east-1"),
        ("gpc:europe-west4", "gcp:europe-west4"),
        ("azure:frankfurt", "azure:germanywestcentral"),
        ("us-west", "gcp:us-west4"),
    ],
)
def test_an_unknown_region_suggests_the_nearest(given: str, suggested: str) -> None:
    with pytest.raises(SpecError, match="Did you mean") as error:
        region(given, "--dc")
    assert suggested in str(error.value)


def test_the_throughput_of_a_region_left_out_of_the_grid_is_near_the_measured_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "bench"))
    ours, naive = importlib.import_module("regions").throughput_errors()
    assert statistics.median(ours) <= 0.30
    assert statistics.median(ours) < 0.5 * statistics.median(naive)
