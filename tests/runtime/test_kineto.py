"""Traces of torch.profiler around the steps of a worker."""

from __future__ import annotations

import argparse
import io
import json
import logging
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from atlas.commands.watching import begin_traces
from atlas.errors import AtlasError
from atlas.evidence.rank_trace import read_rank
from atlas.launch.kineto_merge import merge_traces
from atlas.runtime.kineto import FOLDER, LAST_STEPS, STEPS, KinetoRecorder
from atlas.runtime.messages import MessageWriter
from atlas.runtime.process import says_alive


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


def test_the_launcher_gets_a_message_if_a_trace_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atlas.runtime.process.ALIVE_S", 0.001)
    heard = threading.Event()

    class Out(MessageWriter):
        def send(self, message: dict[str, Any]) -> None:
            assert message == {"waits_for": "p0.s1 writes"}
            heard.set()

    with says_alive(Out(io.StringIO()), "p0.s1 writes"):
        assert heard.wait(60)


def test_a_trace_that_cannot_be_written_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("torch.profiler.profile", NoProfile)
    recorder = KinetoRecorder(tmp_path / "file" / "rank0_trace.json", 0)
    with caplog.at_level(logging.WARNING, "atlas.kineto"):
        train(recorder, 2)
    assert "could not be written" in caplog.text


def test_chosen_steps_are_recorded_and_no_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    class Noting(NoProfile):
        def start(self) -> None:
            done.append("start")

        def stop(self) -> None:
            done.append("stop")

        def export_chrome_trace(self, path: str) -> None:
            done.append(path)

    monkeypatch.setattr("torch.profiler.profile", Noting)
    recorder = KinetoRecorder.of(1, 99, environment={FOLDER: str(tmp_path), STEPS: "3:4"})
    assert recorder is not None
    begin = recorder.before(lambda step: done.append(str(step)))
    for step in range(6):
        begin(step)
    recorder.finish()
    path = str(tmp_path / "rank1_trace.json")
    assert done == ["0", "1", "2", "start", "3", "4", "stop", path, "5"]


def test_merged_traces_have_one_clock_and_processes_and_flows_of_their_own(tmp_path: Path) -> None:
    for rank, base_ns in ((0, 5_000), (1, 8_000)):
        events = [
            {"ph": "M", "name": "process_name", "pid": 7, "args": {"name": "python"}},
            {"ph": "X", "name": f"{rank}F0", "pid": 7, "ts": 10.0, "dur": 2.0},
            {"ph": "s", "name": "ac2g", "id": 1, "pid": "Spans", "ts": 10.0},
        ]
        text = json.dumps({"baseTimeNanoseconds": base_ns, "traceEvents": events})
        (tmp_path / f"rank{rank}_trace.json").write_text(text)
    merged = json.loads(merge_traces(tmp_path).read_text())["traceEvents"]
    ops = [event for event in merged if event["name"].endswith("F0")]
    assert [event["ts"] for event in ops] == [10.0, 13.0]
    assert len({event["pid"] for event in merged}) == 4
    assert len({event["id"] for event in merged if "id" in event}) == 2
    assert [e["args"]["name"] for e in merged if e["ph"] == "M"] == ["rank 0: python", "rank 1: python"]
    with pytest.raises(AtlasError, match="no worker has written a trace"):
        merge_traces(tmp_path / "elsewhere")


@pytest.mark.parametrize("given", ["3", "0:2", "4:3", "9:11", "a:b"])
def test_a_range_of_steps_outside_the_run_is_refused(given: str, tmp_path: Path) -> None:
    args = argparse.Namespace(profile=given, profile_out=tmp_path, evidence=None, record_wan=None)
    with pytest.raises(AtlasError, match=r"--profile .*: must be A:B, .* of the steps 1 to 10 of this run"):
        begin_traces(args, 10)
