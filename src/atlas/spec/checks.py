"""Rules of a job that involve more than one key: names that must match, sums that must agree.

Rules that need a price (memory, number of pipelines) are in `cost`. Each rule raises an error with the key to look at.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

from atlas.errors import InfeasibleError, SpecError
from atlas.spec.cluster import Cluster
from atlas.spec.document import Keys, dotted, nearest
from atlas.spec.gpus import GPUS
from atlas.spec.job import Job
from atlas.spec.trace import read_trace

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
