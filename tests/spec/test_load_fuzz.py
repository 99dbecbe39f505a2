"""Whatever a file holds, loading and pricing it ends in a Job or in an AtlasError, never in anything else."""

from __future__ import annotations

import copy
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from atlas.cost.arrange import arrange
from atlas.cost.memory import memory_rule
from atlas.cost.price import layout_of, price
from atlas.errors import AtlasError
from atlas.spec import load_job, parse_job
from atlas.spec.document import parse_yaml

TINY = Path(__file__).parents[2] / "examples" / "tiny.yaml"
TEXT = TINY.read_text()
DATA = yaml.safe_load(TEXT)
RELAXED = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(1, 20),
    st.floats(),
    st.floats(1e-300, 1e300),
    st.text(max_size=8),
    st.sampled_from(["east", "west", "H100", 10**30, -1, 0, 1e-12, [], {}, [[]], "\ud800", "nan", "1e3"]),
)


def places(data: Any, keys: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    return [keys, *(place for key, value in items for place in places(value, (*keys, key)))]


def changed(data: Any, keys: tuple[Any, ...], value: Any, action: str) -> Any:
    data = copy.deepcopy(data)
    if not keys:
        return value
    holder = data
    for key in keys[:-1]:
        holder = holder[key]
    if action == "remove":
        del holder[keys[-1]]
    elif action == "rename" and isinstance(holder, dict):
        holder[str(value)] = holder.pop(keys[-1])
    elif action == "twice" and isinstance(holder, list):
        holder.append(holder[keys[-1]])
    else:
        holder[keys[-1]] = value
    return data


@RELAXED
@given(st.data())
def test_a_mutated_job_loads_and_prices_or_says_why(data: st.DataObject) -> None:
    job = DATA
    for _ in range(data.draw(st.integers(1, 3))):
        keys = data.draw(st.sampled_from(places(job)))
        action = data.draw(st.sampled_from(["set", "set", "remove", "rename", "twice"]))
        job = changed(job, keys, data.draw(SCALARS), action)
    with suppress(AtlasError):
        loaded = parse_job(job)
        layout_of(loaded)
        memory_rule(loaded, arrange(loaded))
        for mode in ({"tcp": "one"}, {"tcp": "many"}, {"sharing": True}):
            costs = price(loaded, **mode)
            assert (costs.work_ns >= 0).all()
            assert (costs.compute_ns >= 0).all()


@RELAXED
@given(st.data())
def test_mangled_text_never_breaks_the_loader(tmp_path: Path, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(TEXT)))
    end = data.draw(st.integers(start, min(len(TEXT), start + 40)))
    glue = st.text(alphabet="{}[]&*!|>%@`'\"#:,-?\n\t ~<=ab01.\x00\u2028é", max_size=12)
    path = tmp_path / "job.yaml"
    path.write_text(TEXT[:start] + data.draw(glue) + TEXT[end:], encoding="utf-8")
    with suppress(AtlasError):
        load_job(path)


@RELAXED
@given(st.binary(max_size=200))
def test_random_bytes_never_break_the_loader(tmp_path: Path, raw: bytes) -> None:
    path = tmp_path / "job.yaml"
    path.write_bytes(raw)
    with pytest.raises(AtlasError):
        load_job(path)


@RELAXED
@given(st.text(max_size=60))
def test_random_overrides_never_break_the_loader(text: str) -> None:
    for candidate in (text, f"cluster.{text}", f"cluster.datacenters[{text}].nodes=3", f"pp={text}"):
        with suppress(AtlasError):
            load_job(TINY, [candidate])


@RELAXED
@given(st.text(max_size=200))
def test_random_text_is_data_or_an_error(text: str) -> None:
    with suppress(AtlasError):
        parse_yaml(text, "text")
