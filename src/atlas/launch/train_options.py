"""The options of `atlas train` beside the plan, and the model and data that they choose. Used by runs over several
datacenters and by rehearsals alike. Starts nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
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
    require_device_name,
    stand_in,
)
from atlas.runtime.data.batches import open_dataset
from atlas.runtime.models.config import from_spec
from atlas.runtime.models.huggingface import read_config
from atlas.runtime.recipe import LearningRate, OptimizerSettings
from atlas.spec.document import nearest
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
    """What a user may choose besides the plan. The flags of `atlas train` have the same names and defaults."""

    schedule: str
    tcp: Literal["one", "many"] = "many"
    """TCP connections between two nodes."""
    steps: int = 3
    """Total steps of the run, those before a resume included."""
    slower: int = 1
    """Multiply every duration by this number."""
    weather_seed: int = 0
    """In an emulated run: seed of the cross traffic of links that have a `model`."""
    budget: int | None = None
    """Orders that the schedule search may try; None: by the job's size."""
    device: str = "paced"
    """paced, cpu, cuda or cuda:N."""
    model: str = ""
    """A Hugging Face folder, or "job" for the model that the job describes; empty: a small stand-in model."""
    data: str = ""
    """A folder of shards, or "shipped" for the included text; empty: synthetic data."""
    optimizer: OptimizerRecipe | None = None
    """None: AdamW; for the stand-in, SGD."""
    learning_rate: LearningRateRecipe | float | None = None
    """A number is a constant rate."""
    clip: float | None = None
    """Clip gradients to this global norm; None: no clipping."""
    compile: bool | None = None
    """Whether layers are compiled; None: on GPUs."""
    seed: int = 0
    """Seed of weights, dropout and data order."""
    sums: SumsKind = "ordered"
    """How gradients are summed over pipelines (`TrainingSetup.sums`)."""
    zero: int = 0
    """1: optimizer state is divided among the pipelines (ZeRO-1)."""
    logs: Path | None = None
    """Folder for worker logs of an emulated run; with --dc a launcher has its own (`AgentSettings.logs`)."""
    stated: frozenset[str] | None = None
    """Keys that this datacenter's recipe states; the others have the values of the first datacenter. None: all."""
    checkpoints: Path | str | None = None
    """A folder, or "s3://BUCKET/PREFIX"; None: do not save."""
    save_every: int = 0
    """Steps between saves; 0: save at the end."""
    keep: int = 3
    """Number of complete checkpoints to keep."""
    restarts: RestartPolicy = field(default_factory=RestartPolicy)
    """How often a failed run is restarted."""
    grace_s: float = 30.0
    """Treat an unreachable launcher as lost after this time."""
    patience_s: float = 60.0
    """Treat a stalled worker as failed after this time."""
    gather_s: float = 600.0
    """Wait this time for all launchers at the start."""
    filler: FillerChoice | None = None
    """What uses the time in which workers wait."""

    @classmethod
    def of(
        cls, plan: Plan | None, schedule: str | None = None, tcp: Literal["one", "many"] | None = None, **others: Any
    ) -> TrainOptions:
        """Options in which the plan decides what the user did not. Raises AtlasError for a plan that cannot be
        executed."""
        known = {field.name for field in fields(cls)}
        for name in others.keys() - known:
            remedy = nearest(name, known)
            raise SpecError(where="atlas.train", key=name, rule="there is no such option", remedy=remedy)
        if plan is not None:
            require_runnable(plan)
        require_device_name(others.get("device", cls.device))
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
                f"recipe) too, or leave out filler.{given[0]}"
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
