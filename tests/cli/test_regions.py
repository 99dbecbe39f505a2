"""`atlas regions`: tables and JSON with dates; unknown names."""

from __future__ import annotations

import json

from cli_runner import Atlas


def test_regions_lists_a_cloud(atlas: Atlas) -> None:
    said = atlas("regions", "gcp")
    assert said.code == 0
    assert "gcp:europe-west4" in said.out
    assert "aws:" not in said.out
    assert "prior" in said.out


def test_two_regions_show_prices_and_the_path_between_them(atlas: Atlas) -> None:
    said = atlas("regions", "aws:us-east-1", "gcp:europe-west4")
    assert said.code == 0
    for text in ("Prior", "p5.48xlarge", "6.88", "2026-07-20", "97 ms", "4.26", "0.0875", "+-25 %"):
        assert text in said.out, text
    assert "2022-11" in said.err
    assert "older than a year" in said.err
    assert max(map(len, said.out.splitlines())) <= 80


def test_regions_as_json(atlas: Atlas) -> None:
    found = json.loads(atlas("regions", "aws:us-east-1", "aws:eu-south-2", "--json").out)
    assert found["regions"][0]["gpus"][0]["date"]
    assert found["links"][0]["egress_usd_per_gb"]["value"] is None


def test_an_unknown_region_is_refused(atlas: Atlas) -> None:
    said = atlas("regions", "aws:us-est-1")
    assert said.code == 2
    assert "aws:us-east-1" in said.err
