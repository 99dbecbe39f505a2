"""Prefill gives way where it slows training's ops, and comes back where it does not."""

from __future__ import annotations

from bubbletea.prefill.throttle import ALONE_EVERY, ALONE_FIRST, LEAST, Throttle


def train(throttle: Throttle, slower: float, steps: int, first: int = 0) -> None:
    """Ten ops a step, slower by `slower` times the share of the waits that prefill has."""
    for step in range(first, first + steps):
        share = throttle.share if throttle.may_fill(step) else 0.0
        for index in range(10):
            throttle.ran(step, index, round(1_000_000 * (1 + slower * share)))


def test_some_steps_are_left_alone() -> None:
    throttle = Throttle(0.005)
    alone = [step for step in range(100, 100 + 2 * ALONE_EVERY) if not throttle.may_fill(step)]
    pairs = [times * ALONE_EVERY - before for times in (1, 2) for before in (2, 1)]
    assert alone == [*range(100, 100 + ALONE_FIRST), *pairs]


def test_a_restarted_training_is_filled_from_its_first_step() -> None:
    assert Throttle(0.005, alone_first=0).may_fill(7)


def test_harmless_prefill_uses_all_of_every_wait() -> None:
    throttle = Throttle(0.005)
    train(throttle, 0.004, 50)
    assert throttle.share == 1.0
    insensitive = Throttle(0.005, sensitivity=0.1)
    train(insensitive, 0.04, 50)
    assert insensitive.share == 1.0


def test_the_share_settles_where_the_budget_is() -> None:
    throttle = Throttle(0.005)
    train(throttle, 0.02, 10)
    assert 0.15 < throttle.share < 0.26, "soon, and not below: no share is judged by what another did"
    train(throttle, 0.02, 110, first=10)
    assert 0.15 < throttle.share < 0.26
    assert 0.003 < throttle.slowdown < 0.0051
    train(throttle, 0.0, 120, first=120)
    assert throttle.share == 1.0


def test_the_share_never_falls_below_its_minimum() -> None:
    throttle = Throttle(0.001)
    train(throttle, 0.5, 100)
    assert throttle.share == LEAST
