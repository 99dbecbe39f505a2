"""The paced device: real work, the cost model's time, no drift."""

from __future__ import annotations

import itertools
import time

from atlas.runtime.device import Cpu, Paced

MS = 1_000_000


def test_a_paced_op_lasts_what_it_costs() -> None:
    device, now = Paced(), time.monotonic_ns()
    running = device.begin(lambda: 42, 20 * MS, now)
    span = running.wait()
    assert running.result == 42
    assert span == (now, now + 20 * MS)
    assert time.monotonic_ns() >= span.end_ns


def test_ops_follow_each_other_without_drift() -> None:
    device, now = Paced(), time.monotonic_ns()
    spans = [device.begin(lambda: None, 5 * MS, now).wait() for _ in range(10)]
    assert all(a.end_ns == b.start_ns for a, b in itertools.pairwise(spans))
    if not device.overrun_ns:
        assert spans[-1].end_ns == now + 50 * MS


def test_work_slower_than_its_pace_is_reported() -> None:
    device = Paced()
    span = device.begin(lambda: time.sleep(0.02), 5 * MS, time.monotonic_ns()).wait()
    assert span.end_ns - span.start_ns >= 20 * MS
    assert device.overrun_ns >= 15 * MS


def test_the_plain_cpu_takes_no_longer_than_the_work() -> None:
    running = Cpu().begin(lambda: 1, 10_000 * MS, 0)
    span = running.wait()
    assert running.result == 1
    assert span.end_ns - span.start_ns < 5000 * MS
