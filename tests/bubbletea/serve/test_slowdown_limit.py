"""The limit on the slowdown of training is checked by comparing iterations with and without prefill."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable

import pytest

from bubbletea.prefill.throttle import is_alone
from bubbletea.serve.slowdown_limit import MIN_SHARE, PAUSE, SlowdownLimit

WORKERS = 4


class Training:
    """Workers whose iterations take a second, and longer by `slower(share)` where they are filled."""

    def __init__(
        self,
        limit: SlowdownLimit,
        slower: Callable[[float], float],
        noise: float = 0.0,
        first: int = 0,
        drift: float = 0.0,
        seed: int = 1,
    ) -> None:
        """`noise`: of every iteration by itself; `drift`: by other load on the host, over about 20 iterations."""
        self.limit, self.slower, self.noise, self.drift = limit, slower, noise, drift
        self.step = self.first = first
        self._at_ns, self._rng, self._drifted = 0, random.Random(seed), 0.0
        self.used: list[float] = []
        """Of every iteration: the share of its waits that was used."""
        self.base = 1.0
        self.took: list[float] = []
        """Of every iteration, over one without filling, less 1."""

    def run(self, steps: int, *, asked: bool = True) -> None:
        for _ in range(steps):
            share = self.limit.allowed if asked and not self.limit.overcommitted else 0.0
            filled = share > 0 and not is_alone(self.step, self.first)
            self.used.append(share if filled else 0.0)
            self._drifted = 0.95 * self._drifted + self._rng.gauss(0, self.drift)
            for worker in range(WORKERS):
                for wait in range(3):
                    at_ns = self._at_ns + worker * 1000 + wait * 100_000_000
                    self.limit.waited(worker, self.step, at_ns, int(filled and worker == 2) * 1000, WORKERS)
            longer = self.slower(share) if filled else 0.0
            self.took.append(longer)
            self._at_ns += round(1e9 * self.base * (1 + longer + self._drifted + self._rng.gauss(0, self.noise)))
            self.step += 1


def test_harmless_filling_uses_all_of_every_wait() -> None:
    limit = SlowdownLimit(0.005)
    training = Training(limit, lambda share: 0.002 * share, noise=0.002)
    training.run(400)
    assert limit.share == 1.0
    assert not limit.num_overcommitted


def test_slow_iterations_after_a_restart_cut_nothing() -> None:
    limit = SlowdownLimit(0.005)
    training = Training(limit, lambda share: 0.001 * share, noise=0.002)
    for _ in range(5):
        training.run(20)
        training.step += 10  # training was started again at another step, with new processes
        training.base = 1.05
        training.run(5)
        training.base = 1.0
    assert limit.share == 1.0


@pytest.mark.parametrize(("noise", "drift", "least"), [(0.005, 0.002, 0.9), (0.02, 0.0, 0.75), (0.02, 0.01, 0.65)])
def test_noise_and_other_load_are_not_taken_for_slowdown(noise: float, drift: float, least: float) -> None:
    used, took = list[float](), list[float]()
    for seed in range(8):
        training = Training(SlowdownLimit(0.005), lambda share: 0.001 * share, noise, drift=drift, seed=seed)
        training.run(300)
        used, took = used + training.used, took + training.took
    assert sum(used) / len(used) > least
    assert sum(took) / len(took) < 0.005


@pytest.mark.parametrize(("noise", "drift"), [(0.005, 0.0), (0.005, 0.002)])
def test_a_breach_is_found_in_noise(noise: float, drift: float) -> None:
    took = list[float]()
    for seed in range(8):
        training = Training(SlowdownLimit(0.005), lambda share: 0.02 * share, noise, drift=drift, seed=seed)
        training.run(400)
        took += training.took[100:]
    assert sum(took) / len(took) < 0.0065, "where the error of the comparison is of the size of the budget"


@pytest.mark.parametrize("first", [0, 10_000])
def test_the_share_is_cut_until_the_limit_holds(first: int) -> None:
    limit = SlowdownLimit(0.005)
    training = Training(limit, lambda share: 0.02 * share, noise=0.001, first=first)
    training.run(13)
    assert limit.share < 0.5, "a clear breach is answered within a few iterations"
    training.run(400)
    assert not limit.num_overcommitted
    settled = training.took[100:]
    assert sum(settled) / len(settled) < 0.005
    assert limit.share > MIN_SHARE, "and not lower than need be"


def test_if_no_share_keeps_the_limit_the_host_is_overcommitted(caplog: pytest.LogCaptureFixture) -> None:
    limit = SlowdownLimit(0.005)
    training = Training(limit, lambda share: 0.05 + 0.2 * share, noise=0.001)
    training.run(30)
    assert limit.overcommitted
    assert limit.retry_s > 1
    training.run(1500)
    settled = training.took[100:]
    assert sum(settled) / len(settled) < 0.005, "also counting the trials after each pause"
    assert limit.num_overcommitted > 2
    assert [record.levelno for record in caplog.records] == [logging.WARNING], "said once"


def test_the_baseline_measured_in_a_pause_is_used_after_it() -> None:
    limit = SlowdownLimit(0.005)
    trouble = Training(limit, lambda share: 0.3)
    trouble.run(40)
    assert limit.overcommitted
    trouble.slower = lambda share: 0.0
    trouble.run(PAUSE + 1)
    assert not limit.overcommitted
    trouble.run(500)
    assert limit.share == 1.0


def test_a_host_that_is_slower_for_another_reason_is_the_new_baseline() -> None:
    limit = SlowdownLimit(0.005)
    training = Training(limit, lambda share: 0.0)
    training.run(20)
    training.base = 1.1
    training.run(20, asked=False)
    assert limit.iteration_s == pytest.approx(1.1), "iterations in which nothing was asked for are without filling"
    training.run(100)
    assert limit.share == 1.0
    training.base = 1.3  # while requests are served: a probe finds that prefill is not the cause
    training.run(50)
    assert (limit.num_overcommitted, limit.share) == (0, 1.0)
    assert limit.iteration_s == pytest.approx(1.3)


def test_a_restart_of_training_is_not_counted_as_a_long_iteration() -> None:
    limit = SlowdownLimit(0.005)
    training = Training(limit, lambda share: 0.0)
    training.run(50)
    training.step, training._at_ns = 0, training._at_ns + 60 * 10**9
    training.run(50)
    assert limit.share == 1.0
    assert limit.iteration_s == pytest.approx(1.0)


def test_iterations_that_finish_earlier_requests_are_not_judged() -> None:
    limit = SlowdownLimit(0.005)
    training = Training(limit, lambda share: 0.02 * share, noise=0.001)
    training.run(13)
    cut = limit.share
    assert cut < 0.5
    for _ in range(40):
        limit.owe(1.0)  # requests admitted before the cut
        assert limit.allowed == 1.0
        training.run(1)
    assert limit.share == cut
    limit.owe(0.0)
    training.run(400)
    settled = training.took[153:]
    assert sum(settled) / len(settled) < 0.005


def test_a_share_with_which_nothing_fits_is_raised() -> None:
    """No piece fits a fifth of a wait: nothing is filled, so that nothing could be judged."""
    limit = SlowdownLimit(0.005)
    training = Training(limit, lambda share: 0.002)
    training.run(20)
    limit.share = MIN_SHARE
    for _ in range(200):
        training.run(1, asked=limit.share > 0.2)
    assert limit.share > 0.2
    training.run(100)
    assert limit.share == 1.0
