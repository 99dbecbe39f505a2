"""A recipe: how a plan is trained. One YAML file for the optimizer, the learning rate, the steps, checkpoints, data,
network and logging. A flag of `atlas train` replaces the recipe's key.

Holds values and their rules; what they mean for a run is `launch.train_options`. Paths in a recipe are relative to it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from atlas.errors import SpecError
from atlas.spec.document import Document, Keys, part_of, read_yaml, replaced, wrong
from atlas.spec.fields import Flag, Frozen, Name, Positive, Text
from atlas.spec.refusal import validated

Steps = Annotated[int, Field(strict=True, ge=1, le=10**9)]
StepsOrNone = Annotated[int, Field(strict=True, ge=0, le=10**9)]
Rate = Annotated[float, Field(strict=True, ge=0, le=1e6, allow_inf_nan=False)]
Beta = Annotated[float, Field(strict=True, ge=0, lt=1, allow_inf_nan=False)]
Port = Annotated[int, Field(strict=True, ge=0, le=65535)]
Seed = Annotated[int, Field(strict=True, ge=0, le=2**32 - 1)]
Seconds = Annotated[float, Field(strict=True, ge=0.1, le=1e6, allow_inf_nan=False)]
Norm = Annotated[float, Field(strict=True, ge=1e-12, le=1e12, allow_inf_nan=False)]

OBJECT_STORE = "s3://"
"""How the URL of an object store begins."""
WORDS: dict[Keys, str] = {("model",): "job", ("data", "shards"): "shipped"}
"""Values that are no path, by key."""
_SCHEME = re.compile(r"[a-z][a-z0-9+.-]+:/")
PATHS: tuple[tuple[str, ...], ...] = (
    ("model",),
    ("data", "shards"),
    ("checkpoints", "folder"),
    ("logging", "folder"),
    ("logging", "lines"),
    ("logging", "timeline"),
    ("filler", "folder"),
)


class OptimizerRecipe(Frozen):
    """`optimizer:`"""

    name: Literal["adamw", "sgd"] = "adamw"
    """AdamW, or plain SGD."""
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    """Of AdamW's two moments."""
    eps: Positive = 1e-8
    """Of AdamW."""
    weight_decay: Rate = 0.1
    """Of matrices, not of norms and biases. AdamW only."""


class LearningRateRecipe(Frozen):
    """`learning_rate:`"""

    peak: Rate | None = None
    """Default: 0.001 for AdamW, 0.1 for SGD."""
    warmup: StepsOrNone = 0
    """Steps of a linear rise from 0 to `peak`."""
    decay: Literal["cosine", "linear", "constant"] = "constant"
    """From the end of the warm-up to the last step."""
    final: Rate = 0.0
    """The rate at the last step of a decay."""


class CheckpointRecipe(Frozen):
    """`checkpoints:`"""

    folder: Text | None = None
    """Save there, and resume from there: a folder, or `s3://bucket/prefix`."""
    every: StepsOrNone = 0
    """Steps between saves; 0: at the end only."""
    keep: Annotated[int, Field(strict=True, ge=1, le=1000)] = 3
    """Complete checkpoints to keep."""


class DataRecipe(Frozen):
    """`data:`"""

    shards: Text | None = None
    """A folder of shards, or `shipped`."""


class SiteRecipe(Frozen):
    """`network:`, for all datacenters, or `network.sites.NAME:`, for one of them."""

    listen: Text | None = None
    """The address to bind; 0.0.0.0: all of the host."""
    advertise: Text | None = None
    """The address or name that other datacenters dial, or `none`."""
    ports: Text | None = None
    """`LO-HI`, for workers and checkpoint servers."""
    reach: dict[Text, Text] = Field(default_factory=dict)
    """By datacenter: where to dial it, in place of what it advertises."""
    private: Flag | None = None
    """Whether only this run's hosts can connect to each other, or insert packets, inside a datacenter."""


class NetworkRecipe(SiteRecipe):
    """`network:`"""

    sites: dict[Name, SiteRecipe] = Field(default_factory=dict)
    """By datacenter: what replaces the keys for all."""
    trusted: tuple[Text, ...] = ()
    """Networks in which bytes may travel unencrypted."""
    grace: Seconds = 30.0
    """Seconds after which an unreachable datacenter counts as lost."""
    patience: Seconds = 60.0
    """Seconds after which a stalled worker counts as failed."""
    gather: Seconds = 600.0
    """Seconds that launchers wait for each other at the start."""


class LoggingRecipe(Frozen):
    """`logging:`"""

    folder: Text | None = None
    """Logs of workers, and `run.json`; default with --dc: runs/NAME, in the working directory."""
    lines: Text | None = None
    """A file of JSON lines, one for each step."""
    timeline: Text | None = None
    """A file for `atlas view`."""
    metrics_port: Port | None = None
    """Serve /metrics for Prometheus there; 0: any free port."""
    trackers: tuple[Name, ...] | None = None
    """Experiment trackers, such as `wandb`; `[none]` for none. Default: TensorBoard, where it is installed and the run
    has a folder."""


class FillerRecipe(Frozen):
    """`filler:`"""

    name: Name | None = None
    """What runs while workers wait, such as `bubbletea`; default: nothing."""
    folder: Text | None = None
    """Where its service writes its address; default: the filler's own."""
    memory_mib: Annotated[int, Field(strict=True, ge=1, le=10**7)] = 256
    """Memory of each worker's device that is reserved for it before the first step."""


class Recipe(Frozen):
    """A whole recipe. Every key has a default."""

    steps: Steps = 3
    """Of the whole run: a resumed run does the rest."""
    model: Text | None = None
    """A Hugging Face folder, or `job` for the model that the job describes."""
    data: DataRecipe = DataRecipe()
    """Where tokens come from."""
    precision: Literal["bf16", "fp32"] | None = None
    """Of weights and activations, in place of the job's."""
    recompute: Flag | None = None
    """Whether backward passes compute activations again, in place of the job's."""
    compile: Flag | None = None
    """Whether layers are compiled; default: on GPUs."""
    optimizer: OptimizerRecipe | None = None
    """Default: AdamW; for the stand-in model, SGD."""
    learning_rate: LearningRateRecipe = LearningRateRecipe()
    """By step."""
    clip: Norm | None = None
    """Clip gradients to this global norm; default: no clipping."""
    seed: Seed = 0
    """Of the first weights, of dropout and of the order of the data."""
    sums: Literal["ordered", "fast", "transport"] = "ordered"
    """How gradients are summed over the pipelines of a datacenter."""
    zero: Annotated[int, Field(strict=True, ge=0, le=1)] = 0
    """1: optimizer state is divided among the pipelines (ZeRO-1); 0: every pipeline has all of it."""
    checkpoints: CheckpointRecipe = CheckpointRecipe()
    """Where and how often the run is saved."""
    network: NetworkRecipe = NetworkRecipe()
    """Between datacenters."""
    logging: LoggingRecipe = LoggingRecipe()
    """Files and ports of this launcher's reports."""
    filler: FillerRecipe = FillerRecipe()
    """What runs while workers wait."""

    @property
    def stated(self) -> set[str]:
        """The keys that were written, such as `learning_rate.peak`."""
        found: set[str] = set()
        for name in self.model_fields_set:
            value = getattr(self, name)
            inside = sorted(value.model_fields_set) if isinstance(value, Frozen) else None
            found |= {name} if inside is None else {f"{name}.{key}" for key in inside}
        return found

    @property
    def job_overrides(self) -> list[str]:
        """The keys that replace those of the job, as `--set` writes them."""
        zero = self.zero if "zero" in self.model_fields_set else None
        found = {"precision": self.precision, "recompute": self.recompute, "zero": zero}
        return [f"{key}={str(value).lower()}" for key, value in found.items() if value is not None]


def load_recipe(path: Path | None, flags: Mapping[str, Any] | None = None) -> Recipe:
    """The recipe in a file, or an empty one. `flags`: values by dotted key (`learning_rate.peak`) that replace the
    file's; None is no value. Raises SpecError with file and line."""
    document = _read(path) if path is not None else Document({})
    for key, value in (flags or {}).items():
        if value is not None:
            document = _with_flag(document, tuple(key.split(".")), value)
    where = str(path or "recipe")
    remedy = "Change it; docs/recipes.md explains the key"
    recipe = validated(Recipe, document.data, lambda keys: document.origin(keys, where), remedy)
    _check(recipe, document, where)
    return recipe


def _read(path: Path) -> Document:
    document = read_yaml(path, key="recipe")
    if not isinstance(document.data, dict):
        rule = f"a recipe is a mapping of keys, this is {'empty' if document.data is None else 'not one'}"
        raise SpecError(where=str(path), key="recipe", rule=rule, remedy="Start from examples/recipe.yaml")
    for keys in PATHS:
        text = part_of(document.data, *keys)
        if isinstance(text, str) and text and text != WORDS.get(keys) and not _SCHEME.match(text):
            document.data = replaced(document.data, keys, str(path.absolute().parent / text))
    return document


def _with_flag(document: Document, keys: tuple[str, ...], value: Any) -> Document:
    if not isinstance(part_of(document.data, *keys[:-1]), dict | None):
        return document  # the file is wrong there, and validation says so
    return Document(replaced(document.data, keys, value), {**document.origins, keys: "command line"})


def _check(recipe: Recipe, document: Document, where: str) -> None:
    """Rules that more than one key takes part in, and that of URLs."""
    folder, rate = recipe.checkpoints.folder, recipe.learning_rate

    def bad(section: str, key: str, value: object, rule: str, remedy: str) -> SpecError:
        return wrong(document.origin((section, key), where), f"{section}.{key}", rule, remedy, value)

    if folder and _SCHEME.match(folder) and not folder.startswith(OBJECT_STORE):
        rule = "the only object store is s3://BUCKET/PREFIX"
        raise bad("checkpoints", "folder", folder, rule, "Write that, or a folder")
    if rate.decay != "constant" and rate.warmup >= recipe.steps:
        rule = f"a {rate.decay} decay begins after the warm-up, and the run has {recipe.steps} steps"
        raise bad("learning_rate", "warmup", rate.warmup, rule, "Train longer, or warm up for fewer steps")
    if rate.peak is not None and rate.decay != "constant" and rate.final > rate.peak:
        rule = f"must not exceed learning_rate.peak ({rate.peak:g})"
        raise bad("learning_rate", "final", rate.final, rule, "Lower it")
    if rate.decay == "constant" and rate.final:
        rule = "only has an effect with a decay"
        raise bad("learning_rate", "final", rate.final, rule, "Write decay: cosine, or remove it")
