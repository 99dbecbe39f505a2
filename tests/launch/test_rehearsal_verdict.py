"""A rehearsal on a host that is too slow for the plan's durations says so."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from atlas.launch.rehearse import Rehearsal


@pytest.mark.parametrize(("overrun_s", "too_slow"), [(0.0, False), (0.1, False), (0.2, True)])
def test_a_host_that_delays_devices_by_more_than_a_twentieth_is_too_slow(overrun_s: float, too_slow: bool) -> None:
    run: Any = SimpleNamespace(overrun_s=overrun_s, losses=[4.2, 4.1, 4.0])
    predicted: Any = SimpleNamespace(iteration_ns=1_000_000_000)
    assert Rehearsal(predicted, run, first_step=0).was_host_too_slow is too_slow
