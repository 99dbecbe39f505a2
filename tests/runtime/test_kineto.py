"""Traces of torch.profiler around the steps of a worker."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from atlas.evidence.rank_trace import read_rank
from atlas.runtime.kineto import FOLDER, LAST_STEPS, KinetoRecorder


def train(recorder: KinetoRecorder, num_steps: int) -> None:
    begin = recorder.before(lambda step: None)
    weight = torch.ones(8, 8)
    for step in range(num_steps):
        begin(step)
        weight = weight @ weight / 8
    recorder.finish()


@pytest.mark.slow  # the first use of torch.profiler takes 3 s of CPU
def test_the_last_steps_are_recorded_as_profiler_steps(tmp_path: Path) -> None:
    recorder = KinetoRecorder.of(3, last_step=29, environment={FOLDER: str(tmp_path / "new")})
    assert recorder is not None
    train(recorder, 30)
    trace = read_rank(tmp_path / "new" / "rank3_trace.json")
    assert len(trace.steps) == LAST_STEPS
    assert all(mark.length_us for mark in trace.steps)


class NoProfile:
    """Starts and stops at once."""

    def __init__(self, **options: object) -> None: ...
    def start(self) -> None: ...
    def stop(self) -> None: ...
    def __enter__(self) -> None: ...
    def __exit__(self, *exception: object) -> None: ...


def test_nothing_is_recorded_without_the_folder() -> None:
    assert KinetoRecorder.of(0, 9, environment={}) is None


def test_a_trace_that_cannot_be_written_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("torch.profiler.profile", NoProfile)
    recorder = KinetoRecorder(tmp_path / "file" / "rank0_trace.json", 0)
    with caplog.at_level(logging.WARNING, "atlas.kineto"):
        train(recorder, 2)
    assert "could not be written" in caplog.text
