"""Loads a job: reads the file, merges `base`, loads the cluster, applies `--set` and validates the result. Every error
names file, line, key, value, rule and remedy. Paths in a file are relative to that file, paths in a `--set` to the
working directory."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from atlas.errors import InfeasibleError, SpecError
from atlas.spec.batch import batch_sequences
from atlas.spec.document import (
    Document,
    Keys,
    apply_override,
    as_path,
    dotted,
    nearest,
    part_of,
    read_yaml,
    replaced,
    wrong,
)
from atlas.spec.fields import Frozen
from atlas.spec.gpus import ALIASES, GPUS
from atlas.spec.huggingface import dimensions
from atlas.spec.job import Cluster, DataCenter, Job, Link, Wan
from atlas.spec.power import nodes_allowed, power_rules, server_watts
from atlas.spec.refusal import Where, bad, refusals, together, unknown_gpu
from atlas.spec.trace import read_trace
from atlas.spec.weather_rules import weather_rules

MAX_BASES = 8
"""Files that extend each other."""

M = TypeVar("M", bound=Frozen)
OPEN: dict[str, int] = {"pp": 1, "num_microbatches": 1}
"""Keys that `atlas plan` chooses if the job does not state them, and the values that they have until then."""


def load_job(path: str | PathLike[str], overrides: Sequence[str] = (), *, to_plan: bool = False) -> Job:
    """The job in a YAML file, with each `key.path=value` of `overrides` applied. Raises SpecError. A job `to_plan` may
    leave out `pp` and `num_microbatches`."""
    path = as_path(path, "job")
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
    for dc in data["cluster"]["datacenters"]:
        if dc["name"] in job.powered:
            dc.pop("nodes")
    return finished(Document(data), overrides, job.where, to_plan=True)


def parse_job(data: Any) -> Job:
    """A job from plain data, for callers that hold no file. Relative paths are as the process sees them."""
    return finished(Document(data), (), "job")


def load_cluster(path: str | Path) -> Cluster:
    """The cluster in a YAML file of its own."""
    document = _read(Path(path), "cluster file", ("cluster",))

    def origin(keys: Keys) -> str:
        return document.origin(("cluster", *keys), str(path))

    data, powered = _with_nodes(document.data)
    cluster = _powered(_validated(Cluster, data, origin, ("cluster",)), powered)
    _check(_cluster(cluster, origin, (), powered))
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
    powered: tuple[str, ...] = ()
    if isinstance(document.data, dict):
        left_open = tuple(key for key in OPEN if document.data.get(key) is None)
        cluster, powered = _with_nodes(document.data.get("cluster"))
        chosen = {key: OPEN[key] for key in left_open}
        document = Document({**document.data, **chosen, "cluster": cluster}, document.origins)
    job = _validated(Job, document.data, origin)
    job = job.model_copy(update={"cluster": _powered(job.cluster, powered)}) if powered else job
    if left_open and not to_plan:
        raise _only_to_plan(job, left_open, where)
    if "num_microbatches" in left_open and job.batch is None:
        rule = "is required and missing: a plan needs the batch of one iteration"
        raise wrong(where, "batch", rule, "Add batch: 1M (2^20 tokens) or batch: 512 sequences")
    job._where, job._left_open, job._powered = where, left_open, powered
    job._files = _files(job, document)
    _check(_rules(job, origin))
    return job


# ---- files that name other files ---------------------------------------------------------------------------
def _with_bases(document: Document, path: Path) -> Document:
    """A job file merged over the file that its `base` names, and so on down."""
    chain, seen = [_anchored(document, path, "job file")], [os.path.realpath(path)]
    while isinstance(chain[-1].data, dict) and "base" in chain[-1].data:
        base = chain[-1].data.pop("base")
        at = chain[-1].origin(("base",), str(path))
        if not isinstance(base, str):
            raise wrong(at, "base", "is not a file", "Name a job file", base)
        chain.append(_read(Path(base), "base"))
        if os.path.realpath(base) in seen:
            raise wrong(at, "base", "base files form a cycle", "Remove this base", base)
        if len(seen) > MAX_BASES:
            raise wrong(at, "base", f"more than {MAX_BASES} base files in a row", "Merge some of them", base)
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
        raise wrong(path, key, rule, "Start from a file in examples/")
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
    for holder in [part_of(cluster, "wan"), *_list_of(cluster, "links")]:
        anchor(holder, "trace")
        anchor(holder, "model")
    for dc in _list_of(cluster, "datacenters"):
        anchor(part_of(dc, "fabric"), "parts")


def _list_of(data: Any, *keys: str) -> list[Any]:
    """A list in plain data that is not validated yet; empty where there is none."""
    found = part_of(data, *keys)
    return found if isinstance(found, list) else []


def _with_cluster(document: Document) -> Document:
    """`cluster: file.yaml` replaced by what the file holds."""
    if not isinstance(part_of(document.data, "cluster"), str):
        return document
    cluster = _read(Path(document.data["cluster"]), "cluster", ("cluster",))
    return Document({**document.data, "cluster": cluster.data}, {**document.origins, **cluster.origins})


def _with_dimensions(document: Document) -> Document:
    """The job with the dimensions of `model.config`; keys of the job take precedence."""
    config = part_of(document.data, "model", "config")
    if not isinstance(config, str):
        return document
    found = {**dimensions(Path(config)), **document.data["model"]}
    return Document({**document.data, "model": found}, document.origins)


def _only_to_plan(job: Job, left_open: tuple[str, ...], where: str) -> SpecError:
    """A job for the planner was given to a command that runs or simulates."""
    if job.batch is None:
        remedy = f"Add {left_open[0]}: to it, or a batch: and let `atlas plan` choose"
    else:
        remedy = f"Write it, or let `atlas plan {where} --out plan.yaml` choose and use plan.yaml"
    rule = "is required and missing"
    return together(SpecError(where=where, key=key, rule=rule, remedy=remedy) for key in left_open)


def _with_gpu_names(document: Document) -> Document:
    """Other names of built-in GPU types replaced, unless the cluster defines a type of that name."""
    keys = "cluster", "datacenters"
    if not (dcs := _list_of(document.data, *keys)):
        return document
    own = part_of(document.data, "cluster", "gpus")

    def named(dc: Any) -> Any:
        gpu = part_of(dc, "gpu")
        is_alias = isinstance(gpu, str) and gpu in ALIASES and part_of(own, gpu) is None
        return {**dc, "gpu": ALIASES[gpu]} if is_alias else dc

    return Document(replaced(document.data, keys, [named(dc) for dc in dcs]), document.origins)


def _files(job: Job, document: Document) -> tuple[str, ...]:
    """What a job was read from, and the files it names."""
    lines = [at for at in document.origins.values() if not at.startswith("--set ")]
    paths: tuple[Wan | Link, ...] = (job.cluster.wan, *(job.cluster.links or ()))
    named = [job.model.config, job.profile, *(path.trace for path in paths), *(path.model for path in paths)]
    named += [dc.fabric.parts for dc in job.cluster.datacenters if dc.fabric is not None]
    return tuple(sorted({job.where, *(line.rpartition(":")[0] for line in lines), *filter(None, named)}))


def _with_nodes(cluster: Any) -> tuple[Any, tuple[str, ...]]:
    """A number of nodes for each datacenter that states its power instead, and the names of these datacenters."""
    if not (dcs := _list_of(cluster, "datacenters")):
        return cluster, ()
    open_ = [isinstance(dc, dict) and dc.get("nodes") is None and dc.get("power_kw") is not None for dc in dcs]
    filled = [{**dc, "nodes": 1} if is_open else dc for dc, is_open in zip(dcs, open_, strict=True)]
    powered = tuple(str(dc.get("name")) for dc, is_open in zip(dcs, open_, strict=True) if is_open)
    return {**cluster, "datacenters": filled}, powered


def _powered(cluster: Cluster, powered: tuple[str, ...]) -> Cluster:
    """The cluster with as many nodes as the power allows in the named datacenters."""

    def with_nodes(dc: DataCenter) -> DataCenter:
        known = dc.gpu in GPUS or dc.gpu in cluster.gpus
        if dc.name not in powered or not known or server_watts(cluster, dc) is None:
            return dc
        return dc.model_copy(update={"nodes": max(1, nodes_allowed(cluster, dc))})

    return cluster.model_copy(update={"datacenters": tuple(map(with_nodes, cluster.datacenters))})


# ---- validation --------------------------------------------------------------------------------------------
def _validated(kind: type[M], data: Any, where: Where, section: tuple[str, ...] = ()) -> M:
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        remedy = "Change it; docs/jobs.md explains the key"
        found = refusals(error, where, kind, remedy)
        raise together([*found, *_unknown_gpus(data, where, section)]) from None


def _unknown_gpus(data: Any, where: Where, section: tuple[str, ...]) -> list[SpecError]:
    """In a file that cannot be validated: unknown GPU types."""
    cluster = data if section else part_of(data, "cluster")
    own = part_of(cluster, "gpus")
    own = own if isinstance(own, dict) else {}
    found = []
    for i, dc in enumerate(_list_of(cluster, "datacenters")):
        gpu = part_of(dc, "gpu")
        if isinstance(gpu, str) and gpu not in GPUS and gpu not in own:
            keys: Keys = ("cluster", "datacenters", i, "gpu")
            found.append(unknown_gpu(gpu, own, where(keys[len(section) :]), dotted(keys)))
    return found


# ---- rules over several keys ---------------------------------------------------------------------------------------
def _check(errors: Iterable[SpecError]) -> None:
    """Raise everything that is wrong in one error, so that a user corrects a file once."""
    if found := list(errors):
        raise together(found)


def _rules(job: Job, where: Where) -> Iterator[SpecError]:
    yield from _cluster(job.cluster, where, ("cluster",), job.powered)
    for rules in (_model, _batch, _stages, _placement):
        yield from rules(job, where)


def _cluster(cluster: Cluster, where: Where, at: Keys, powered: tuple[str, ...]) -> Iterator[SpecError]:
    names = [dc.name for dc in cluster.datacenters]
    for name, count in Counter(names).items():
        if count > 1:
            yield bad(where, (*at, "datacenters"), name, "two datacenters have this name", "Rename one")
    for i, dc in enumerate(cluster.datacenters):
        if dc.gpu not in GPUS and dc.gpu not in cluster.gpus:
            key: Keys = (*at, "datacenters", i, "gpu")
            yield unknown_gpu(dc.gpu, cluster.gpus, where(key), dotted(key))
    if any(dc.power_kw is not None or dc.fabric is not None for dc in cluster.datacenters):
        yield from power_rules(cluster, where, at, powered)
    yield from _links(cluster, names, where, at)


def _links(cluster: Cluster, names: list[str], where: Where, at: Keys) -> Iterator[SpecError]:
    seen: set[frozenset[str]] = set()
    for i, link in enumerate(cluster.links or ()):
        key: Keys = (*at, "links", i)
        for end in link.between:
            if end not in names:
                yield bad(where, (*key, "between"), end, "no such datacenter", nearest(end, names))
        pair = frozenset(link.between)
        if len(pair) == 1:
            yield bad(where, (*key, "between"), link.between[0], "a link joins two datacenters", "Name two")
        elif pair in seen:
            yield bad(where, (*key, "between"), ", ".join(link.between), "this pair has a link already", "Keep one")
        seen.add(pair)
        if link.latency_ms is None and cluster.wan.latency_ms is None:
            remedy = "Write it here, or cluster.wan.latency_ms for all links"
            yield bad(where, (*key, "latency_ms"), None, "is needed: the link has no default latency", remedy)
        if link.trace is not None:
            read_trace(Path(link.trace), dotted((*key, "trace")))
        if link.model or cluster.wan.model:
            yield from weather_rules(link, cluster.wan, where, key)
    if cluster.wan.trace is not None:
        read_trace(Path(cluster.wan.trace), dotted((*at, "wan", "trace")))
    if cluster.wan.model is not None:
        yield from weather_rules(cluster.wan, cluster.wan, where, (*at, "wan"))


def _model(job: Job, where: Where) -> Iterator[SpecError]:
    model = job.model
    if model.head_dim is None and model.hidden % model.heads:
        rule = f"must divide model.hidden ({model.hidden}) where model.head_dim is not given"
        yield bad(where, ("model", "heads"), model.heads, rule, "Change one, or write head_dim")
    if model.heads % model.num_kv_heads:
        remedy = "Change one of the two: every KV head serves the same number of heads"
        yield bad(where, ("model", "kv_heads"), model.kv_heads, f"must divide model.heads ({model.heads})", remedy)
    if model.heads % job.tp:
        yield bad(where, ("tp",), job.tp, f"must divide model.heads ({model.heads})", "Choose another tp")


def _batch(job: Job, where: Where) -> Iterator[SpecError]:
    if job.batch is not None:
        try:
            batch_sequences(job.batch, job.model.seq_len, where=where(("batch",)))
        except SpecError as error:
            yield error


def _stages(job: Job, where: Where) -> Iterator[SpecError]:
    layers, stages = job.model.layers, job.num_stages
    cut = f"pp x interleave = {job.pp} x {job.interleave}" if job.interleave > 1 else f"pp = {job.pp}"
    if stages > layers:
        rule = f"{stages} stages are more than the model's {layers} layers" + (
            f" ({cut})" if job.interleave > 1 else ""
        )
        yield InfeasibleError(where=where(("pp",)), key="pp", value=job.pp, rule=rule, remedy=f"Use at most {layers}")
    split = job.layers_per_stage
    if split is None:
        return
    key: Keys = ("layers_per_stage",)
    if len(split) != stages:
        rule = f"has {len(split)} numbers for {stages} stages ({cut})"
        yield bad(where, key, list(split[:8]), rule, "Write one number per stage")
    if sum(split) != layers:
        rule = f"adds up to {sum(split)}, but the model has {layers} layers"
        yield bad(where, key, list(split[:8]), rule, "Change a stage, or leave it out to have it balanced")


def _placement(job: Job, where: Where) -> Iterator[SpecError]:
    if job.placement is None:
        return
    names = [dc.name for dc in job.cluster.datacenters]
    for i, place in enumerate(job.placement):
        if place.dc not in names:
            yield bad(where, ("placement", i, "dc"), place.dc, "no such datacenter", nearest(place.dc, names))
        if i and job.placement[i - 1].dc == place.dc:
            yield bad(where, ("placement", i, "dc"), place.dc, "the entry before names it too", "Merge the two entries")
    total = sum(place.stages for place in job.placement)
    if total != job.pp and "pp" not in job.left_open:
        rule = f"its stages add up to {total}, but pp is {job.pp}"
        yield bad(where, ("placement",), None, rule, "Change one of the two, or leave placement out")
