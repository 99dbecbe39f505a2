"""The options of `atlas train` beside the plan, and the model and data that they choose. Used by runs over several
datacenters and by rehearsals alike. Starts nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from atlas.errors import AtlasError, SpecError
from atlas.evaluate import Case
from atlas.launch.supervisor import RestartPolicy
from atlas.runtime.assignment import DataChoice, ModelChoice, TrainingSetup, stand_in
from atlas.runtime.data.batches import open_dataset
from atlas.runtime.models.config import from_spec
from atlas.runtime.models.huggingface import read_config
from atlas.runtime.recipe import LearningRate, OptimizerSettings
from atlas.spec.plan import Plan, PlanSchedule

STAND_IN_LENGTH = 64
"""Tokens of a sequence, where a stand-in reads real data."""
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
    budget: int | None = None
    """Tries of a schedule that searches."""
    device: str = "paced"
    model: str = ""
    """A Hugging Face folder, or `OWN`; empty: a stand-in."""
    data: str = ""
    """A folder of shards, or the text that ships (`assignment.SHIPPED`); empty: a made-up task."""
    learning_rate: float | None = None
    clip: float | None = None
    checkpoints: Path | None = None
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

    @classmethod
    def of(
        cls, plan: Plan | None, schedule: str | None = None, tcp: Literal["one", "many"] | None = None, **others: Any
    ) -> TrainOptions:
        """With the plan's choices where the user made none. Raises AtlasError for a plan that cannot be executed."""
        if plan is not None and plan.runnable != "yes":
            raise AtlasError(f"{plan.job.where}: runnable: {plan.runnable}")
        how = PlanSchedule(name="1f1b") if plan is None else plan.schedule
        return cls(schedule or how.name, tcp or how.tcp, budget=how.tries or None, **others)


def make_training(case: Case, options: TrainOptions, num_stages: int) -> TrainingSetup:
    """The model and the data that the options choose; stand-ins by default."""
    rate = options.learning_rate
    if not options.model and not options.data:
        rate = 0.1 if rate is None else rate
        training = stand_in(num_layers=max(4, num_stages - 2), num_heads=max(2, case.job.tp), learning_rate=rate)
        return replace(training, max_norm=options.clip)
    model, length, microbatch = _model(case, options, num_stages)
    settings = OptimizerSettings(LearningRate(1e-3 if rate is None else rate))
    return TrainingSetup(model, DataChoice(length, microbatch, options.data), settings, options.clip)


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
    weights = "" if folder is None or not any(folder.glob("*.safetensors")) else str(folder)
    layers = case.arrangement.layers_per_stage
    dtype: Literal["fp32", "bf16"] = "fp32" if job.precision == "fp32" else "bf16"
    length = min(job.model.seq_len, config.max_length)
    return ModelChoice(config, dtype, weights=weights, layers_per_stage=layers), length, job.microbatch
