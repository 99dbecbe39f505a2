"""Random rollouts give the same outputs and end in the same states as without a cache (10,000 of them:
bench/tvcache_histories.py)."""

from __future__ import annotations

import logging
import random

import pytest
from histories import KEYS, VALUES, WORLD, check_group, random_group
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tvcache import keys
from tvcache.keys import ToolCall


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, "tvcache")


@pytest.mark.parametrize("seed", range(12))
def test_eight_rollouts_at_once_are_as_without_a_cache(seed: int) -> None:
    cache = check_group(random_group(random.Random(seed)), seed)
    assert cache.counters.hits > 0
    cache.close()


CALLS = st.sampled_from(sorted(WORLD)).flatmap(
    lambda name: st.tuples(
        st.just(name),
        st.fixed_dictionaries(
            {"k": st.sampled_from(KEYS), "v": st.sampled_from(VALUES)}
            if name == "put"
            else {"k": st.sampled_from(KEYS)}
            if name in ("get", "find", "take", "half")
            else {}
        ),
    )
)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.lists(CALLS, max_size=8), min_size=1, max_size=8), st.integers(0, 1000))
def test_random_rollouts_of_hypothesis(group: list[list[tuple[str, dict[str, object]]]], seed: int) -> None:
    check_group(group, seed).close()


def test_a_key_without_the_history_gives_wrong_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check can fail: a key of the call alone gives wrong outputs."""
    monkeypatch.setattr("tvcache.stores.key", lambda state, call: keys.key(b"", call))

    def check_all() -> None:
        for seed in range(12):
            check_group(random_group(random.Random(seed)), seed)

    with pytest.raises(AssertionError):
        check_all()


def test_calls_of_the_generator_are_json() -> None:
    for group in (random_group(random.Random(seed)) for seed in range(5)):
        for name, arguments in (call for calls in group for call in calls):
            assert ToolCall(name, arguments).canonical
