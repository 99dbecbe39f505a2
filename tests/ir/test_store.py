from __future__ import annotations

import contextlib
import json
import os
import zipfile
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atlas.cost.table import kind_costs, uniform_costs
from atlas.errors import AtlasError
from atlas.ir.difference import difference
from atlas.ir.program import Layout, Memory, Program
from atlas.ir.replace import replacing
from atlas.ir.store import Journal, load_timeline, save_timeline
from atlas.ir.timeline import Timeline
from atlas.schedules.classic import one_f_one_b
from atlas.sim import simulate


@pytest.fixture
def timeline() -> Timeline:
    program = replace(one_f_one_b(Layout.even(2, 4, 6, 2)), memory=Memory(4), sharing=True)
    costs = uniform_costs(2, 4, kind_costs(forward_ns=10, backward_ns=20), wan_boundaries=(1,), wan_ns=40, sharing=True)
    return replace(simulate(program, costs), meta={"tcp": "many", "engine_s": 0.5})


def rewritten(path: Path, **changes: Any) -> Path:
    """The same file with some arrays replaced; None leaves one out."""
    with np.load(path) as archive:
        arrays = {name: archive[name] for name in archive.files}
    for name, value in changes.items():
        arrays[name.replace("__", ".")] = value
    out = path.with_name("changed.npz")
    with out.open("wb") as file:
        np.savez(file, **{name: value for name, value in arrays.items() if value is not None})
    return out


def header(path: Path, **changes: Any) -> np.ndarray[Any, Any]:
    with np.load(path) as archive:
        found = json.loads(bytes(archive["header"]))
    return np.frombuffer(json.dumps({**found, **changes}).encode(), np.uint8)


def test_what_is_saved_is_what_is_loaded(tmp_path: Path, timeline: Timeline) -> None:
    save_timeline(tmp_path / "t.npz", timeline)
    again = load_timeline(tmp_path / "t.npz")
    for field in fields(Program):
        mine, theirs = getattr(timeline.program, field.name), getattr(again.program, field.name)
        assert np.array_equal(mine, theirs) if isinstance(mine, np.ndarray) else mine == theirs
    assert (again.source, again.links, again.meta) == (timeline.source, timeline.links, timeline.meta)
    for name in ("transfer_ready_ns", "transfer_start_ns", "transfer_sent_ns", "transfer_arrive_ns", "transfer_link"):
        assert np.array_equal(getattr(again, name), getattr(timeline, name))
    assert difference(timeline, again).ratio == 1.0
    assert difference(timeline, again).first_divergence is None


def test_the_same_timeline_gives_the_same_bytes(tmp_path: Path, timeline: Timeline) -> None:
    save_timeline(tmp_path / "a.npz", timeline)
    save_timeline(tmp_path / "b.npz", timeline)
    assert (tmp_path / "a.npz").read_bytes() == (tmp_path / "b.npz").read_bytes()


def test_a_truncated_file_is_an_error_for_users_wherever_it_is_cut(tmp_path: Path, timeline: Timeline) -> None:
    save_timeline(tmp_path / "t.npz", timeline)
    whole = (tmp_path / "t.npz").read_bytes()
    for length in (0, 1, 10, len(whole) // 2, len(whole) - 1):
        (tmp_path / "cut.npz").write_bytes(whole[:length])
        with pytest.raises(AtlasError, match=r"cut\.npz"):
            load_timeline(tmp_path / "cut.npz")
    for at in range(0, len(whole), 97):  # a flipped byte is an error, unless the byte is not used
        spoilt = bytearray(whole)
        spoilt[at] ^= 0xFF
        (tmp_path / "cut.npz").write_bytes(spoilt)
        with contextlib.suppress(AtlasError):
            load_timeline(tmp_path / "cut.npz")


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("hello")
    np.save(tmp_path / "one.npy", np.arange(3))
    np.savez(tmp_path / "other.npz", a=np.arange(3))
    with zipfile.ZipFile(tmp_path / "plain.zip", "w") as archive:
        archive.writestr("readme", "hello")
    for name in ("text", "one.npy", "other.npz", "plain.zip"):
        with pytest.raises(AtlasError, match="not a complete timeline file"):
            load_timeline(tmp_path / name)
    with pytest.raises(AtlasError, match="cannot be read"):
        load_timeline(tmp_path / "absent.npz")


def test_a_pickle_is_never_opened(tmp_path: Path, timeline: Timeline) -> None:
    save_timeline(tmp_path / "t.npz", timeline)
    bad = rewritten(tmp_path / "t.npz", op_start_ns=np.array([{"a": 1}], object))
    with pytest.raises(AtlasError, match="not a complete timeline file"):
        load_timeline(bad)


def test_a_timeline_file_and_a_journal_name_their_own_formats(tmp_path: Path, timeline: Timeline) -> None:
    save_timeline(tmp_path / "t.npz", timeline)
    assert json.loads(header(tmp_path / "t.npz").tobytes())["format"] == "atlas-timeline"
    journal = Journal(tmp_path / "t.jsonl")
    journal.append(1, timeline)
    journal.close()
    assert '"format":"atlas-timeline-journal"' in (tmp_path / "t.jsonl").read_text()


def test_a_newer_format_is_refused(tmp_path: Path, timeline: Timeline) -> None:
    save_timeline(tmp_path / "t.npz", timeline)
    with pytest.raises(AtlasError, match="version 1"):
        load_timeline(rewritten(tmp_path / "t.npz", header=header(tmp_path / "t.npz", version=2)))
    with pytest.raises(AtlasError, match="does not say"):
        load_timeline(rewritten(tmp_path / "t.npz", header=header(tmp_path / "t.npz", format="x")))


@pytest.mark.parametrize(
    "changes",
    [
        {"op_start_ns": None},
        {"op_end_ns": np.arange(3)},
        {"transfer_link": np.full(72, 99, np.int32)},
        {"program__stage": np.full(96, 40, np.int32)},
        {"program__kind": np.zeros(96)},
        {"program__worker_ptr": np.array([0, 96])},
        {"program__worker_ptr": np.zeros(0, np.int64)},
        {"program__turn": np.arange(3)},
        {"stray": np.arange(3)},
    ],
)
def test_arrays_that_contradict_each_other_are_an_error(
    tmp_path: Path, timeline: Timeline, changes: dict[str, Any]
) -> None:
    save_timeline(tmp_path / "t.npz", timeline)
    with pytest.raises(AtlasError, match="not a complete timeline file"):
        load_timeline(rewritten(tmp_path / "t.npz", **changes))


def in_program(path: Path, **changes: Any) -> Path:
    """The same file with the Program's part of the header changed."""
    with np.load(path) as archive:
        program = json.loads(bytes(archive["header"]))["program"]
    return rewritten(path, header=header(path, program={**program, **changes}))


def test_a_program_that_its_arrays_do_not_fill_is_an_error(tmp_path: Path) -> None:
    one_stage = one_f_one_b(Layout.even(1, 1, 2))
    save_timeline(tmp_path / "t.npz", simulate(one_stage, uniform_costs(1, 1, kind_costs(forward_ns=1, backward_ns=2))))
    for changes in ({"rank_dc": []}, {"num_microbatches": 10**12}):  # the second would want terabytes for a table
        with pytest.raises(AtlasError, match="not a complete timeline file"):
            load_timeline(in_program(tmp_path / "t.npz", **changes))
    assert load_timeline(in_program(tmp_path / "t.npz", name=5)).program.name == "5"


def test_a_failed_write_leaves_the_old_file_and_no_temporary_file(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("old")

    def break_off() -> None:
        with replacing(tmp_path / "f") as file:
            file.write(b"half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        break_off()
    assert (tmp_path / "f").read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["f"]


def test_a_file_name_may_have_the_maximum_length(tmp_path: Path) -> None:
    with replacing(tmp_path / ("a" * 255)) as file:
        file.write(b"whole")
    with pytest.raises(AtlasError, match="too long"), replacing(tmp_path / ("a" * 256)) as file:
        file.write(b"whole")
    assert [p.read_bytes() for p in tmp_path.iterdir()] == [b"whole"]


def test_symbolic_links_and_pipes_are_kept(tmp_path: Path) -> None:
    (tmp_path / "real").write_text("old")
    (tmp_path / "link").symlink_to("real")
    with replacing(tmp_path / "link") as file:
        file.write(b"new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_text() == "new"
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    try:
        with replacing(tmp_path / "pipe") as file:
            file.write(b"through")
        assert os.read(reader, 100) == b"through"
    finally:
        os.close(reader)
    assert (tmp_path / "pipe").is_fifo()
    assert {p.name for p in tmp_path.iterdir()} == {"real", "link", "pipe"}
