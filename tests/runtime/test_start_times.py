"""The phases of a worker's start are measured, and a slow start is explained in its log."""

from __future__ import annotations

import time

import pytest

from atlas.runtime.start_times import WORTH_A_LINE_S, StartTimes


def test_phases_add_up_to_the_time_that_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [10.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    times = StartTimes()
    for phase, took_s in (("device", 0.5), ("stages", 2.0), ("device", 0.25)):
        now[0] += took_s
        times.note(phase)
    assert list(times.seconds.items()) == [("device", 0.75), ("stages", 2.0)]
    assert str(times) == "device 0.8 s, stages 2.0 s"


@pytest.mark.parametrize("slow", [True, False])
def test_only_a_slow_start_is_logged(
    slow: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    times = StartTimes()
    now[0] = WORTH_A_LINE_S + (0.1 if slow else -0.1)
    times.finish("first step")
    assert capsys.readouterr().err == ("start: first step 5.1 s\n" if slow else "")
