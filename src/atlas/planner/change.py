"""What a what-if changes: `key=values` as a user writes it, and a job with one of those values in it.

Any key that `--set` takes; and `lose` and `add`, for a whole datacenter. Knows how a job is changed, not what that does
to it.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from atlas.errors import InfeasibleError, SpecError
from atlas.spec import Job, override

MAX_POINTS = 1000
"""Values of one sweep: each takes a simulation."""
DEFAULT_POINTS = 10
"""Values of a range without a number of them; fewer where it has fewer whole numbers."""


@dataclass(frozen=True)
class Sweep:
    """One key and the values it takes."""

    key: str
    values: tuple[Any, ...]

    @property
    def numeric(self) -> bool:
        return all(isinstance(value, int | float) and not isinstance(value, bool) for value in self.values)


def parse_sweep(text: str) -> Sweep:
    """`key=a,b,c`, or `key=lo..hi:n` for n values, evenly spaced or, with `:nlog`, by equal factors."""
    key, equals, rest = text.partition("=")
    if not equals or not key.strip() or not rest.strip():
        raise _bad(text, "is not key=values", "Write it like cluster.wan.latency_ms=10,20,40 or ...=10..100:10")
    if ".." in rest:
        return Sweep(key.strip(), _range(text, rest))
    values = tuple(_value(part.strip()) for part in rest.split(","))
    if len(values) > MAX_POINTS:
        raise _bad(text, f"has {len(values)} values", f"Give at most {MAX_POINTS}")
    return Sweep(key.strip(), values)


def _value(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _range(text: str, rest: str) -> tuple[Any, ...]:
    span, _, count_text = rest.partition(":")
    low_text, _, high_text = span.partition("..")
    log = count_text.endswith("log")
    try:
        low, high = float(low_text), float(high_text)
        whole = low.is_integer() and high.is_integer() and "." not in low_text + high_text
        most = abs(high - low) + 1 if whole else DEFAULT_POINTS
        count = int(count_text.removesuffix("log") or min(DEFAULT_POINTS, most))
    except ValueError:
        raise _bad(text, "is not a range of numbers", "Write it like 10..100:10, or 1..1000:7log") from None
    if (
        not 2 <= count <= MAX_POINTS
        or not (math.isfinite(low) and math.isfinite(high))
        or (log and min(low, high) <= 0)
    ):
        rule = f"needs 2 to {MAX_POINTS} finite values (with log: positive values)"
        raise _bad(text, rule, "Write it like 10..100:10, or 1..1000:7log")
    raw = np.geomspace(low, high, count) if log else np.linspace(low, high, count)
    values = (
        [round(float(v)) for v in raw] if whole and abs(high - low) >= count - 1 else [float(f"{v:.6g}") for v in raw]
    )
    return tuple(dict.fromkeys(values))


def _bad(text: str, rule: str, remedy: str) -> SpecError:
    return SpecError(where="--sweep", key="sweep", value=text, rule=rule, remedy=remedy)


def changed(job: Job, key: str, value: Any) -> Job:
    """The job with one key changed and validated again; `lose` and `add` are datacenters."""
    if key == "lose":
        return _without(job, str(value))
    if key == "add":
        return _with_twin(job, str(value))
    try:
        return override(job, [f"{key}={value}"])
    except SpecError as error:
        error.args = (str(error).replace("--set ", "--sweep "),)  # the flag that the user gave
        raise


def _without(job: Job, name: str) -> Job:
    if name == "none":
        return job
    cluster = job.cluster
    left = tuple(dc for dc in cluster.datacenters if dc.name != name)
    if len(left) == len(cluster.datacenters):
        known = ", ".join(dc.name for dc in cluster.datacenters)
        raise _bad(f"lose={name}", "no such datacenter", f"Name one of {known}, or none")
    links = None if cluster.links is None else tuple(link for link in cluster.links if name not in link.between)
    if not left:
        raise InfeasibleError(
            where=job.where,
            key="lose",
            value=name,
            rule="it is the only datacenter",
            remedy="Leave out lose, or add a datacenter to the job",
        )
    kept = None if job.placement is None else tuple(place for place in job.placement if place.dc != name)
    placement = kept if kept and job.placement is not None and len(kept) == len(job.placement) else None
    return job.model_copy(
        update={"cluster": cluster.model_copy(update={"datacenters": left, "links": links}), "placement": placement}
    )


def _with_twin(job: Job, name: str) -> Job:
    """One more datacenter like `name`, next to it and connected as it is; between the two, its nearest link."""
    if name == "none":
        return job
    cluster = job.cluster
    twin = next((dc for dc in cluster.datacenters if dc.name == name), None)
    if twin is None:
        known = ", ".join(dc.name for dc in cluster.datacenters)
        raise _bad(f"add={name}", "there is no datacenter of this name to copy", f"Name one of {known}")
    taken = {dc.name for dc in cluster.datacenters}
    other = next(free for k in itertools.count(2) if (free := f"{name}-{k}") not in taken)
    links = cluster.links
    if links is not None:
        own = [link for link in links if name in link.between]
        alike = [(link, tuple(other if end == name else end for end in link.between)) for link in own]
        nearest = sorted(own, key=lambda link: link.latency_ms or cluster.wan.latency_ms or 0.0)[:1]
        alike += [(link, (name, other)) for link in nearest]
        links += tuple(link.model_copy(update={"between": ends}) for link, ends in alike)
    dcs = list(cluster.datacenters)
    dcs.insert(dcs.index(twin) + 1, twin.model_copy(update={"name": other}))
    return job.model_copy(
        update={"cluster": cluster.model_copy(update={"datacenters": tuple(dcs), "links": links}), "placement": None}
    )
