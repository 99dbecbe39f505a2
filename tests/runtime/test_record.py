"""A step is told once all that it sends has left, the last one too."""

from __future__ import annotations

import threading

import pytest

from atlas.errors import WorkerError
from atlas.runtime.record import PendingSend, Recorder, StepRecord
from atlas.wan.transport.base import Handle


def test_the_last_step_is_reported_after_its_output_leaves_the_device() -> None:
    told = list[StepRecord]()
    recorder, sending, handle = Recorder(told.append), PendingSend(0), Handle("an activation")
    recorder.begin(7).sendings.append(sending)
    recorder.end(recorder.current)
    assert not told

    def leave() -> None:
        sending.handle = handle
        handle.finish()

    threading.Timer(0.05, leave).start()
    recorder.finish(60.0)
    assert [record.first_step for record in told] == [7]


def test_an_output_that_never_comes_off_the_device_is_an_error() -> None:
    recorder = Recorder(lambda record: None)
    recorder.begin(0).sendings.append(PendingSend(3))
    recorder.end(recorder.current)
    with pytest.raises(WorkerError, match=r"transfer 3 was not copied from the device within 0\.05 s"):
        recorder.finish(0.05)
