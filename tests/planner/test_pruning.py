"""A larger cluster keeps every candidate that a smaller one keeps."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from atlas.planner.pruning import undominated


@settings(max_examples=50)
@given(st.integers(0, 10_000), st.integers(1, 4))
def test_what_fits_a_smaller_cluster_and_is_kept_there_is_kept_in_a_larger_one(seed: int, count: int) -> None:
    rng = np.random.default_rng(seed)
    used = rng.integers(0, 5, (60, 3))
    score = rng.random(60)
    larger = set(undominated(score, used, count, 60).tolist())
    for room in rng.integers(1, 5, (5, 3)):
        fits = np.where((used <= room).all(axis=1), score, np.inf)
        assert set(undominated(fits, used, count, 60).tolist()) <= larger


@settings(max_examples=50)
@given(st.integers(0, 10_000), st.integers(1, 4))
def test_the_best_are_kept_and_of_equal_needs_no_more_than_so_many(seed: int, count: int) -> None:
    rng = np.random.default_rng(seed)
    used = rng.integers(0, 3, (40, 2))
    score = rng.random(40)
    kept = undominated(score, used, count, 60)
    assert set(np.argsort(score)[:count].tolist()) <= set(kept.tolist())
    assert np.unique(used[kept], axis=0, return_counts=True)[1].max() <= count
    assert list(score[kept]) == sorted(score[kept])
