"""Measured profiles: seconds of every piece of a model on a GPU type, by microbatch size and tp, from a file.

    {"entries": [{"gpu": "A100-80", "microbatch": 1, "tp": 1, "seq_len": 2048,
                  "embedding": {"forward_s": 0.0002, "backward_s": 0.0003},
                  "layer":     {"forward_s": 0.0115, "backward_s": 0.0241, "recompute_s": 0.0115,
                                "weight_s": 0.0110, "update_s": 0.0009},
                  "head":      {"forward_s": 0.0110, "backward_s": 0.0215}}]}

JSON or YAML. `layer` holds for every layer; `layers` gives them one by one instead. `backward_s` is the whole
backward, `weight_s` the weight gradient's part of it (default: half), `recompute_s` is the forward again where
left out, `update_s` the optimizer (left out: priced from bytes). `params` and `activation_bytes` are what one GPU holds
(left out: from the model's shape). An entry records the shape it was measured at. `seq_len` is required; `unchecked`
names what else is missing (`hidden`, ...). `cost.compute` adds the parts of a stage.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from atlas.errors import SpecError
from atlas.spec.document import read_json, read_yaml
from atlas.spec.fields import Count, Flag, Frozen, Size, Text
from atlas.spec.job import Job
from atlas.spec.refusal import validated

Seconds = Annotated[float, Field(strict=True, ge=0, le=10_000, allow_inf_nan=False)]


class Piece(Frozen):
    """Seconds of one piece of the model for one microbatch."""

    forward_s: Seconds
    """Forward."""
    backward_s: Seconds
    """Backward, input and weight gradient together."""
    recompute_s: Seconds | None = None
    """Forward again before the backward."""
    weight_s: Seconds | None = None
    """The weight gradient's part of `backward_s`."""
    update_s: Seconds | None = None
    """Optimizer step of this piece."""
    params: Annotated[int, Field(strict=True, ge=0, le=10**13)] | None = None
    """Parameters on one GPU."""
    activation_bytes: Annotated[float, Field(strict=True, ge=0, le=1e13, allow_inf_nan=False)] | None = None
    """What one microbatch leaves for its backward on one GPU."""


class Entry(Frozen):
    """One measured configuration."""

    gpu: Text
    """GPU type, as the cluster calls it."""
    microbatch: Count
    """Sequences in one microbatch."""
    tp: Count = 1
    """Tensor parallelism."""
    seq_len: Size | None = None
    """Tokens of a sequence, when it was measured. A job with an entry that lacks it is refused."""
    hidden: Size | None = None
    """Width of the residual stream."""
    heads: Count | None = None
    """Attention heads."""
    kv_heads: Count | None = None
    """Heads of keys and values."""
    head_dim: Count | None = None
    """Width of one head."""
    ffn: Size | None = None
    """Inner width of the MLP."""
    gated: Flag | None = None
    """Whether the MLP has three matrices."""
    vocab: Size | None = None
    """Rows of the embedding."""
    precision: Literal["bf16", "fp16", "fp32"] | None = None
    """Of weights and activations."""
    torch: Text | None = None
    """Version of torch that was measured."""
    device: Text | None = None
    """What the driver calls the accelerator."""
    compiled: Flag | None = None
    """Whether layers were compiled."""
    embedding: Piece = Piece(forward_s=0.0, backward_s=0.0)
    """Token embedding, on the first stage."""
    layer: Piece | None = None
    """Every layer, where they are alike."""
    layers: tuple[Piece, ...] | None = None
    """Or each layer by itself."""
    head: Piece = Piece(forward_s=0.0, backward_s=0.0)
    """LM head and loss, on the last stage."""

    def each_layer(self, count: int) -> tuple[Piece, ...]:
        """The layers one by one, also where they are alike."""
        if self.layers is not None:
            return self.layers
        assert self.layer is not None, "`load_profile` requires one of the two"
        return (self.layer,) * count


class Profile(Frozen):
    """A profile file."""

    model: Text = ""
    """What was measured; for people."""
    entries: tuple[Entry, ...] = Field(min_length=1)
    """One for each GPU type, microbatch size and tp."""


def load_profile(path: str | Path) -> Profile:
    """The profile in a file, or SpecError."""
    path = Path(path)
    is_yaml = path.suffix.lower() in (".yaml", ".yml")
    data: Any = read_yaml(path, key="profile").data if is_yaml else read_json(path, key="profile")
    remedy = "The file may be truncated: measure again, or fix the value"
    profile = validated(Profile, data, lambda _: str(path), remedy)
    for i, entry in enumerate(profile.entries):
        if (entry.layer is None) == (entry.layers is None):
            raise SpecError(
                where=str(path),
                key=f"entries[{i}].layer",
                rule="an entry has either `layer` (all alike) or `layers` (one by one)",
                remedy="Give exactly one of the two",
            )
        for layer in entry.layers or (entry.layer,):
            if layer is not None and not (layer.forward_s > 0 and layer.backward_s > 0):
                raise SpecError(
                    where=str(path),
                    key=f"entries[{i}].layer{'' if entry.layers is None else 's'}",
                    rule="a layer takes no time: forward_s and backward_s must be more than 0",
                    remedy="Measure again",
                )
    return profile


def shape_of(job: Job) -> dict[str, int | str]:
    """What an entry records of the model it was measured with."""
    model = job.model
    return {
        "seq_len": model.seq_len,
        "hidden": model.hidden,
        "heads": model.heads,
        "kv_heads": model.num_kv_heads,
        "head_dim": model.head_width,
        "ffn": model.ffn_width,
        "gated": model.is_gated,
        "vocab": model.vocab,
        "precision": job.precision,
    }


def entry_of(job: Job, profile: str, gpu: str) -> Entry:
    """The entry of the job's profile that prices it on a GPU type."""
    return find_entry(_loaded(profile), job, gpu)


def _loaded(path: str) -> Profile:
    """A file is read once, until it changes."""
    try:
        stamp = Path(path).stat().st_mtime_ns
    except (OSError, ValueError):
        stamp = 0  # reading the file reports the error
    return _read_once(path, stamp)


@lru_cache(maxsize=16)
def _read_once(path: str, stamp: int) -> Profile:
    return load_profile(path)


def find_entry(profile: Profile, job: Job, gpu: str) -> Entry:
    """The entry measured in exactly this configuration: nothing is scaled or guessed."""
    path, want = job.profile or "profile", (gpu, job.microbatch, job.tp)
    alike = [entry for entry in profile.entries if (entry.gpu, entry.microbatch, entry.tp) == want]
    wanted = f"gpu {gpu}, microbatch {job.microbatch}, tp {job.tp}"
    if not alike:
        have = "; ".join(f"gpu {e.gpu}, microbatch {e.microbatch}, tp {e.tp}" for e in profile.entries[:6])
        raise SpecError(
            where=path,
            key="entries",
            rule=f"nothing was measured for {wanted} (there is {have})",
            remedy="Measure it, change the job, or leave `profile` out",
        )
    entry = min(alike, key=lambda one: (one.seq_len is None, len(_differences(one, job))))
    if entry.seq_len is None:
        raise SpecError(
            where=path,
            key="seq_len",
            rule=f"the entry for {wanted} does not record with how many tokens in a sequence it was measured",
            remedy="Measure again with `atlas profile`, or add `seq_len: N` to the entry",
        )
    if differences := _differences(entry, job):
        raise SpecError(
            where=path,
            key="entries",
            rule=f"the entry for {wanted} was measured with another model: {'; '.join(differences)}",
            remedy="Measure this job's model with `atlas profile`, or leave `profile` out",
        )
    if entry.layers is not None and len(entry.layers) != job.model.layers:
        rule = f"has {len(entry.layers)} layers for {wanted}, but the model has {job.model.layers}"
        raise SpecError(where=path, key="layers", rule=rule, remedy="The file may be truncated: measure again")
    return entry


def _differences(entry: Entry, job: Job) -> list[str]:
    """`seq_len 128, the job has 2048`, for every part of the shape that the entry records and the job contradicts."""
    found = [(key, getattr(entry, key), value) for key, value in shape_of(job).items()]
    return [f"{key} {had}, the job has {value}" for key, had, value in found if had is not None and had != value]


def unchecked(job: Job) -> list[str]:
    """Parts of the model's shape that an entry of the job's profile does not record, so that nothing checks them."""
    if job.profile is None:
        return []
    kinds = {dc.gpu for dc in job.cluster.datacenters}
    entries = [entry for entry in _loaded(job.profile).entries if entry.gpu in kinds]
    return [key for key in shape_of(job) if any(getattr(entry, key) is None for entry in entries)]
