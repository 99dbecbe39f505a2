"""Labels on maps of datacenters."""

from __future__ import annotations

import itertools
import random
import re

import pytest

from atlas.view.map import CHAR, map_svg
from atlas.view.places import PAGE, PANEL, Picture, map_places

TEXT = re.compile(r'<text class="(?:load|name)" x="([-\d.]+)" y="([-\d.]+)">(.*?)</text>')


def scene_of(places: list[tuple[float, float]]) -> dict[str, object]:
    names = ["west", "central", "east", "north"][: len(places)]
    dcs = [
        {"name": name, "location": at, "gpus": 16, "gpu": "A100-80", "usd_per_gpu_hour": 0.0}
        for name, at in zip(names, places, strict=True)
    ]
    joined = [[i != j for j in range(len(names))] for i in range(len(names))]
    return {"datacenters": dcs, "joined": joined, "latency_ms": [[20.0] * len(names)] * len(names)}


def plan_of(scene: dict[str, object], *, live: bool) -> dict[str, object]:
    names = [dc["name"] for dc in scene["datacenters"]]  # type: ignore[attr-defined]
    figures = {"load": 0.6, "gbps": 20.0, "latency_ms": 15.0, "gb": 3.0, "pipeline": True}
    figures |= {"gbit_s": 12.1} if live else {}
    links = [{"a": a, "b": b, **figures} for a, b in itertools.pairwise(names)]
    return {"links": links, "gpus": dict.fromkeys(names, 16), "groups": [[(name, 4) for name in names]]}


def boxes(svg: str) -> list[tuple[float, float, float, float]]:
    found = []
    for x, y, text in TEXT.findall(svg):
        half = CHAR * len(re.sub(r"<.*?>", "", text)) / 2
        found.append((float(x) - half, float(y) - 10, float(x) + half, float(y) + 3))
    return found


@pytest.mark.parametrize("picture", [PAGE, PANEL], ids=["page", "panel"])
def test_no_label_of_a_link_covers_another_text(picture: Picture) -> None:
    rng = random.Random(18)
    for _ in range(60):
        places = [(rng.uniform(30, 55), rng.uniform(-120, 15)) for _ in range(rng.randint(2, 4))]
        scene = scene_of(places)
        svg = map_svg(scene, plan_of(scene, live=picture is PANEL), map_places(scene, picture), picture)
        names = sum(1 for _ in scene["datacenters"])  # type: ignore[attr-defined]
        found = boxes(svg)
        labels = found[: len(found) - names]  # links are drawn first
        for one, other in itertools.product(labels, found):
            apart = one is other or one[2] <= other[0] or other[2] <= one[0] or one[3] <= other[1] or other[3] <= one[1]
            assert apart, (places, one, other)


def test_a_long_link_has_its_figures() -> None:
    scene = scene_of([(40, -120), (45, 10)])
    svg = map_svg(scene, plan_of(scene, live=True), map_places(scene, PANEL), PANEL)
    assert "12.1 of 20 Gbit/s" in svg
    assert "60% load · 15 ms" in svg
