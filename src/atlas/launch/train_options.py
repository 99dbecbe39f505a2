"""The options of `atlas train` beside the plan, and the model and data that they choose. Used by runs over several
datacenters and by rehearsals alike. Starts nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from atlas.errors import AtlasError, SpecError
from atlas.evaluate import Case
from atlas.launch.supervisor import RestartPolicy
from atlas.runtime.assignment import (
    DataChoice,
    FillerChoice,
    ModelChoice,
    SumsKind,
    TrainingSetup,
    find_filler,
    stand_in,
)
from atlas.runtime.data.batches import open_dataset
from atlas.runtime.models.config import from_spec
from atlas.runtime.models.huggingface import read_config
from atlas.runtime.recipe import LearningRate, OptimizerSettings
from atlas.spec.plan import Plan, PlanSchedule, require_runnable
from atlas.spec.recipe import FillerRecipe, LearningRateRecipe, OptimizerRecipe, Recipe

STAND_IN_LENGTH = 64
"""Tokens of a sequence, where a stand-in reads real data."""
DEFAULT_PEAK = {"adamw": 1e-3, "sgd": 0.1}
"""Learning rates, by optimizer: usual for small models, and what the stand-in learns with."""
OWN = "job"
"""In place of a folder: the model that the job describes, with random weights."""


@dataclass(frozen=True)
class TrainOptions:
    """What a user may choose beside the plan."""

    schedule: str
    tcp: Literal["one", "many"] = "many"
    steps: int = 3
    """Of the whole run: a resumed run does the rest."""
    slower: int = 1
    weather_seed: int = 0
    """Of the cross traffic of links that have a model, in an emulated run."""
    budget: int | None = None
    """Tries of a schedule that searches."""
    device: str = "paced"
    model: str = ""
    """A Hugging Face folder, or `OWN`; empty: a stand-in."""
    data: str = ""
    """A folder of shards, or the text that ships (`assignment.SHIPPED`); empty: a made-up task."""
    optimizer: OptimizerRecipe | None = None
    """None: AdamW; for a stand-in, SGD."""
    learning_rate: LearningRateRecipe | float | None = None
    """A number: constant."""
    clip: float | None = None
    compile: bool | None = None
    """Whether layers are compiled; None: on GPUs."""
    seed: int = 0
    """Of weights, of dropout and of the order of the data."""
    sums: SumsKind = "ordered"
    """How gradients are summed over pipelines (`TrainingSetup.sums`)."""
    zero: int = 0
    """1: optimizer state is divided among the pipelines (ZeRO-1)."""
    logs: Path | None = None
    """Of workers of an emulated run; with --dc a launcher has its own (`AgentSettings.logs`)."""
    stated: frozenset[str] | None = None
    """Keys of the recipe that the user wrote here; for the others, the first datacenter's apply. None: all."""
    checkpoints: Path | str | None = None
    """A folder, or `s3://bucket/prefix`."""
    save_every: int = 0
    keep: int = 3
    """Complete checkpoints to keep."""
    restarts: RestartPolicy = field(default_factory=RestartPolicy)
    grace_s: float = 30.0
    """How long a launcher may be out of reach before its datacenter is lost."""
    patience_s: float = 60.0
    """How long a worker waits for a peer before it fails."""
    gather_s: float = 600.0
    """How long to wait for all launchers at the start."""
    filler: FillerChoice | None = None
    """What uses the workers' waits."""

    @classmethod
    def of(
        cls, plan: Plan | None, schedule: str | None = None, tcp: Literal["one", "many"] | None = None, **others: Any
    ) -> TrainOptions:
        """With the plan's choices where the user made none. Raises AtlasError for a plan that cannot be executed."""
        if plan is not None:
            require_runnable(plan)
        how = PlanSchedule(name="1f1b") if plan is None else plan.schedule
        return cls(schedule or how.name, tcp or how.tcp, budget=how.tries or None, **others)


def recipe_options(recipe: Recipe, *, model: str) -> dict[str, Any]:
    """The fields of TrainOptions that a recipe holds. `model`: the one to train where the recipe names none."""
    saved, same = recipe.checkpoints, ("steps", "optimizer", "learning_rate", "clip", "compile", "seed", "sums", "zero")
    return {
        **{key: getattr(recipe, key) for key in same},
        "model": recipe.model or model,
        "data": recipe.data.shards or "",
        "logs": Path(recipe.logging.folder) if recipe.logging.folder is not None else None,
        "checkpoints": saved.folder,
        "save_every": saved.every,
        "keep": saved.keep,
        "grace_s": recipe.network.grace,
        "patience_s": recipe.network.patience,
        "gather_s": recipe.network.gather,
        "stated": frozenset(recipe.stated),
        "filler": _filler(recipe.filler),
    }


def _filler(recipe: FillerRecipe) -> FillerChoice | None:
    if recipe.name is None:
        if given := [key for key in sorted(recipe.model_fields_set) if getattr(recipe, key) is not None]:
            raise AtlasError(
                f"filler.{given[0]}: no filler is named, so it has no effect. Give --filler NAME (`filler.name` in the "
                "recipe) too, or leave it out"
            )
        return None
    find_filler(recipe.name)
    folder = {"folder": recipe.folder} if recipe.folder is not None else {}
    return FillerChoice(recipe.name, {**folder, "memory_mib": recipe.memory_mib})


def optimizer_settings(options: TrainOptions) -> OptimizerSettings:
    """What the optimizer does at every step of the run."""
    is_stand_in = not options.model and not options.data
    chosen = options.optimizer or OptimizerRecipe(name="sgd" if is_stand_in else "adamw")
    rate = options.learning_rate
    if not isinstance(rate, LearningRateRecipe):
        rate = LearningRateRecipe(peak=rate)
    peak = rate.peak if rate.peak is not None else DEFAULT_PEAK[chosen.name]
    num_steps = 0 if rate.decay == "constant" else options.steps
    return OptimizerSettings(
        LearningRate(peak, rate.decay, rate.warmup, num_steps, rate.final),
        chosen.name,
        *chosen.betas,
        chosen.eps,
        chosen.weight_decay,
    )


def agreed(options: TrainOptions) -> dict[str, Any]:
    """What launchers must agree on beside the plan, by key of the recipe. Folders may differ."""
    settings = optimizer_settings(options)
    rate = settings.learning_rate
    return {
        "steps": options.steps,
        "optimizer.name": settings.name,
        "optimizer.betas": [settings.beta1, settings.beta2],
        "optimizer.eps": settings.eps,
        "optimizer.weight_decay": settings.weight_decay,
        "learning_rate.peak": rate.peak,
        "learning_rate.warmup": rate.num_warmup_steps,
        "learning_rate.decay": rate.decay,
        "learning_rate.final": rate.floor,
        "clip": options.clip,
        "compile": options.compile,
        "seed": options.seed,
        "sums": options.sums,
        "zero": options.zero,
        "checkpoints.every": options.save_every,
        "checkpoints.keep": options.keep,
    }


def make_training(case: Case, options: TrainOptions, num_stages: int) -> TrainingSetup:
    """The model and the data that the options choose; stand-ins by default."""
    settings = optimizer_settings(options)
    if not options.model and not options.data:
        training = stand_in(num_layers=max(4, num_stages - 2), num_heads=max(2, case.job.tp))
    else:
        model, length, microbatch = _model(case, options, num_stages)
        training = TrainingSetup(model, DataChoice(length, microbatch, options.data), settings)
    return replace(
        training,
        model=replace(training.model, seed=options.seed),
        data=replace(training.data, seed=options.seed),
        optimizer=settings,
        max_norm=options.clip,
        compile=compiler(options.compile, [options.device]),
        sums=options.sums,
        zero=max(options.zero, case.job.zero),
    )


def compiler(wanted: bool | None, devices: Iterable[str]) -> str:
    """The backend of torch's compiler for workers on these devices; empty: layers run eagerly. By default layers are
    compiled where all devices are GPUs."""
    compiled = all(device.startswith("cuda") for device in devices) if wanted is None else wanted
    return "inductor" if compiled else ""


def _model(case: Case, options: TrainOptions, num_stages: int) -> tuple[ModelChoice, int, int]:
    """The model, the tokens of its sequences, the sequences of its microbatches."""
    job = case.job
    if not options.model:
        small = stand_in(
            num_layers=max(4, num_stages - 2),
            num_heads=max(2, job.tp),
            vocabulary=open_dataset(options.data).vocabulary,
            length=STAND_IN_LENGTH,
        )
        return small.model, STAND_IN_LENGTH, small.data.microbatch
    folder = None if options.model == OWN else Path(options.model)
    config = from_spec(job.model) if folder is None else read_config(folder)
    if config.num_layers != job.model.layers:
        raise SpecError(
            where=options.model,
            key="layers",
            value=config.num_layers,
            rule=f"the plan divides a model of {job.model.layers} layers into stages",
            remedy="Plan for this model (model.config in the job), or train the model that was planned for",
        )
    if job.precision == "fp16":
        raise SpecError(
            where="job",
            key="precision",
            value=job.precision,
            rule="workers train in bf16 or fp32; fp16 would need loss scaling",
            remedy="Train with --set precision=bf16, or plan again with it",
        )
    weights = "" if folder is None or not any(folder.glob("*.safetensors")) else str(folder)
    layers = case.arrangement.layers_per_stage
    dtype: Literal["fp32", "bf16"] = "fp32" if job.precision == "fp32" else "bf16"
    length = min(job.model.seq_len, config.max_length)
    return ModelChoice(config, dtype, weights=weights, layers_per_stage=layers), length, job.microbatch
