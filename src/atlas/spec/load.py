"""From a path and some `--set` to a validated Job: read, merge `base`, load the cluster, override, validate.

Paths in a file are relative to that file; paths in a `--set` are relative to the working directory. All errors of a
file are found here; its price is not.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from atlas.errors import SpecError
from atlas.spec.checks import Where, check_cluster, check_job
from atlas.spec.cluster import Cluster, DataCenter, Link, Wan
from atlas.spec.document import Document, Keys, read_yaml, shown
from atlas.spec.fields import Frozen
from atlas.spec.gpus import Calibration, Gpu
from atlas.spec.huggingface import dimensions
from atlas.spec.job import Jitter, Job, Place
from atlas.spec.model import Model
from atlas.spec.overrides import apply_override
from atlas.spec.refusal import refusal

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
