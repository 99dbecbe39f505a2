"""Random clusters of several regions: bounds hold, placements use GPUs that exist, and few candidates are examined."""

from __future__ import annotations

import importlib.util
import random
import sys
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from sailor_samples import write_inputs

from atlas.planner.objective import Objective
from atlas.sailor.candidates import OutlinePlacer, SailorCandidate
from atlas.sailor.check import check
from atlas.sailor.inputs import Inputs, read_inputs
from atlas.sailor.lower_bounds import OutlineGenerator
from atlas.sailor.placements import team_structures
from atlas.sailor.search import SailorSearch, search
from atlas.sailor.tables import Floats, SailorTables

GEO = Path(__file__).parents[2] / "bench" / "common" / "geo.py"
DATA = Path(__file__).parents[3] / "shared" / "data"
INFINITE = float("inf")


def geo_module() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_geo", GEO)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def toy(folder: Path, seed: int) -> Inputs:
    """Two to five regions of a made-up job; their WAN as fast as the seed says."""
    draw = random.Random(seed)
    names = [f"X-40_{'abcde'[k]}-a" for k in range(draw.randint(2, 5))]
    counts = {name: draw.choice((2, 4, 6, 8)) for name in names}
    wan, params = draw.choice((0.05, 0.3, 1.0)), draw.choice((20_000_000, 300_000_000))
    trace = write_inputs(folder, counts, num_layers=draw.randint(4, 7), wan=wan, params=params)
    return read_inputs(folder, trace, "toy")


def seconds_only(seconds: Floats, usd_per_s: Floats, egress_usd: Floats) -> Floats:
    return seconds


def every_candidate(tables: SailorTables) -> list[tuple[float, SailorCandidate]]:
    """Each outline's candidates, beside the outline's bound, with nothing ruled out."""
    found = []
    generator = OutlineGenerator(tables)
    for kind in (generator.even, generator.stepped):
        outlines, _ = kind(seconds_only, INFINITE)
        for index in range(0, len(outlines.columns), 7):
            one = outlines.take(np.array([index]))
            placer = OutlinePlacer(tables, one, seconds_only)
            placer.least = np.zeros_like(placer.least)
            for candidate in placer.candidates(team_structures(tables), lambda: INFINITE):
                found.append((float(one.bound_s.min()), candidate))
    return found


@pytest.mark.parametrize("seed", range(8))
def test_no_placement_is_faster_than_the_bound_of_its_outline(seed: int, tmp_path: Path) -> None:
    inputs = toy(tmp_path, seed)
    tables = SailorSearch(inputs, Objective())._tables(1)
    found = every_candidate(tables)
    assert len(found) > 15
    for bound_s, candidate in found:
        assert bound_s <= candidate.about_s * (1 + 1e-9)


def test_placements_keep_within_the_gpus_of_their_clusters(tmp_path: Path) -> None:
    tables = SailorSearch(toy(tmp_path, 1), Objective())._tables(1)
    for _, candidate in every_candidate(tables):
        tps = candidate.outline.tps["X-40"]
        used = dict.fromkeys(range(len(tables.clusters)), 0)
        for tp, row in zip(tps, candidate.rows, strict=True):
            assert sum(count for _, count in row) == candidate.outline.num_columns
            assert all(a != b for (a, _), (b, _) in pairwise(row))
            for cluster, count in row:
                used[cluster] += tp * count
        assert all(used[cluster] <= tables.cluster_gpus[cluster] for cluster in used)
        assert candidate.ends[-1] == tables.num_layers


def test_what_is_left_of_a_node_holds_no_larger_group(tmp_path: Path) -> None:
    """Seven GPUs in nodes of two hold three groups of two."""
    trace = write_inputs(tmp_path, {"X-40_east-a": 7, "X-40_west-a": 5}, num_layers=4)
    tables = SailorSearch(read_inputs(tmp_path, trace, "toy"), Objective())._tables(1)
    groups = {0: 3, 1: 2}
    for _, candidate in every_candidate(tables):
        tps = candidate.outline.tps["X-40"]
        for cluster, most in groups.items():
            cells = [(c, n) for tp, row in zip(tps, candidate.rows, strict=True) if tp == 2 for c, n in row]
            assert sum(n for c, n in cells if c == cluster) <= most


def test_the_generator_keeps_its_ranges_and_its_seeds() -> None:
    geo = geo_module()
    clusters = [geo.random_geo(seed) for seed in range(200)]
    assert clusters[:5] == [geo.random_geo(seed) for seed in range(5)]
    assert {len(c.regions) for c in clusters} == set(range(2, 9))
    assert {len(zones) for c in clusters for zones in c.counts} == {1, 2, 3}
    assert all(1 <= count <= 128 for c in clusters for zones in c.counts for count in zones)
    assert 40 < sum(c.bad is not None for c in clusters) < 120


CASES = [
    (10, "GPT-Neo-2.7", 6.82),  # six regions; a good order of them makes a short gradient ring
    (11, "GPT-Neo-2.7", 12.35),  # counts that do not fill their nodes
    (20, "OPT-350", 3.164),  # the winner is third before its layers are moved
]


@pytest.mark.skipif(not (DATA / "cloud").is_dir(), reason=f"{DATA / 'cloud'} is not there")
@pytest.mark.parametrize(("seed", "model", "at_most_s"), CASES)
def test_bounds_leave_little_to_look_at(seed: int, model: str, at_most_s: float, tmp_path: Path) -> None:
    geo = geo_module()
    trace = geo.write_geo(geo.random_geo(seed), tmp_path / "geo", DATA / "sailor", DATA / "cloud")
    inputs = read_inputs(trace.parent, trace, model, [geo.GPU])
    found = search(inputs)
    check(inputs, found.plan)
    assert found.verdict.iteration_s <= at_most_s
    assert found.num_priced < 200
    assert found.num_outlines < 20_000
