"""Rules of a job that more than one key takes part in. Each rule that does not hold gives an error; all of them are
raised together, so that a user mends a file once.

The form of single keys is checked by the models; `load` reads the files.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from atlas.errors import InfeasibleError, SpecError
from atlas.spec.batch import batch_sequences
from atlas.spec.document import Keys, dotted, nearest
from atlas.spec.gpus import ALIASES, GPUS
from atlas.spec.job import Cluster, Job
from atlas.spec.trace import read_trace

Where = Callable[[Keys], str]
"""The file and line of a key."""
MOST_MISTAKES = 20


def together(errors: Iterable[SpecError]) -> SpecError | None:
    """One error that tells of all, or None."""
    found = list({str(error): error for error in errors}.values())
    if len(found) > 1:
        first = f"{len(found)} mistakes:"
        rest = [f"  {error}" for error in found[:MOST_MISTAKES]]
        if len(found) > MOST_MISTAKES:
            rest.append(f"  and {len(found) - MOST_MISTAKES} more")
        found[0].args = ("\n".join([first, *rest]),)
    return found[0] if found else None


def check_job(job: Job, where: Where) -> None:
    """Raise SpecError or InfeasibleError where rules do not hold."""
    errors = [*_cluster(job.cluster, where, ("cluster",)), *_model(job, where), *_batch(job, where)]
    errors += [*_stages(job, where), *_placement(job, where)]
    if (error := together(errors)) is not None:
        raise error


def check_cluster(cluster: Cluster, where: Where, at: Keys = ()) -> None:
    if (error := together(_cluster(cluster, where, at))) is not None:
        raise error


def near_gpus(name: str, own: Iterable[str] = ()) -> str:
    """ "Did you mean A100-40GB or A100-80GB?": types that begin alike come before types that are spelt alike."""
    names = [*GPUS, *ALIASES, *own]
    word = re.sub(r"[^a-z0-9]", "", name.lower())
    alike = [one for one in names if word and re.sub(r"[^a-z0-9]", "", one.lower()).startswith(word)]
    shown = [one for one in alike if ALIASES.get(one) or one not in ALIASES.values()]
    return f"Did you mean {' or '.join(shown[:4])}?" if shown else nearest(name, [*GPUS, *own])


def unknown_gpu(name: str, own: Iterable[str], where: str, key: str) -> SpecError:
    remedy = f"{near_gpus(name, own)} Or define it under cluster.gpus"
    return SpecError(where=where, key=key, value=name, rule="no such GPU type", remedy=remedy)


def _cluster(cluster: Cluster, where: Where, at: Keys) -> Iterator[SpecError]:
    names = [dc.name for dc in cluster.datacenters]
    for name, count in Counter(names).items():
        if count > 1:
            yield bad(where, (*at, "datacenters"), name, "two datacenters have this name", "Rename one")
    for i, dc in enumerate(cluster.datacenters):
        if dc.gpu not in GPUS and dc.gpu not in cluster.gpus:
            key: Keys = (*at, "datacenters", i, "gpu")
            yield unknown_gpu(dc.gpu, cluster.gpus, where(key), dotted(key))
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
    if cluster.wan.trace is not None:
        read_trace(Path(cluster.wan.trace), dotted((*at, "wan", "trace")))


def _model(job: Job, where: Where) -> Iterator[SpecError]:
    model = job.model
    if model.head_dim is None and model.hidden % model.heads:
        rule = f"must divide model.hidden ({model.hidden}) where model.head_dim is not given"
        yield bad(where, ("model", "heads"), model.heads, rule, "Change one, or write head_dim")
    if model.heads % model.num_kv_heads:
        remedy = "Every group of queries shares one key: change either"
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
    cut = f"pp x interleave = {job.pp} x {job.interleave}" if job.interleave > 1 else "pp"
    if stages > layers:
        rule = f"{stages} stages are more than the model's {layers} layers ({cut})"
        yield InfeasibleError(where=where(("pp",)), key="pp", value=job.pp, rule=rule, remedy=f"At most {layers}")
    split = job.layers_per_stage
    if split is None:
        return
    key: Keys = ("layers_per_stage",)
    if len(split) != stages:
        yield bad(where, key, list(split[:8]), f"has {len(split)} numbers for {stages} stages ({cut})", "One for each")
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
            yield bad(where, ("placement", i, "dc"), place.dc, "follows itself", "Add the two numbers of stages up")
    total = sum(place.stages for place in job.placement)
    if total != job.pp and "pp" not in job.left_open:
        rule = f"its stages add up to {total}, but pp is {job.pp}"
        yield bad(where, ("placement",), None, rule, "Change one of the two, or leave placement out")


def bad(where: Where, keys: Keys, value: object, rule: str, remedy: str) -> SpecError:
    return SpecError(where=where(keys), key=dotted(keys), value=value, rule=rule, remedy=remedy)
