"""The canonical form, and what it refuses."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tvcache.errors import ArgumentsError
from tvcache.history import History
from tvcache.keys import Task, ToolCall, canonical, key, parse, root

STATE = root(Task("t"))
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


def test_reordered_keys_have_the_same_key() -> None:
    assert key(STATE, ToolCall("f", {"a": 1, "b": [{"x": 1, "y": 2}]})) == key(
        STATE, ToolCall("f", {"b": [{"y": 2, "x": 1}], "a": 1})
    )


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"q": "a"}, {"q": "\u0430"}),  # Cyrillic
        ({"q": "\u00e9"}, {"q": "e\u0301"}),  # composed and decomposed
        ({"q": 1}, {"q": "1"}),
        ({"q": 1}, {"q": 1.0}),
        ({"q": 1}, {"q": True}),
        ({"q": None}, {}),
        ({"q": []}, {"q": {}}),
        ({"q": "a b"}, {"q": "a\u00a0b"}),
    ],
)
def test_arguments_that_only_look_alike_have_different_keys(one: object, other: object) -> None:
    assert key(STATE, ToolCall("f", one)) != key(STATE, ToolCall("f", other))


@given(JSON, JSON)
def test_equal_forms_mean_equal_arguments(one: object, other: object) -> None:
    assert parse(canonical(one)) == one
    assert (canonical(one) == canonical(other)) == (repr(_sorted(one)) == repr(_sorted(other)))


def _sorted(value: object) -> object:
    if isinstance(value, dict):
        return {name: _sorted(value[name]) for name in sorted(value)}
    return [_sorted(item) for item in value] if isinstance(value, list) else value


def _nested(depth: int) -> object:
    found: object = 1
    for _ in range(depth):
        found = [found]
    return found


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ({"x": float("nan")}, "finite"),
        ({"x": float("inf")}, "finite"),
        ({"x": object()}, "not JSON"),
        ({"x": b"bytes"}, "not JSON"),
        ({"x": (1, 2)}, "not JSON"),
        ({1: "x"}, "not a string"),
        ({"x": "y" * 10_000_000}, "bytes of arguments"),
        (_nested(100_000), "deep"),
        ({"x": "\ud83d"}, "surrogate"),
    ],
    ids=["nan", "inf", "object", "bytes", "tuple", "number as key", "10 MB", "deep", "half a surrogate pair"],
)
def test_arguments_without_a_canonical_form_are_refused(arguments: object, word: str) -> None:
    with pytest.raises(ArgumentsError, match=word):
        canonical(arguments)


@pytest.mark.parametrize(
    "text", ['{"a": 1, "a": 2}', '{"a": NaN}', '{"a": Infinity}', "{", "", "[" * 100_000, b"\xff\xfe"]
)
def test_text_that_is_not_strict_json_is_refused(text: str | bytes) -> None:
    with pytest.raises(ArgumentsError):
        parse(text)


def test_tasks_of_one_name_and_different_images_differ() -> None:
    assert root(Task("t", "sha256:1")) != root(Task("t", "sha256:2"))


def test_task_and_image_cannot_be_mistaken_for_each_other() -> None:
    assert root(Task("a", "b")) != root(Task("ab", "")) != root(Task("", "ab"))


def test_version_and_kind_are_part_of_the_key() -> None:
    calls = [
        ToolCall("f", {}),
        ToolCall("f", {}, version="2"),
        ToolCall("f", {}, image="2"),
        ToolCall("f", {}, kind="reward"),
    ]
    assert len({key(STATE, call) for call in calls}) == 4


def test_a_history_of_100_000_calls_costs_a_hash_a_call() -> None:
    history, call = History(Task("long")), ToolCall("f", {"n": 1})
    for _ in range(100_000):
        history.append(call, key(history.state, call), b"", 0.0)
    assert len(history) == 100_000
    assert len(set(history.states)) == 100_001


def test_a_call_survives_a_json_round_trip() -> None:
    call = ToolCall("f", {"a": [1]}, "2", "img", "reward")
    assert ToolCall.from_json(call.as_json()) == call
    for wrong in (None, [], {}, call.as_json() | {"extra": 1}, call.as_json() | {"name": 1}):
        with pytest.raises(ArgumentsError):
            ToolCall.from_json(wrong)
