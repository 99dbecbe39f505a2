"""Model files, and the weather that is drawn from them."""

from __future__ import annotations

import hashlib
import io
import json
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from atlas.errors import SpecError
from atlas.weather.draw import LEAST_SHARE, drawn_cross, drawn_rows, mean_rows, rows_of
from atlas.weather.path_model import WINDOW_NS, PathModel, load_model, require_like, save_model


def model_of(cross: np.ndarray | None = None) -> PathModel:
    cross = np.arange(200) * 1e5 if cross is None else cross
    return PathModel(40e6, 40e6, 200e3, cross, cross > 0)


def test_a_model_comes_back_from_its_file(tmp_path: Path) -> None:
    path = tmp_path / "a.path"
    save_model(path, model_of())
    found = load_model(path)
    np.testing.assert_array_equal(found.cross_bps, model_of().cross_bps)
    assert (found.capacity_bps, found.rtt_ns, found.buffer_bytes) == (40e6, 40e6, 200e3)


def _archive(path: Path, **changes: object) -> None:
    meta = {"version": 3, "rivals": 0, "window_ns": WINDOW_NS, "capacity_bps": 1e6, "rtt_ns": 1e6, "buffer_bytes": 1e6}
    arrays = {"cross_bps": np.zeros(3), "known": np.zeros(3, bool), "gap": np.zeros(3, bool)}
    for key, value in changes.items():
        (arrays if key in arrays else meta)[key] = value  # type: ignore[index,assignment]
    data = io.BytesIO()
    np.savez(data, meta=np.frombuffer(json.dumps(meta).encode(), np.uint8), **arrays)  # type: ignore[arg-type]
    path.write_bytes(data.getvalue())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"version": 1}, "= 1: is a path model of another version"),
        ({"gap": np.ones(3, bool)}, "has no recorded window"),
        ({"gap": np.zeros(2, bool)}, "other types or shapes"),
        ({"capacity_bps": float("nan")}, "capacity_bps must be a positive finite number"),
        ({"rtt_ns": -1}, "rtt_ns must be"),
        ({"cross_bps": np.array([0, np.inf, 0])}, "window 1 must be finite"),
        ({"cross_bps": np.array([0, -1.0, 0])}, "window 1 must be finite"),
        ({"cross_bps": np.zeros(0), "known": np.zeros(0, bool), "gap": np.zeros(0, bool)}, "must have 1 to"),
        ({"cross_bps": np.zeros((3, 1))}, "other types or shapes"),
        ({"cross_bps": np.array([{}, {}, {}], object)}, "truncated or not a path model"),
        ({"window_ns": 5}, "windows must have"),
    ],
)
def test_a_wrong_model_is_refused(tmp_path: Path, changes: dict[str, object], words: str) -> None:
    _archive(tmp_path / "a.path", **changes)
    with pytest.raises(SpecError, match=words):
        load_model(tmp_path / "a.path")


def test_a_model_of_the_version_without_gaps_is_named_as_such(tmp_path: Path) -> None:
    meta = np.frombuffer(json.dumps({"version": 2}).encode(), np.uint8)
    with (tmp_path / "a.path").open("wb") as file:
        np.savez(file, meta=meta, cross_bps=np.zeros(3), known=np.zeros(3, bool))
    with pytest.raises(SpecError, match=r"= 2: is a path model of another version; this release reads version 3"):
        load_model(tmp_path / "a.path")


def test_weather_is_drawn_from_recorded_windows_only(tmp_path: Path) -> None:
    cross = np.array([1e6, 2e6, 9e6, 9e6, 9e6, 1e6])
    save_model(tmp_path / "a.path", replace(model_of(cross), gap=cross == 9e6))
    model = load_model(tmp_path / "a.path")
    assert set(drawn_cross(model, 1, (), 500).tolist()) == {1e6, 2e6}
    assert model.mean_share == pytest.approx(4e6 / 3 / 40e6)
    assert mean_rows(model)[0] == pytest.approx(1 - 4e6 / 3 / 40e6)


def test_a_truncated_or_foreign_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.path"
    save_model(path, model_of())
    whole = path.read_bytes()
    for size in (0, 10, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(SpecError, match="truncated or not a path model"):
            load_model(path)
    with pytest.raises(SpecError, match="cannot be read"):
        load_model(tmp_path / "none.path")


def test_the_capacity_must_not_contradict_the_link() -> None:
    require_like(model_of(), 0.06, "w", "k")
    for gbps in (0.01, 0.1):
        with pytest.raises(SpecError, match="by more than 2x"):
            require_like(model_of(), gbps, "w", "k")
    require_like(PathModel(**{**vars(model_of()), "capacity_is_bound": True}), 5.0, "w", "k")


def test_the_same_seed_gives_the_same_bits() -> None:
    rows = drawn_rows(model_of(), 7, ("east>west", 3), 2000)
    digest = hashlib.sha256(rows.rate.tobytes() + rows.extra_latency_ns.tobytes()).hexdigest()
    assert digest == DIGEST
    other = drawn_rows(model_of(), 8, ("east>west", 3), 2000)
    assert (other.rate != rows.rate).any()


DIGEST = "2945237c9a7a405dd70c157c41bbd42a1b95192ff3e8b74fa03623c5089c2334"


def test_an_hour_of_rows_takes_less_than_a_second() -> None:
    began = time.process_time()
    rows = drawn_rows(model_of(), 1, (), 36_000)
    assert time.process_time() - began <= 1.0
    assert len(rows.rate) == 36_000


def test_cross_traffic_beyond_the_capacity_makes_a_queue() -> None:
    rows = rows_of(model_of(), np.array([0.0, 60e6, 60e6, 0.0]))
    assert rows.rate.tolist() == [1.0, LEAST_SHARE, LEAST_SHARE, 1.0]
    assert rows.extra_latency_ns.tolist() == [0.0, 40e6, 40e6, 0.0], "the buffer holds 40 ms"
    assert mean_rows(model_of(np.full(5, 10e6)), 2.0) == (0.5, 0.0)
