"""From a path and some `--set` to a validated Job: read, merge `base`, load the cluster, override, validate.

Paths in a file are relative to that file; paths in a `--set` are relative to the working directory. All errors of a
file are found here, with file, line, key, value, rule and remedy; its price is not.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from atlas.errors import InfeasibleError, SpecError
from atlas.spec.document import Document, Keys, apply_override, dotted, nearest, read_yaml, shown
from atlas.spec.fields import NAME, Frozen
from atlas.spec.gpus import GPUS, Calibration, Gpu
from atlas.spec.huggingface import dimensions
from atlas.spec.job import Cluster, DataCenter, Jitter, Job, Link, Model, Place, Wan
from atlas.spec.trace import read_trace

MAX_BASES = 8

ROOMS: dict[tuple[str, ...], type[Frozen]] = {
    (): Job,
    ("model",): Model,
    ("cluster",): Cluster,
    ("cluster", "datacenters", "*"): DataCenter,
    ("cluster", "wan"): Wan,
    ("cluster", "links", "*"): Link,
    ("cluster", "gpus", "*"): Gpu,
    ("cluster", "gpus", "*", "calibration"): Calibration,
    ("placement", "*"): Place,
    ("jitter",): Jitter,
}
"""Which model holds at which place of a job file: the keys to choose from when one is misspelt."""

M = TypeVar("M", bound=Frozen)


def load_job(path: str | Path, overrides: Sequence[str] = ()) -> Job:
    """The job in a YAML file, with each `key.path=value` of `overrides` applied. Raises SpecError."""
    path = Path(path)
    return job_of(read_yaml(path, key="job file"), path, overrides)


def job_of(document: Document, path: Path, overrides: Sequence[str]) -> Job:
    """The job in a file that has been read already."""
    return finished(_with_bases(document, path), overrides, str(path))


def override(job: Job, overrides: Sequence[str]) -> Job:
    """A loaded job with some keys changed and validated again, for what-if and planner."""
    data = job.model_dump(mode="json", exclude_none=True)
    data["model"].pop("config", None)
    return finished(Document(data), overrides, job.where)


def parse_job(data: Any, where: str = "job") -> Job:
    """A job from plain data, for callers that hold no file. Relative paths are as the process sees them."""
    return finished(Document(data), (), where)


def load_cluster(path: str | Path) -> Cluster:
    """The cluster in a YAML file of its own."""
    document = _read(Path(path), "cluster file", ("cluster",))
    cluster = _validated(
        Cluster, document.data, lambda keys: document.origin(("cluster", *keys), str(path)), ("cluster",)
    )
    check_cluster(cluster, lambda keys: document.origin(("cluster", *keys), str(path)))
    return cluster


def finished(document: Document, overrides: Sequence[str], where: str) -> Job:
    """The job in a document that was read, overrides applied; `where` names it where no line does."""
    for text in overrides:
        if text.lstrip().startswith("cluster."):
            document = _with_cluster(document)
        document = apply_override(document, text)
    document = _with_dimensions(_with_cluster(document))

    def origin(keys: Keys) -> str:
        return document.origin(keys, where)

    job = _validated(Job, document.data, origin)
    job._where = where
    job._files = _files(job, document)
    check_job(job, origin)
    return job


# ---- files that name other files ---------------------------------------------------------------------------
def _with_bases(document: Document, path: Path) -> Document:
    """A job file merged over the file that its `base` names, and so on down."""
    chain, seen = [_anchored(document, path, "job file")], [os.path.realpath(path)]
    while isinstance(chain[-1].data, dict) and "base" in chain[-1].data:
        base = chain[-1].data.pop("base")
        at = chain[-1].origin(("base",), str(path))
        if not isinstance(base, str):
            raise SpecError(where=at, key="base", value=shown(base), rule="is not a file", remedy="Name a job file")
        chain.append(_read(Path(base), "base"))
        if len(seen) > MAX_BASES or os.path.realpath(base) in seen:
            raise SpecError(where=at, key="base", value=shown(base), rule="bases go in a circle", remedy="Cut it")
        seen.append(os.path.realpath(base))
    merged = Document(chain[-1].data, dict(chain[-1].origins))
    for document in reversed(chain[:-1]):
        merged = Document(_merged(merged.data, document.data), {**merged.origins, **document.origins})
    return merged


def _merged(base: Any, change: Any) -> Any:
    """Mappings are merged key by key; anything else is replaced."""
    if not isinstance(base, dict) or not isinstance(change, dict):
        return change
    return {**base, **{key: _merged(base.get(key), value) for key, value in change.items()}}


def _read(path: Path, key: str, at: Keys = ()) -> Document:
    return _anchored(read_yaml(path, key=key), path, key, at)


def _anchored(document: Document, path: Path, key: str, at: Keys = ()) -> Document:
    if not isinstance(document.data, dict):
        rule = f"a {key} is a mapping of keys, this is {'empty' if document.data is None else 'not one'}"
        raise SpecError(where=str(path), key=key, value=None, rule=rule, remedy="Start from a file in examples/")
    _anchor({"cluster": document.data} if at else document.data, path.absolute().parent)
    return Document(document.data, {(*at, *keys): line for keys, line in document.origins.items()})


def _anchor(data: dict[str, Any], folder: Path) -> None:
    """Make the paths in a file independent of where the process runs."""

    def anchor(holder: Any, key: str) -> None:
        if isinstance(holder, dict) and isinstance(holder.get(key), str):
            holder[key] = str(folder / holder[key])

    for key in ("base", "cluster", "profile"):
        anchor(data, key)
    anchor(data.get("model"), "config")
    cluster = data.get("cluster")
    if isinstance(cluster, dict):
        links = cluster.get("links")
        for holder in [cluster.get("wan"), *(links if isinstance(links, list) else [])]:
            anchor(holder, "trace")


def _with_cluster(document: Document) -> Document:
    """`cluster: file.yaml` replaced by what the file holds."""
    if not isinstance(document.data, dict) or not isinstance(document.data.get("cluster"), str):
        return document
    cluster = _read(Path(document.data["cluster"]), "cluster", ("cluster",))
    return Document({**document.data, "cluster": cluster.data}, {**document.origins, **cluster.origins})


def _with_dimensions(document: Document) -> Document:
    """`model.config` read; keys written beside it win."""
    model = document.data.get("model") if isinstance(document.data, dict) else None
    if not isinstance(model, dict) or not isinstance(model.get("config"), str):
        return document
    found = {**dimensions(Path(model["config"])), **model}
    return Document({**document.data, "model": found}, document.origins)


def _files(job: Job, document: Document) -> tuple[str, ...]:
    """What a job was read from, and the files it names."""
    lines = [at for at in document.origins.values() if not at.startswith("--set ")]
    named = [job.model.config, job.profile, job.cluster.wan.trace, *(link.trace for link in job.cluster.links or ())]
    return tuple(sorted({job.where, *(line.rpartition(":")[0] for line in lines), *filter(None, named)}))


# ---- validation --------------------------------------------------------------------------------------------
def _validated(kind: type[M], data: Any, where: Where, room: tuple[str, ...] = ()) -> M:
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        remedy = "Change it; docs/jobs.md explains the key"
        raise refusal(error, where, lambda keys: list(_room((*room, *keys)).model_fields), remedy) from None


def _room(keys: Keys) -> type[Frozen]:
    """What holds at a place of a job file."""
    for room, kind in ROOMS.items():
        if len(room) == len(keys) and all(r in ("*", k) for r, k in zip(room, keys, strict=True)):
            return kind
    raise AssertionError(f"no room for {keys}")


# ---- rules that more than one key takes part in --------------------------------------------------------------------
Where = Callable[[Keys], str]
"""The file and line of a key."""


def check_job(job: Job, where: Where) -> None:
    """Raises SpecError or InfeasibleError at the first rule that does not hold."""
    check_cluster(job.cluster, where, ("cluster",))
    _check_model(job, where)
    _check_stages(job, where)
    _check_placement(job, where)


def check_cluster(cluster: Cluster, where: Where, at: Keys = ()) -> None:
    names = [dc.name for dc in cluster.datacenters]
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise _bad(where, (*at, "datacenters"), twice[0], "two datacenters have this name", "Rename one")
    for i, dc in enumerate(cluster.datacenters):
        if dc.gpu not in GPUS and dc.gpu not in cluster.gpus:
            remedy = f"{nearest(dc.gpu, [*GPUS, *cluster.gpus])} Or define it under cluster.gpus"
            raise _bad(where, (*at, "datacenters", i, "gpu"), dc.gpu, "no such GPU type", remedy)
    _check_links(cluster, names, where, at)


def _check_links(cluster: Cluster, names: list[str], where: Where, at: Keys) -> None:
    seen: set[frozenset[str]] = set()
    for i, link in enumerate(cluster.links or ()):
        key: Keys = (*at, "links", i)
        for end in link.between:
            if end not in names:
                raise _bad(where, (*key, "between"), end, "no such datacenter", nearest(end, names))
        pair = frozenset(link.between)
        if len(pair) == 1:
            raise _bad(where, (*key, "between"), link.between[0], "a link joins two datacenters", "Name two")
        if pair in seen:
            raise _bad(where, (*key, "between"), ", ".join(link.between), "this pair has a link already", "Keep one")
        seen.add(pair)
        if link.latency_ms is None and cluster.wan.latency_ms is None:
            remedy = "Write it here, or cluster.wan.latency_ms for all links"
            raise _bad(where, (*key, "latency_ms"), None, "is needed: the link has no default latency", remedy)
        if link.trace is not None:
            read_trace(Path(link.trace), dotted((*key, "trace")))
    if cluster.wan.trace is not None:
        read_trace(Path(cluster.wan.trace), dotted((*at, "wan", "trace")))


def _check_model(job: Job, where: Where) -> None:
    model = job.model
    if model.head_dim is None and model.hidden % model.heads:
        rule = f"must divide model.hidden ({model.hidden}) where model.head_dim is not given"
        raise _bad(where, ("model", "heads"), model.heads, rule, "Change one, or write head_dim")
    if model.heads % model.num_kv_heads:
        remedy = "Every group of queries shares one key: change either"
        raise _bad(where, ("model", "kv_heads"), model.kv_heads, f"must divide model.heads ({model.heads})", remedy)
    if model.heads % job.tp:
        raise _bad(where, ("tp",), job.tp, f"must divide model.heads ({model.heads})", "Choose another tp")


def _check_stages(job: Job, where: Where) -> None:
    layers, stages = job.model.layers, job.num_stages
    cut = f"pp x interleave = {job.pp} x {job.interleave}" if job.interleave > 1 else "pp"
    if stages > layers:
        rule = f"{stages} stages are more than the model's {layers} layers ({cut})"
        raise InfeasibleError(where=where(("pp",)), key="pp", value=job.pp, rule=rule, remedy=f"At most {layers}")
    split = job.layers_per_stage
    if split is None:
        return
    key: Keys = ("layers_per_stage",)
    if len(split) != stages:
        raise _bad(where, key, list(split[:8]), f"has {len(split)} numbers for {stages} stages ({cut})", "One for each")
    if sum(split) != layers:
        rule = f"adds up to {sum(split)}, but the model has {layers} layers"
        raise _bad(where, key, list(split[:8]), rule, "Change a stage, or leave it out to have it balanced")


def _check_placement(job: Job, where: Where) -> None:
    if job.placement is None:
        return
    names = [dc.name for dc in job.cluster.datacenters]
    for i, place in enumerate(job.placement):
        if place.dc not in names:
            raise _bad(where, ("placement", i, "dc"), place.dc, "no such datacenter", nearest(place.dc, names))
        if i and job.placement[i - 1].dc == place.dc:
            raise _bad(where, ("placement", i, "dc"), place.dc, "follows itself", "Add the two numbers of stages up")
    total = sum(place.stages for place in job.placement)
    if total != job.pp:
        rule = f"its stages add up to {total}, but pp is {job.pp}"
        raise _bad(where, ("placement",), None, rule, "Change one of the two, or leave placement out")


def _bad(where: Where, keys: Keys, value: object, rule: str, remedy: str) -> SpecError:
    return SpecError(where=where(keys), key=dotted(keys), value=value, rule=rule, remedy=remedy)


# ---- pydantic's errors in our words --------------------------------------------------------------------------------
MAPPINGS = ("model_type", "model_attributes_type", "dict_type")


def refusal(
    error: ValidationError, where: Callable[[Keys], str], known: Callable[[Keys], Sequence[str]], remedy: str
) -> SpecError:
    """The first thing that is wrong. `known` gives the keys there are at a place, `remedy` what helps otherwise."""
    # A misspelt key is also a missing key: report the former.
    first: Any = min(error.errors(include_url=False), key=lambda e: e["type"] != "extra_forbidden")
    kind, keys, value = first["type"], tuple(first["loc"]), shown(first["input"])
    if kind == "extra_forbidden":
        rule, remedy, value = "unknown key", nearest(str(keys[-1]), list(known(keys[:-1]))), None
    elif kind == "missing":
        rule, value = "is required and missing", None
        remedy = f"Add {keys[-1]}: to it" if isinstance(keys[-1], str) else "Write one more"
    elif kind in MAPPINGS:
        rule, remedy = "must be a mapping of keys", "Write its keys below it, indented"
    else:
        rule = _plain(first["msg"])
    if keys[-1:] == ("[key]",) and kind != "extra_forbidden":
        keys = keys[:-1]  # pydantic's mark of a key that is wrong itself
    return SpecError(where=where(keys), key=dotted(keys), value=value, rule=rule, remedy=remedy)


def _plain(message: str) -> str:
    """Without pydantic's words for Python's types."""
    message = message.replace(f"match pattern '{NAME}'", "be letters, digits, - and _, a letter or a digit first")
    message = re.sub(r"^(Input|String|Tuple|Dictionary|List) should", "should", message)
    message = message.replace("valid tuple", "list").replace(" after validation", "").replace("\n", " ")
    return message if message.isprintable() else ascii(message)[1:-1]
