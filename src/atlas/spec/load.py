"""From a path and some `--set` to a validated Job: read, merge `base`, load the cluster, override, validate.

Paths in a file are relative to that file; paths in a `--set` are relative to the working directory. All errors of a
file are found here, with file, line, key, value, rule and remedy; its price is not.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from atlas.errors import SpecError
from atlas.spec.check import Where, check_cluster, check_job, together, unknown_gpu
from atlas.spec.document import Document, Keys, apply_override, dotted, nearest, read_yaml, shown
from atlas.spec.fields import NAME, Frozen
from atlas.spec.gpus import ALIASES, GPUS, Calibration, Gpu
from atlas.spec.huggingface import dimensions
from atlas.spec.job import Cluster, DataCenter, DataCenterPrior, Jitter, Job, Link, LinkPrior, Model, Place, Wan

MAX_BASES = 8

ROOMS: dict[tuple[str, ...], type[Frozen]] = {
    (): Job,
    ("model",): Model,
    ("cluster",): Cluster,
    ("cluster", "datacenters", "*"): DataCenter,
    ("cluster", "wan"): Wan,
    ("cluster", "links", "*"): Link,
    ("cluster", "datacenters", "*", "prior"): DataCenterPrior,
    ("cluster", "links", "*", "prior"): LinkPrior,
    ("cluster", "gpus", "*"): Gpu,
    ("cluster", "gpus", "*", "calibration"): Calibration,
    ("placement", "*"): Place,
    ("jitter",): Jitter,
}
"""Which model holds at which place of a job file: the keys to choose from when one is misspelt."""

M = TypeVar("M", bound=Frozen)
OPEN: dict[str, int] = {"pp": 1, "num_microbatches": 1}
"""What `atlas plan` chooses where a job does not state it, and the value that stands for it until then."""


def load_job(path: str | Path, overrides: Sequence[str] = (), *, to_plan: bool = False) -> Job:
    """The job in a YAML file, with each `key.path=value` of `overrides` applied. Raises SpecError. A job `to_plan` may
    leave out `pp` and `num_microbatches`."""
    path = Path(path)
    return job_of(read_yaml(path, key="job file"), path, overrides, to_plan=to_plan)


def job_of(document: Document, path: Path, overrides: Sequence[str], *, to_plan: bool = False) -> Job:
    """The job in a file that has been read already."""
    return finished(_with_bases(document, path), overrides, str(path), to_plan=to_plan)


def override(job: Job, overrides: Sequence[str]) -> Job:
    """A loaded job with some keys changed and validated again, for what-if and planner."""
    data = job.model_dump(mode="json", exclude_none=True)
    data["model"].pop("config", None)
    for key in job.left_open:
        data.pop(key, None)
    return finished(Document(data), overrides, job.where, to_plan=True)


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


def finished(document: Document, overrides: Sequence[str], where: str, *, to_plan: bool = False) -> Job:
    """The job in a document that was read, overrides applied; `where` names it where no line does."""
    for text in overrides:
        if text.lstrip().startswith("cluster."):
            document = _with_cluster(document)
        document = apply_override(document, text)
    document = _with_gpu_names(_with_dimensions(_with_cluster(document)))

    def origin(keys: Keys) -> str:
        return document.origin(keys, where)

    left_open: tuple[str, ...] = ()
    if isinstance(document.data, dict):
        left_open = tuple(key for key in OPEN if document.data.get(key) is None)
        document = Document({**document.data, **{key: OPEN[key] for key in left_open}}, document.origins)
    job = _validated(Job, document.data, origin)
    if left_open and not to_plan:
        raise _only_to_plan(job, left_open, where)
    if "num_microbatches" in left_open and job.batch is None:
        raise SpecError(
            where=where,
            key="batch",
            value=None,
            rule="is required and missing: a plan needs the batch of one iteration",
            remedy="Add batch: 1M (tokens) or batch: 512 sequences",
        )
    job._where, job._left_open = where, left_open
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


def _only_to_plan(job: Job, left_open: tuple[str, ...], where: str) -> SpecError:
    """A job for the planner was given to a command that runs or simulates."""
    if job.batch is None:
        remedy = f"Add {left_open[0]}: to it, or a batch: and let `atlas plan` choose"
    else:
        remedy = f"Write it, or let `atlas plan {where} --out plan.yaml` choose and use plan.yaml"
    rule = "is required and missing"
    errors = [SpecError(where=where, key=key, value=None, rule=rule, remedy=remedy) for key in left_open]
    found = together(errors)
    assert found is not None
    return found


def _with_gpu_names(document: Document) -> Document:
    """Other names of built-in GPU types replaced, unless the cluster defines a type of that name."""
    cluster = document.data.get("cluster") if isinstance(document.data, dict) else None
    if not isinstance(cluster, dict) or not isinstance(cluster.get("datacenters"), list):
        return document
    own: Any = cluster.get("gpus") if isinstance(cluster.get("gpus"), dict) else {}

    def named(dc: Any) -> Any:
        gpu = dc.get("gpu") if isinstance(dc, dict) else None
        return {**dc, "gpu": ALIASES[gpu]} if isinstance(gpu, str) and gpu in ALIASES and gpu not in own else dc

    dcs = [named(dc) for dc in cluster["datacenters"]]
    return Document({**document.data, "cluster": {**cluster, "datacenters": dcs}}, document.origins)


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
        found = refusals(error, where, lambda keys: list(_room((*room, *keys)).model_fields), remedy)
        refused = together([*found, *_unknown_gpus(data, where, room)])
        assert refused is not None
        raise refused from None


def _unknown_gpus(data: Any, where: Where, room: tuple[str, ...]) -> list[SpecError]:
    """In a file that cannot be validated: GPU types that there are not."""
    cluster = data if room else data.get("cluster") if isinstance(data, dict) else None
    dcs = cluster.get("datacenters") if isinstance(cluster, dict) else None
    own = cluster.get("gpus") if isinstance(cluster, dict) else None
    found = []
    for i, dc in enumerate(dcs if isinstance(dcs, list) else []):
        gpu = dc.get("gpu") if isinstance(dc, dict) else None
        if isinstance(gpu, str) and gpu not in GPUS and gpu not in (own if isinstance(own, dict) else {}):
            keys: Keys = ("cluster", "datacenters", i, "gpu")
            found.append(unknown_gpu(gpu, own or {}, where(keys[len(room) :]), dotted(keys)))
    return found


def _room(keys: Keys) -> type[Frozen]:
    """What holds at a place of a job file."""
    for room, kind in ROOMS.items():
        if len(room) == len(keys) and all(r in ("*", k) for r, k in zip(room, keys, strict=True)):
            return kind
    raise AssertionError(f"no room for {keys}")


# ---- pydantic's errors in our words --------------------------------------------------------------------------------
MAPPINGS = ("model_type", "model_attributes_type", "dict_type")


Known = Callable[[Keys], Sequence[str]]
"""The keys there are at a place."""


def refusal(error: ValidationError, where: Where, known: Known, remedy: str) -> SpecError:
    """Everything that is wrong, in one error. `remedy` is what helps where nothing better is known."""
    found = together(refusals(error, where, known, remedy))
    assert found is not None
    return found


def refusals(error: ValidationError, where: Where, known: Known, remedy: str) -> list[SpecError]:
    """One error for each thing that is wrong; misspelt keys first."""
    all_: list[Any] = sorted(error.errors(include_url=False), key=lambda e: e["type"] != "extra_forbidden")
    misspelt = {tuple(e["loc"])[:-1] for e in all_ if e["type"] == "extra_forbidden"}
    # A misspelt key is also a missing key: report the former.
    wanted = [e for e in all_ if not (e["type"] == "missing" and tuple(e["loc"])[:-1] in misspelt)]
    return [_refusal_of(one, where, known, remedy) for one in wanted]


def _refusal_of(first: Any, where: Where, known: Known, remedy: str) -> SpecError:
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
