"""The log: what was acknowledged is there after any end, and two sites' logs merge."""

from __future__ import annotations

import itertools
import json
import logging
import random
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tvcache.errors import ArgumentsError, TvcacheError
from tvcache.keys import Task, ToolCall, key, root
from tvcache.log import LogStore, framed, unframed
from tvcache.stores import Ask
from tvcache.values import Value

TASK = Task("t")


def ask(*names: str, mutates: bool = True) -> Ask:
    """The last call after the others, all mutating."""
    state = root(TASK)
    for name in names[:-1]:
        state = key(state, ToolCall(name, {}))
    return Ask.of(TASK, state, ToolCall(names[-1], {}), mutates)


def value(number: int) -> Value:
    return Value(b'{"json":%d}' % number, 1.0)


@pytest.fixture
def log(tmp_path: Path) -> Iterator[LogStore]:
    made = LogStore(tmp_path / "a.log")
    yield made
    made.close()


def again(log: LogStore) -> LogStore:
    log.close()
    return LogStore(log.path)


def test_values_and_hits_are_there_after_a_restart(log: LogStore) -> None:
    assert log.put(ask("a"), value(1)) == value(1)
    assert log.put(ask("a"), value(2)) == value(1)  # the first wins
    assert log.conflicts == 1
    log.get(ask("a").key)
    log = again(log)
    assert log.get(ask("a").key) == value(1)
    assert log.get(ask("b").key) is None
    assert [hits for _, hits in log.records()] == [2]
    log.close()


def test_a_log_cut_anywhere_keeps_every_whole_record(log: LogStore) -> None:
    ends = [log.end]
    for number in range(4):
        log.put(ask(str(number)), value(number))
        ends.append(log.end)
    log.close()
    whole = log.path.read_bytes()
    for cut in sorted({*range(0, len(whole) + 1, 17), *ends, *(end + 1 for end in ends), *(end - 1 for end in ends)}):
        log.path.write_bytes(whole[:cut])
        found = LogStore(log.path)
        kept = sum(end <= cut for end in ends[1:])
        assert len(found) == kept, cut
        assert all(found.get(ask(str(number)).key) == value(number) for number in range(kept))
        found.put(ask("more"), value(9))
        found = again(found)
        assert found.get(ask("more").key) == value(9)
        found.close()


def test_a_damaged_record_in_the_middle_costs_only_itself(log: LogStore, caplog: pytest.LogCaptureFixture) -> None:
    for number in range(3):
        log.put(ask(str(number)), value(number))
    log.close()
    lines = log.path.read_bytes().splitlines(keepends=True)
    lines[2] = lines[2].replace(b'"json', b'"jsom')
    log.path.write_bytes(b"".join(lines))
    found = LogStore(log.path)
    assert [found.get(ask(str(number)).key) for number in range(3)] == [value(0), None, value(2)]
    assert "is damaged" in caplog.text
    found.close()


@pytest.mark.parametrize("content", [b"hello\n", b'{"a": 1}\n', framed({"tvcache": 99, "log": "x"}), b"\x00\n"])
def test_a_file_that_is_not_a_log_is_not_changed(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x"
    path.write_bytes(content)
    for read_only, remedy in ((True, "Give the file that"), (False, "Choose another place with --log")):
        with pytest.raises(TvcacheError, match=f"not a log of tvcache. {remedy}"):
            LogStore(path, read_only=read_only)
    assert path.read_bytes() == content


def test_a_log_in_use_or_in_a_missing_folder_is_refused(log: LogStore, tmp_path: Path) -> None:
    with pytest.raises(TvcacheError, match="another server"):
        LogStore(log.path)
    with pytest.raises(TvcacheError, match="Choose another place"):
        LogStore(tmp_path)


def test_a_full_disk_loses_nothing_that_was_acknowledged(log: LogStore) -> None:
    log.put(ask("a"), value(1))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (log.end + 100, hard))
    try:
        with pytest.raises(OSError, match=r"space|large"):
            log.put(ask("b"), value(2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert log.get(ask("b").key) is None
    assert log.put(ask("b"), value(3)) == value(3)
    log = again(log)
    assert [log.get(ask(name).key) for name in "ab"] == [value(1), value(3)]
    assert log.damaged == 0
    log.close()


def test_a_drop_takes_the_state_and_all_after_it(log: LogStore) -> None:
    for number, names in enumerate((("a",), ("a", "b"), ("a", "b", "c"), ("a", "d"), ("e",))):
        log.put(ask(*names), value(number))
    assert log.drop(ask("a", "b").state, "b", "it differed") == 3
    log = again(log)
    for _ in range(2):
        left = [names for names in (("a",), ("a", "b"), ("a", "b", "c"), ("a", "d"), ("e",)) if ask(*names).key in log]
        assert left == [("a",), ("e",)]
        assert log.num_dropped == {"b": 3}
    assert log.put(ask("a", "b"), value(7)) == value(7)
    log = again(log)
    assert log.get(ask("a", "b").key) == value(7)
    log.close()


def copied(source: LogStore, target: LogStore) -> None:
    data, _ = source.since(0, 1 << 30)
    for line in data.splitlines(keepends=True):
        record = unframed(line)
        assert record is not None
        target.adopt(record)


def test_logs_merge_in_any_order(tmp_path: Path) -> None:
    for order in itertools.permutations(range(3)):
        logs = [LogStore(tmp_path / f"{number}{order}.log") for number in range(3)]
        for number, one in enumerate(logs):
            one.put(ask("shared"), value(0))
            one.put(ask(f"own {number}"), value(number))
        for _ in range(2):
            for target in order:
                for source in order:
                    if source != target:
                        copied(logs[source], logs[target])
        for one in logs:
            assert len(one) == 4
            assert [one.get(ask(f"own {number}").key) for number in range(3)] == [value(n) for n in range(3)]
            one.close()


def test_a_value_dropped_at_one_site_does_not_return_from_another(tmp_path: Path) -> None:
    here, there = LogStore(tmp_path / "here.log"), LogStore(tmp_path / "there.log")
    here.put(ask("a"), value(1))
    copied(here, there)
    here.drop(ask("a").state, "a", "it differed")
    copied(there, here)  # which has not heard of it yet
    assert ask("a").key not in here
    copied(here, there)
    assert ask("a").key not in there
    here.put(ask("a"), value(2))
    copied(here, there)
    copied(there, here)
    here, there = again(here), again(there)
    assert here.get(ask("a").key) == there.get(ask("a").key) == value(2)
    here.close()
    there.close()


def test_sites_that_disagree_keep_their_own_and_count_it(tmp_path: Path) -> None:
    here, there = LogStore(tmp_path / "here.log"), LogStore(tmp_path / "there.log")
    here.put(ask("a"), value(1))
    there.put(ask("a"), value(2))
    copied(here, there)
    assert there.get(ask("a").key) == value(2)
    assert there.conflicts == 1
    here.close()
    there.close()


@pytest.mark.parametrize(
    "change",
    [
        {"key": "00" * 32},
        {"body": "not json"},
        {"body": '{"bytes":"%"}'},
        {"state": "xyz"},
        {"task": "t"},
        {"call": {}},
        {"seconds": "long"},
        {"id": 7},
    ],
)
def test_a_record_with_a_wrong_key_is_refused(log: LogStore, tmp_path: Path, change: dict[str, Any]) -> None:
    log.put(ask("a"), value(1))
    record = next(iter(log.records()))[0]
    other = LogStore(tmp_path / "other.log")
    with pytest.raises(ArgumentsError):
        other.adopt(record | change)
    assert len(other) == 0
    assert other.adopt(record)
    other.close()


def test_random_stores_and_drops_are_as_in_a_dictionary(log: LogStore, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, "tvcache")
    chance = random.Random(7)
    expected: dict[bytes, tuple[Ask, Value]] = {}
    for number in range(400):
        names = [chance.choice("abc") for _ in range(chance.randint(1, 4))]
        one = ask(*names)
        if chance.random() < 0.05:
            log.drop(one.state, "x", "")
            gone = {one.state}
            while True:
                more = {key for key, (stored, _) in expected.items() if stored.state in gone} - gone
                if not more:
                    break
                gone |= more
            expected = {key: found for key, found in expected.items() if key not in gone - {one.state}}
        else:
            log.put(one, value(number))
            expected.setdefault(one.key, (one, value(number)))
        if chance.random() < 0.02:
            log = again(log)
        assert len(log) == len(expected)
    assert {record["key"] for record, _ in log.records()} == {key.hex() for key in expected}
    assert all(log.get(key) == found for key, (_, found) in expected.items())
    assert json.loads(log.get(next(iter(expected))).body)  # type: ignore[union-attr]
    log.close()
