"""From a data point to a job file and a profile: planning then starts from the run that a user has today.

Seconds of a stage come from its ops where Atlas wrote the traces; else from the time in which a rank computes per
step, divided by microbatches and layers. Ranks are numbered with the pipeline outermost, as torchtitan and Megatron do.
What the card does not say (the MLP's width, keys' heads) is derived so that the number of parameters is right, and
reported.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Any

import yaml

from atlas.errors import AtlasError, ProgramError, SpecError
from atlas.evidence.card import Card, ModelShape
from atlas.evidence.data_point import DataPoint
from atlas.evidence.own import gpu_name
from atlas.evidence.rank_trace import rank_of
from atlas.evidence.write_card import LAUNCH
from atlas.ir.program import parse_action
from atlas.spec.document import YAML_WIDTH, read_yaml, shown

FORWARD_SHARE = 1 / 3
"""Of a step without recompute: the backward does twice the forward's work."""
FORWARD_SHARE_RECOMPUTED = 1 / 4
"""With the forward done again before the backward."""
OTHER_SITE = {"latency_ms": 20, "pair_gbps": 5}
"""Defaults of the WAN in an imported job, for datacenters that a user adds."""
_ENDS = {end: {"forward_s": 0.0, "backward_s": 0.0, "update_s": 0.0} for end in ("embedding", "head")}
"""Embedding and LM head: their time is inside that of the first and the last stage's layers."""
_OP = re.compile(r"atlas_[A-Z]+ (\d+(?:F|R|B|I|W|STEP)\d+)$")


@dataclass(frozen=True)
class ImportedJob:
    """A job and a profile as plain data."""

    job: dict[str, Any]
    profile: dict[str, Any]
    step_s: float
    """Of the traces, to compare the simulated iteration with."""
    notes: list[str] = field(default_factory=list)

    def job_text(self, profile_name: str) -> str:
        data = {**self.job, "profile": profile_name}
        head = "# Imported from traces. Add datacenters and links under `cluster`, then plan.\n"
        return head + yaml.safe_dump(data, sort_keys=False, width=YAML_WIDTH)


def import_job(point: DataPoint, *, gpu: str | None = None, recompute: bool | None = None) -> ImportedJob:
    """Raises AtlasError where the card or the traces lack what a job needs."""
    card = point.found.card
    if card is None:
        raise AtlasError(f"{point.found.folder}: has no workload card, which describes the model. Add one")
    step_s = point.value("avg_step_time")
    if step_s is None or not any(rank.num_kernels for rank in point.ranks):
        raise AtlasError(
            f"{point.found.folder}: has no steps with kernels, so the time of an op is unknown. Record steps "
            "(ProfilerStep#N) on a GPU"
        )
    own = point.found.folder / LAUNCH / "job.yaml"
    if card.source and own.is_file():
        return _of_atlas(point, read_yaml(own, key="job").data, step_s)
    return _of_others(point, card, step_s, gpu, recompute)


# ---- traces that Atlas wrote -------------------------------------------------------------------------------------
def _of_atlas(point: DataPoint, job: dict[str, Any], step_s: float) -> ImportedJob:
    """The job as it ran; seconds by stage from its ops."""
    stages = _stage_seconds(point)
    card = point.found.card
    assert card is not None
    split = card.get("atlas.layers_per_stage")
    if not isinstance(split, list) or len(split) != len(stages):
        raise AtlasError(
            f"{card.path}: atlas.layers_per_stage = {shown(split)}: must have one number for each of the {len(stages)} "
            "stages of the traces. Restore the card of this run"
        )
    layers = []
    for count, seconds in zip(split, stages, strict=True):
        layers += [_piece(seconds, count)] * count
    entry = {
        "gpu": str(card.text("atlas.gpu")),
        "microbatch": int(job.get("microbatch", 1)),
        "tp": int(job.get("tp", 1)),
        "seq_len": int(card.seq_len),
        **_ENDS,
        "layers": layers,
    }
    job = {**job, "layers_per_stage": list(split)}
    return ImportedJob(job, {"model": point.name, "entries": [entry]}, step_s)


def _stage_seconds(point: DataPoint) -> list[dict[str, float]]:
    """[stage][kind]: mean seconds of an op."""
    sums: dict[tuple[int, str], list[float]] = {}
    for rank in point.ranks:
        for name, length_us in (rank.by_name_us or {}).items():
            match = _OP.match(name)
            if match is not None:
                try:
                    stage, kind, _ = parse_action(match[1])
                except ProgramError:
                    continue
                sums.setdefault((stage, kind), []).append(length_us / 1e6)
    if not sums:
        raise AtlasError(
            f"{point.found.folder}: no op of Atlas is in the traces, but the card says that Atlas wrote them. Name a "
            "folder with card and traces of one run"
        )
    num_stages = 1 + max(stage for stage, _ in sums)
    found: list[dict[str, float]] = [{} for _ in range(num_stages)]
    for (stage, kind), seconds in sums.items():
        found[stage][kind] = math.fsum(seconds) / len(seconds)
    return found


def _piece(seconds: dict[str, float], count: int) -> dict[str, float]:
    """One layer's share of a stage."""
    backward = seconds.get("B", 0.0) + seconds.get("I", 0.0) + seconds.get("W", 0.0)
    piece = {"forward_s": seconds.get("F", 0.0), "backward_s": backward, "update_s": seconds.get("STEP", 0.0)}
    if "R" in seconds:
        piece["recompute_s"] = seconds["R"]
    if "W" in seconds:
        piece["weight_s"] = seconds["W"]
    return {key: value / count for key, value in piece.items()}


# ---- traces of others --------------------------------------------------------------------------------------------
def _of_others(point: DataPoint, card: Card, step_s: float, gpu: str | None, recompute: bool | None) -> ImportedJob:
    notes: list[str] = []
    kind = gpu or gpu_name(card.text("workload.hardware.xpu_spec.model") or "")
    if kind is None:
        key = "workload.hardware.xpu_spec.model"
        raise _lacks(card, key, card.text(key), "is not a known GPU type", "Give it with --gpu TYPE")
    if card.shape is None:
        raise _lacks(card, "workload.model.model_arch", None, f"lacks {', '.join(card.lacking())}", "Add them")
    pp, tp = card.degree("pp") or 1, card.degree("tp") or 1
    dp = (card.degree("dp_replicate") or 1) * (card.degree("dp_shard") or 1)
    batch, microbatch = card.number("workload.data.batch_size"), max(1, card.degree("pp_mb") or 1)
    if not batch:
        raise _lacks(card, "workload.data.batch_size", None, "a job needs the global batch", "Add it")
    num_microbatches = max(1, round(batch / (dp * microbatch)))
    if num_microbatches * dp * microbatch != batch:
        notes.append(f"batch {batch:.0f} is not dp {dp} x microbatch {microbatch} x a whole number: {num_microbatches}")
    model = _model(card, card.shape, notes)
    if recompute is None:
        recompute = False
        notes.append("recompute is taken as off; give --recompute if activations were recomputed")
    busy_s = _busy_s(point, pp)
    per_stage = _split(model["layers"], pp)
    share = FORWARD_SHARE_RECOMPUTED if recompute else FORWARD_SHARE
    layers = []
    for seconds, count in zip(busy_s, per_stage, strict=True):
        layer_s = seconds / num_microbatches / count
        times = {"forward_s": layer_s * share, "backward_s": layer_s * (1 - share * (2 if recompute else 1))}
        # The optimizer's time is inside the step already.
        layers += [{**times, **({"recompute_s": layer_s * share} if recompute else {}), "update_s": 0.0}] * count
    entry = {"gpu": kind, "microbatch": microbatch, "tp": tp, "seq_len": model["seq_len"], **_ENDS, "layers": layers}
    job = {
        "name": re.sub(r"[^\w.+-]+", "-", point.name)[:60] or "imported",
        "model": model,
        "cluster": _cluster(card, kind),
        "microbatch": microbatch,
        "num_microbatches": num_microbatches,
        **({"tp": tp} if tp > 1 else {}),
        "pp": pp,
        "pipelines_per_cell": dp,
        **({"layers_per_stage": per_stage} if pp > 1 else {}),
        "recompute": recompute,
        "precision": _precision(card),
    }
    return ImportedJob(
        job, {"model": str(card.text("workload.model.model_family") or ""), "entries": [entry]}, step_s, notes
    )


def _busy_s(point: DataPoint, pp: int) -> list[float]:
    """By stage: seconds per step in which its ranks work. Without a pipeline that is the step less exposed
    communication, gaps between kernels included; with one, idle time belongs to the schedule and is left out."""
    ranks = [rank for rank in point.own_ranks if rank.num_kernels]
    if pp == 1:
        return [math.fsum(rank.step_s - rank.exposed_s for rank in ranks) / len(ranks)]
    card = point.found.card
    world = int(card.num_devices) if card is not None else len(ranks)
    by_stage: list[list[float]] = [[] for _ in range(pp)]
    for path, rank in zip(point.found.traces, point.own_ranks, strict=False):
        number = rank_of(path)
        if number is not None and rank.num_kernels and number < world:
            by_stage[number * pp // world].append(rank.compute_s)
    empty = [stage for stage, found in enumerate(by_stage) if not found]
    if empty:
        raise AtlasError(f"{point.found.folder}: no trace of stage {empty[0]} of {pp}: a trace of each stage is needed")
    return [math.fsum(found) / len(found) for found in by_stage]


def _model(card: Card, shape: ModelShape, notes: list[str]) -> dict[str, Any]:
    hidden, layers = int(shape.num_heads * shape.head_dim), int(shape.num_layers)
    family = "gpt" if "gpt" in (card.text("workload.model.model_family") or "").lower() else "llama"
    embedding = shape.num_params_embedding
    if not embedding:
        raise _lacks(card, "num_params_embedding", None, "is missing, and the vocabulary is derived from it", "Add it")
    matrices = 3 if family == "llama" else 2
    for tied in (False, True):
        rest = (shape.num_params - embedding * (1 if tied else 2)) / layers - 4 * hidden**2
        ffn = round(rest / (matrices * hidden))
        if ffn > 0:
            break
    else:
        rule = f"is too small for {layers} layers of width {hidden}"
        raise _lacks(card, "num_params", shape.num_params, rule, "Check model_arch")
    notes.append(
        f"the MLP's width is taken as {ffn} (so that the parameters fit), and keys have as many heads as queries"
    )
    return {
        "family": family,
        "layers": layers,
        "hidden": hidden,
        "heads": int(shape.num_heads),
        "ffn": ffn,
        "vocab": max(1, round(embedding / hidden)),
        "seq_len": int(card.seq_len),
        **({"tied_embeddings": True} if tied else {}),
    }


def _cluster(card: Card, gpu: str) -> dict[str, Any]:
    total, per_node = int(card.num_devices), card.number("workload.hardware.xpu_spec.count_per_node")
    per_node = max(1, min(total, int(per_node or total)))
    gbps = card.get("workload.hardware.network_topo.bandwidth_gbps")
    net = gbps[0] if isinstance(gbps, list) and gbps and isinstance(gbps[0], int | float) and gbps[0] > 0 else None
    here = {"name": "here", "nodes": -(-total // per_node), "gpus_per_node": per_node, "gpu": gpu}
    return {"wan": OTHER_SITE, "datacenters": [{**here, **({"net_gbps": float(net)} if net else {})}]}


def _precision(card: Card) -> str:
    word = (card.text("workload.model.precision") or "").lower()
    return word if word in ("bf16", "fp16", "fp32") else "bf16"


def _split(layers: int, pp: int) -> list[int]:
    """Nearly even, the first stages one more."""
    if pp > layers:
        raise AtlasError(f"pp {pp} is more than the {layers} layers of the card's model. Check the card")
    return [layers // pp + (stage < layers % pp) for stage in range(pp)]


def _lacks(card: Card, key: str, value: object, rule: str, remedy: str) -> SpecError:
    return SpecError(where=str(card.path), key=key, value=value, rule=rule, remedy=remedy)
