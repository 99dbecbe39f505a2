from __future__ import annotations

import gzip
import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from view_samples import job

from atlas.errors import AtlasError
from atlas.ir.program import Kind
from atlas.view import perfetto
from atlas.view.perfetto import trace_bytes, write_trace


def spans(body: bytes, *categories: str) -> list[dict[str, Any]]:
    return [e for e in json.loads(body)["traceEvents"] if e["ph"] == "X" and e["cat"] in categories]


def test_every_op_is_a_span_with_its_name_and_its_times_to_the_nanosecond() -> None:
    timeline = job()
    found = spans(trace_bytes(timeline), *[kind.name for kind in Kind])
    assert [e["name"] for e in found] == [str(timeline.program.op(i)) for i in range(timeline.program.num_ops)]
    assert [round(e["ts"] * 1000) for e in found] == timeline.op_start_ns.tolist()
    assert [round(e["dur"] * 1000) for e in found] == (timeline.op_end_ns - timeline.op_start_ns).tolist()


def test_times_are_exact_to_the_nanosecond() -> None:
    timeline = job(1, 2, 1, 1, optimizer=False)
    timeline.op_end_ns[:] = [7, 1_000_000_000_001, 12, 10**12 + 999]
    timeline.op_start_ns[:] = [0, 10, 10, 10**12]
    found = spans(trace_bytes(timeline), "F", "B")
    assert [round(e["ts"] * 1000) for e in found] == timeline.op_start_ns.tolist()
    assert [round(e["dur"] * 1000) for e in found] == (timeline.op_end_ns - timeline.op_start_ns).tolist()


def test_workers_are_grouped_by_datacenter_and_links_are_tracks() -> None:
    events = json.loads(trace_bytes(job()))["traceEvents"]
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert list(processes.values()) == ["dc0", "WAN dc0 ↔ dc1", "dc1", "WAN dc1 ↔ dc2", "dc2"]
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert len({tid for _, tid in threads}) == len(threads), "Perfetto identifies threads by number"
    for event in events:
        if event["ph"] == "X" and event["cat"] == "F":
            assert threads[event["pid"], event["tid"]].endswith(f".s{event['name'][0]}")
    assert {threads[e["pid"], e["tid"]] for e in spans(trace_bytes(job()), "wan")} >= {"wan 0>1 p0", "wan 2>1 p1"}


@pytest.mark.parametrize("trunk_pairs", [1.0, None])
def test_spans_of_one_track_never_overlap(trunk_pairs: float | None) -> None:
    timeline = job(4, sharing=trunk_pairs is None, trunk_pairs=trunk_pairs)
    by_track: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for e in json.loads(trace_bytes(timeline))["traceEvents"]:
        if e["ph"] == "X":
            by_track.setdefault((e["pid"], e["tid"]), []).append((e["ts"], e["ts"] + e["dur"]))
    for found in by_track.values():
        found.sort()
        assert all(b[0] >= a[1] - 1e-6 for a, b in pairwise(found))


def test_arrows_join_sender_and_receiver_where_there_are_not_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    timeline = job()
    crossing = int(timeline.program.transfer_crosses.sum())
    full = json.loads(trace_bytes(timeline))["traceEvents"]
    assert [len([e for e in full if e["ph"] == ph]) for ph in "sf"] == [crossing, crossing]
    monkeypatch.setattr(perfetto, "MAX_ARROWS", crossing - 1)
    assert not [e for e in json.loads(trace_bytes(timeline))["traceEvents"] if e["ph"] in "sf"]


def test_negative_spans_of_clocks_that_disagree_become_zero() -> None:
    timeline = job()
    early = replace(timeline, transfer_start_ns=timeline.transfer_start_ns * 0 - 5, op_end_ns=timeline.op_start_ns - 7)
    spans = [e for e in json.loads(trace_bytes(early))["traceEvents"] if e["ph"] == "X"]
    assert min(min(e["ts"], e["dur"]) for e in spans) == 0


def test_a_name_in_gz_is_compressed_and_a_missing_folder_is_an_atlas_error(tmp_path: Path) -> None:
    timeline = job(1, 2, 2, 1)
    write_trace(tmp_path / "t.json.gz", timeline)
    write_trace(tmp_path / "t.json", timeline)
    assert gzip.decompress((tmp_path / "t.json.gz").read_bytes()) == (tmp_path / "t.json").read_bytes()
    with pytest.raises(AtlasError, match="cannot be written"):
        write_trace(tmp_path / "nowhere" / "t.json", timeline)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["t.json", "t.json.gz"]
