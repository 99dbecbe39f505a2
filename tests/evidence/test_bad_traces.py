"""Traces and cards as they are found: cut off, empty, mixed up, of another job. One message, exit code 2."""

from __future__ import annotations

import copy
import gzip
import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from trace_samples import CARD, allreduce, kernel, random_events, step, write

from atlas.cli import main
from atlas.errors import AtlasError
from atlas.evidence.data_point import read_data_point
from atlas.evidence.events import TraceFile
from atlas.evidence.rank_trace import read_rank


def card(folder: Path, name: str = "card.yaml", **changes: Any) -> None:
    """Write the sample card; `data__seq_len=1` changes one value of the workload."""
    data = copy.deepcopy(CARD)
    for path, value in changes.items():
        *parts, last = path.split("__")
        place = data["workload"]
        for part in parts:
            place = place[part]
        place[last] = value
    (folder / name).write_text(yaml.safe_dump(data))


def good(folder: Path, ranks: int = 2) -> None:
    for rank in range(ranks):
        events = [step(k, 1e6 * k, 1e6) for k in range(8)] + [kernel("gemm", 1e6 * k, 5e5) for k in range(8)]
        info = {"distributedInfo": {"rank": rank, "world_size": ranks}}
        write(folder / f"rank{rank}_trace.json", [*events, allreduce(2.8e6, 1e5)], **info)


def test_a_good_data_point_has_no_findings(tmp_path: Path) -> None:
    good(tmp_path)
    card(tmp_path)
    assert read_data_point(tmp_path).findings == []


# ---- files that cannot be read ---------------------------------------------------------------------------------
def whole() -> bytes:
    return json.dumps({"traceEvents": random_events(1)}).encode()


BROKEN: dict[str, tuple[bytes, str]] = {
    "empty.json": (b"", "is empty"),
    "spaces.json": (b"  \n", "is truncated"),
    "cut.json": (whole()[:4000], "truncated after"),
    "cut.json.gz": (gzip.compress(whole())[:-200], "truncated after"),
    "garbled.json": (whole()[:3000] + b"\x00}{" + whole()[3000:], "not JSON"),
    "text.json": (b"hello", "neither { nor ["),
    "fake.json.gz": (whole(), "not gzip data"),
    "zipped.json": (b"PK\x03\x04rest", "zip archive"),
    "numbers.json": (b"[1, 2, 3]", "none of its 3 entries is an event"),
    "other.json": (b'{"a": [1, 2]}', "no list 'traceEvents'"),
    "deep.json": (b'{"traceEvents": [' + b"[" * 100_000, "nested too deeply"),
    "key.json": (b'{"traceEvents" [', "no value for the key"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_refused_with_its_name(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, words = BROKEN[name]
    (tmp_path / name).write_bytes(data)
    assert main(["metrics", str(tmp_path / name)]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert name in said.err
    assert words in said.err
    assert said.err.count("\n") == 1


@pytest.mark.parametrize("name", ["cut.json", "cut.json.gz", "garbled.json"])
def test_salvage_uses_the_events_before_the_damage(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_bytes(BROKEN[name][0])
    assert main(["metrics", str(tmp_path / name), "--salvage"]) == 0
    assert "events" in capsys.readouterr().err
    assert read_rank(tmp_path / name, salvage=True).num_events > 5


@pytest.mark.parametrize("block", [1, 7, 64])
def test_any_block_size_gives_the_same_events(block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events = [{**event, "name": event["name"] + " µ漢"} for event in random_events(2, num_kernels=8)]
    path = tmp_path / "t.json"
    path.write_text(json.dumps({"a": {"b": [1, "]"]}, "traceEvents": events, "n": 12345}, ensure_ascii=False, indent=2))
    monkeypatch.setattr("atlas.evidence.events.BLOCK_BYTES", block)
    monkeypatch.setattr(TraceFile._more, "__defaults__", (block,))
    file = TraceFile(path)
    assert list(file) == events
    assert file.info == {"a": {"b": [1, "]"]}, "n": 12345}


def test_a_bare_list_may_end_without_a_bracket(tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text("[" + ",\n".join(json.dumps(event) for event in random_events(3)) + ",\n")
    assert read_rank(tmp_path / "t.json").num_events == len(random_events(3))


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    """One gzip member, repeated: a file of any size costs nothing to write."""
    path = tmp_path / "rank0_trace.json.gz"
    filler = json.dumps({"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 1, "dur": 2, "args": {"x": "y" * 4000}})
    with path.open("wb") as file:
        file.write(gzip.compress(b'{"traceEvents": [' + json.dumps(kernel("gemm", 0, 5)).encode()))
        member = gzip.compress((("," + filler) * 500).encode())
        for _ in range(20):
            file.write(member)
        file.write(gzip.compress(b"]}"))
    tracemalloc.start()
    trace = read_rank(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert trace.num_events == 10_001
    assert peak < 15e6 < 20 * 500 * len(filler)


# ---- odd events --------------------------------------------------------------------------------------------------
def test_odd_events_are_left_out_and_counted(tmp_path: Path) -> None:
    odd = [
        {**kernel("gemm", 0, 1), "dur": "NaN"},
        {**kernel("gemm", 0, 1), "ts": None},
        {key: value for key, value in kernel("gemm", 0, 1).items() if key != "dur"},
        kernel("gemm", 0, -5),
        {**kernel("gemm", 0, 1), "cat": ["kernel"]},
        kernel("gemm", float("inf"), 1),
    ]
    fine = [{**kernel("gemm", 0, 1), "ts": "10.5", "dur": "4"}, {**kernel("gemm", 20, 4), "args": "none"}]
    trace = read_rank(write(tmp_path / "t.json", [*odd, *fine, 7, None]))  # type: ignore[list-item]
    assert trace.num_unusable == len(odd)
    assert (trace.start_us.tolist(), trace.length_us.tolist()) == ([10.5, 20.0], [4.0, 4.0])


FOUND: dict[str, tuple[Callable[[Path], object], str]] = {
    "twice the same step": (lambda f: write(f / "rank0_trace.json", [step(1, 0, 5), step(1, 9, 5)]), "repeat the"),
    "one step": (lambda f: write(f / "rank0_trace.json", [step(1, 0, 5)]), "steps: 1 are counted"),
    "no step": (lambda f: write(f / "rank0_trace.json", [kernel("gemm", 0, 5)]), "no ProfilerStep#N"),
    "no kernels": (lambda f: write(f / "rank0_trace.json", [step(1, 0, 5)]), "CPU only"),
    "no collectives": (lambda f: write(f / "rank0_trace.json", [kernel("gemm", 0, 5)]), "no collective has sizes"),
    "old category": (
        lambda f: write(f / "rank0_trace.json", [{**kernel("gemm", 0, 5), "cat": "Kernel"}]),
        "counted as `kernel`",
    ),
    "a rank is missing": (lambda f: (good(f), card(f), (f / "rank1_trace.json").unlink()), "no file of rank 1"),
    "a rank is missing, and there is no card": (
        lambda f: (good(f, 3), (f / "rank1_trace.json").unlink()),
        "there is no file of rank 1",
    ),
    "another rank inside": (
        lambda f: (good(f), (f / "rank1_trace.json").write_bytes((f / "rank0_trace.json").read_bytes())),
        "the trace says rank 0",
    ),
    "another world size": (
        lambda f: (good(f), card(f, hardware__xpu_spec={"model": "nvidia_a100", "total_count": 16})),
        "dp_replicate 2 x dp_shard 1 x tp 1 x pp 1 x cp 1 is 2",
    ),
    "TBD in a number": (lambda f: (good(f), card(f, data__seq_len="TBD")), "'TBD' is not a number"),
    "parameters of another model": (
        lambda f: (good(f), card(f, model__model_arch={**CARD["workload"]["model"]["model_arch"], "num_layers": 160})),
        "suggest about",
    ),
    "a JSON file that is no trace": (
        lambda f: (write(f / "t.json", [kernel("gemm", 0, 5)]), (f / "config.json").write_text("{}")),
        "skipped",
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_mismatches_are_reported(name: str, tmp_path: Path) -> None:
    make, words = FOUND[name]
    make(tmp_path)
    assert any(words in finding for finding in read_data_point(tmp_path).findings), read_data_point(tmp_path).findings


BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{k}: &{k} [{', '.join(f'*{chr(ord(k) - 1)}' for _ in range(9))}]\n" for k in "bcdefgh"
)
REFUSED: dict[str, tuple[Callable[[Path], object], tuple[str, ...]]] = {
    "two cards": (lambda f: (good(f), card(f), card(f, "other.yaml")), ("card.yaml", "other.yaml", "one card")),
    "a card of another job": (
        lambda f: (good(f), card(f, data__batch_size=8000)),
        ("card.yaml", "rank0_trace.json", "more than 100 %"),
    ),
    "a rank twice": (
        lambda f: (good(f), write(f / "rank1_trace.json.gz", [])),
        ("rank1_trace.json", "rank1_trace.json.gz", "same rank"),
    ),
    "no traces": (lambda f: card(f), ("has no trace",)),
    "a YAML bomb": (lambda f: (good(f), (f / "card.yaml").write_text(BOMB)), ("card.yaml", "aliases")),
    "a card that is a list": (lambda f: (good(f), (f / "card.yaml").write_text("- 1")), ("not a mapping",)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_makes_figures_wrong_is_refused(name: str, tmp_path: Path) -> None:
    make, words = REFUSED[name]
    make(tmp_path)
    with pytest.raises(AtlasError) as error:
        read_data_point(tmp_path)
    assert all(word in str(error.value) for word in words), error.value


def test_an_archive_is_not_unpacked(tmp_path: Path) -> None:
    path = tmp_path / "point.tar.gz"
    path.write_bytes(gzip.compress(b"../../etc/passwd"))
    with pytest.raises(AtlasError, match="is an archive"):
        read_data_point(path)
