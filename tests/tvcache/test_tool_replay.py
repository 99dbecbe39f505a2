"""Recorded trajectories: hits and wrong outputs by key, odd files, and the commands around it."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from tvcache.cli import main
from tvcache.errors import TvcacheError
from tvcache.replay import Durations, quantiles, replay, windows, without
from tvcache.tools import Effect
from tvcache.trajectories import read

TAU = Path(__file__).parents[3] / "shared" / "data" / "taubench" / "gpt-4o-airline.json.gz"
MUTATING = (
    "book_reservation,cancel_reservation,update_reservation_flights,update_reservation_baggages,"
    "update_reservation_passengers,send_certificate"
)


@pytest.mark.skipif(not TAU.is_file(), reason="the recorded tau-bench rollouts are not here")
def test_tau_bench_airline_has_these_hits_and_wrong_outputs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(TAU), "--mutates", MUTATING, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["rollouts"], found["tasks"], found["calls"]) == (200, 50, 1164)
    assert {row["key"]: (row["hits"], row["wrong"]) for row in found["keys"]} == {
        "mutating calls": (474, 0),
        "full history": (344, 0),
        "call alone": (541, 3),
    }


def message(name: str, arguments: str = "{}", called: str = "1") -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [{"id": called, "function": {"name": name, "arguments": arguments}}]}


def result(content: Any, called: str = "1") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": called, "content": content}


def file_of(tmp_path: Path, *trajectories: Any, lines: bool = False) -> Path:
    path = tmp_path / "t.json"
    text = "\n".join(map(json.dumps, trajectories)) if lines else json.dumps(trajectories)
    path.write_text(text)
    return path


def effect(name: str) -> Effect:
    return "reads" if name.startswith("get") else "volatile" if name == "now" else "mutates"


def test_missing_duplicate_and_unknown_results_are_skipped_and_counted(tmp_path: Path) -> None:
    messages = [
        message("get"),
        result("a"),
        result("a again"),
        message("get", called="1"),  # models repeat ids
        result("b"),
        result("c", called="unknown"),
        message("put", called="2"),
        message("get", '{"a": 1, "a": 2}', called="3"),
        result("d", called="3"),
    ]
    found = read(file_of(tmp_path, {"task": "t", "messages": messages}))
    steps = found.trajectories[0].steps
    assert [step.body for step in steps] == [b'{"json":"a"}', b'{"json":"b"}', None, b'{"json":"d"}']
    assert found.oddities == {
        "second result of a call": 1,
        "result of an unknown call": 1,
        "result missing": 1,
        "arguments that cannot be cached": 1,
    }
    assert steps[3].call is None


def test_a_mutation_without_a_result_makes_the_rest_private(tmp_path: Path) -> None:
    calls = [{"name": "put", "arguments": {}}, {"name": "get", "arguments": {}, "output": 1}]
    recorded = read(file_of(tmp_path, *[{"task": "t", "calls": calls}] * 3))
    assert replay(recorded, effect, "mutating calls", lambda _: 1.0).hits == 0


def test_a_hit_saves_a_call_and_a_miss_after_hits_pays_for_them(tmp_path: Path) -> None:
    def calls(*names: str) -> list[dict[str, Any]]:
        return [{"name": name, "arguments": {}, "output": name, "seconds": 2.0} for name in names]

    first, second = calls("put", "get", "now"), calls("put", "get", "get2")
    recorded = read(file_of(tmp_path, {"task": "t", "calls": first}, {"task": "t", "calls": second}, lines=True))
    found = replay(recorded, effect, "mutating calls", Durations())
    assert found.waits_s == [[2.0, 2.0, 2.0], [0.001, 0.001, 4.0]]
    assert without(recorded, Durations()) == [[2.0] * 3] * 2


def test_wrong_outputs_are_counted_by_tool(tmp_path: Path) -> None:
    def calls(output: int) -> list[dict[str, Any]]:
        return [{"name": "put", "output": 0}, {"name": "get", "output": output}]

    recorded = read(file_of(tmp_path, {"task": "t", "calls": calls(1)}, {"task": "t", "calls": calls(2)}))
    assert replay(recorded, effect, "mutating calls", lambda _: 0.0).wrong["get"] == 1


@pytest.mark.parametrize(
    ("content", "word"),
    [
        ("{", "line 1 is not JSON"),
        ("[]", "no tool call"),
        ("[1]", "trajectory 1 is not an object"),
        ('[{"messages": []}]', "no task"),
        ('[{"task": "t"}]', "no list of messages"),
        ('[{"task": "t", "calls": [{"arguments": {}}]}]', "an object with a name"),
        ('[{"task": "t", "calls": [{"name": "f", "seconds": -1}]}]', "must be a number of at least 0"),
        ('[{"task": "t", "messages": [1]}]', "a message is an object"),
        ('[{"task": "t", "messages": [{"tool_calls": [{"id": "1"}]}]}]', "needs id and function"),
        ("[" * 100_000, "deep"),
        (b"\x1f\x8b broken", "damaged"),
        (gzip.compress(b'[{"task"', mtime=0)[:-6], "damaged"),
        (b"\xff\xfe", "damaged"),
    ],
)
def test_an_invalid_trajectory_file_is_refused_with_a_message(tmp_path: Path, content: str | bytes, word: str) -> None:
    path = tmp_path / "t.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(TvcacheError, match=word):
        read(path)


def test_an_accelerator_is_idle_while_all_of_its_rollouts_wait() -> None:
    assert windows([[3.0, 1.0], [2.0]], 1.0, 1) == [(1.0, 3.0), (1.0, 1.0), (1.0, 2.0)]
    assert windows([[3.0], [2.0]], 1.0, 2) == [(1.0, 2.0)]
    with pytest.raises(TvcacheError, match="never idle"):
        windows([[0.0], [5.0]], 1.0, 2)


def test_quantiles_are_of_the_values() -> None:
    assert quantiles([float(number) for number in range(1, 101)])["p90"] == 90.0
    assert set(quantiles([7.0]).values()) == {7.0}


@pytest.mark.parametrize(
    ("words", "word"),
    [
        (["--mutates", "put", "--reads", "get"], "exclude each other"),
        (["--mutates", "puts"], "no call of 'puts' in the file. Name some of get, put"),
        (["--seconds", "20..2"], "not a range"),
        (["--seconds", "two"], "not a range"),
        (["--at-once", "0"], "whole number from 1"),
        (["--think", "nan"], "not a number"),
        (["--waits", "w.json"], "has no seconds of calls"),
        (["--waits", "w.json", "--seconds", "0..0"], "all calls take 0 s"),
        (["--sekonds", "2..3"], "Did you mean --seconds"),
    ],
)
def test_wrong_arguments_give_one_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], word: str
) -> None:
    calls = [{"name": "put", "output": 0}, {"name": "get", "output": 1}]
    path = file_of(tmp_path, {"task": "t", "calls": calls})
    try:
        code = main(["replay", str(path), *words])
    except SystemExit as exit_:
        code = int(exit_.code or 0)
    assert code == 2
    told = capsys.readouterr().err
    assert word in told
    assert "Traceback" not in told


def test_the_waits_file_has_windows_with_and_without(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    calls = [{"name": "put", "output": 0, "seconds": 3}, {"name": "get", "output": 1, "seconds": 1}]
    path = file_of(tmp_path, *[{"task": "t", "calls": calls}] * 2)
    assert main(["replay", str(path), "--reads", "get", "--waits", str(tmp_path / "w"), "--think", "1"]) == 0
    assert "mutating calls" in capsys.readouterr().out
    found = json.loads((tmp_path / "w").read_text())
    assert found["without_cache"]["busy_idle_s"] == [[1.0, 3.0], [1.0, 1.0]] * 2
    assert found["with_cache"]["busy_idle_s"] == [[1.0, 3.0], [1.0, 1.0], [1.0, 0.001], [1.0, 0.001]]
    assert main(["replay", str(path), "--reads", "get", "--waits", str(path)]) == 2
