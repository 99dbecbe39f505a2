"""Tables of packets: what is read and what is refused, and the log that writes them."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
from path_samples import sampled, written

from atlas.errors import SpecError
from atlas.weather.fit import learn
from atlas.weather.packets import LOST, PacketLog, PacketTable, read_packets, read_path

HEAD = "sent_ns,bytes,rtt_ns\n"


def test_a_table_is_read_as_it_was_written(tmp_path: Path) -> None:
    table = sampled(6.0)
    found = read_packets([written(table, tmp_path / "a.packets.csv")])
    assert found.lost.any()
    for name in ("sent_ns", "num_bytes", "rtt_ns"):
        np.testing.assert_array_equal(getattr(found, name), getattr(table, name))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "first line must be"),
        ("0,1,2\n", "first line must be"),
        (HEAD + "0,1,5\n3,1,nan\n", r"row 1\.rtt_ns = 'nan'.*or `lost`"),
        (HEAD + "0,1,5\n3,1,-7\n", r"row 1\.rtt_ns = '-7'"),
        (HEAD + "0,1,5\n3,1,-1\n", r"row 1\.rtt_ns = '-1'"),
        (HEAD + "0,1,5\n3,1,0\n", r"row 1\.rtt_ns = 0: must be more than 0"),
        (HEAD + "5,1,5\n4,1,5\n", r"row 1\.sent_ns = 4: times must not go back"),
        (HEAD + "5,1,5\n6,0,5\n", r"row 1\.bytes = 0"),
        (HEAD + "5,1,5\n6,1\n", "row 1 = '6,1': a row has 3 values"),
        (HEAD + "5,1,5\n6,1,5,7\n", "a row has 3 values"),
        (HEAD + "5,1\n6,1,5,7\n", "row 0 = '5,1': a row has 3 values"),
        (HEAD + "5,1,5\n\n6,1,5\n", "row 1 = '': a row has 3 values"),
        (HEAD + "5,lost,5\n", r"row 0\.bytes = -1"),
        (HEAD + "lost,5,5\n", r"row 0\.sent_ns = -1"),
        (HEAD + "5,1.5,5\n", r"row 0\.bytes = '1\.5'"),
        (HEAD + "5,1,x\n", r"row 0\.rtt_ns = 'x'"),
        (HEAD + "5,1,99999999999999999999\n", r"row 0\.rtt_ns"),
    ],
)
def test_a_wrong_row_is_named(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "a.packets.csv"
    path.write_text(text)
    with pytest.raises(SpecError, match=words):
        read_packets([path])


def test_rows_of_all_parts_are_checked_and_the_newest_kept(tmp_path: Path) -> None:
    (tmp_path / "a.packets.1.csv").write_text(HEAD + "1,10,5\n2,10,lost\n")
    (tmp_path / "a.packets.csv").write_text(HEAD + "3,10,5\n4,10,5\n5,10,5\n6,10")  # the last line was cut off
    name, table = read_path(tmp_path)
    assert (name, table.sent_ns.tolist()) == ("a", [1, 2, 3, 4, 5])
    few = read_packets([tmp_path / "a.packets.1.csv", tmp_path / "a.packets.csv"], max_rows=2)
    assert (few.sent_ns.tolist(), few.num_rows) == ([4, 5], 5)


def test_a_folder_with_several_paths_needs_a_name(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"has no \*.packets.csv"):
        read_path(tmp_path)
    for name in "ab":
        (tmp_path / f"{name}.packets.csv").write_text(HEAD + "1,10,5\n")
    with pytest.raises(SpecError, match="Name one of a, b"):
        read_path(tmp_path)
    with pytest.raises(SpecError, match="no such path"):
        read_path(tmp_path, "c")


def _table(sent: list[int], rtt: list[int]) -> PacketTable:
    return PacketTable("t", np.array(sent), np.full(len(sent), 1000), np.array(rtt), len(sent))


@pytest.mark.parametrize(
    ("table", "words"),
    [
        (_table([], []), "at least two packets"),
        (_table([1], [5]), "at least two packets"),
        (_table([0, 10**9], [5, 5]), "must cover at least 5 s"),
        (_table([0, 10**10], [LOST, LOST]), "every packet was lost"),
        (_table([0, 10**10], [LOST, 10**6]), "only one packet arrived"),
        (_table(list(range(0, 10**10, 10**7)), [10**9, 10**6] * 500), "overtook others"),
    ],
)
def test_a_table_that_says_nothing_is_refused(table: PacketTable, words: str) -> None:
    with pytest.raises(SpecError, match=words):
        learn(table)


def test_the_log_sorts_rotates_and_stays_within_its_size(tmp_path: Path) -> None:
    log = PacketLog(tmp_path, "east-west", part_bytes=200_000, num_parts=3)
    for k in range(40_000):  # acknowledgements swap places
        log.add(10**18 + (k ^ 1) * 1_000_000, 1448, LOST if k % 100 == 0 else 20_000_000)
    log.close()
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == ["east-west.packets.1.csv", "east-west.packets.2.csv", "east-west.packets.csv"]
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 3 * 400_000
    _, table = read_path(tmp_path)
    assert log.dropped == 0
    assert (np.diff(table.sent_ns) == 1_000_000).all()
    assert table.sent_ns[-1] == 10**18 + 39_999 * 1_000_000
    PacketLog(tmp_path, "east-west", num_parts=3).close()
    assert read_path(tmp_path)[1].sent_ns[-1] == table.sent_ns[-1], "a new run keeps the rows of the last one"


def test_a_fast_sender_does_not_write_at_every_row(tmp_path: Path) -> None:
    log = PacketLog(tmp_path, "a")
    began = time.process_time()
    for k in range(20_000):  # 5 s of rows are held back, which are more than one write has
        log.add(10**18 + k * 200_000, 262_144, 40_000_000)
    assert time.process_time() - began < 1.0
    log.close()
    assert len(read_path(tmp_path)[1].sent_ns) == 20_000
