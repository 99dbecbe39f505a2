"""`atlas plan --confidence`: the plan with the best percentile under weather, not the one with the best mean."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from atlas.api import plan
from atlas.errors import SpecError
from atlas.spec import load_job, override
from atlas.weather.path_model import PathModel, save_model

JOB = Path(__file__).parents[2] / "examples" / "tiny.yaml"


def test_a_plan_for_rough_weather_is_never_worse_at_its_percentile(tmp_path: Path) -> None:
    job = load_job(JOB)
    capacity = job.cluster.wan.pair_gbps * 1e9
    cross = np.where(np.arange(400) % 200 < 150, 0.0, 0.97) * capacity
    save_model(tmp_path / "a.path", PathModel(capacity, 80e6, 1e7, cross, cross > 0))
    stormy = override(job, [f"cluster.wan.model={tmp_path / 'a.path'}"])
    found = plan(stormy, tries=0, confidence=0.95, break_even=False)
    said = found.found.percentile_choice
    assert said is not None
    assert said.percentile_s <= said.constants_choice_s
    assert found.as_dict()["confidence"]["draws"] == said.draws
    again = plan(stormy, tries=0, confidence=0.95, break_even=False).found.percentile_choice
    assert again == said


def test_confidence_needs_a_model() -> None:
    with pytest.raises(SpecError, match="no link has one"):
        plan(load_job(JOB), tries=0, confidence=0.9, break_even=False)


def test_the_plan_by_constants_is_kept_unless_another_is_clearly_better(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = load_job(JOB)
    capacity = job.cluster.wan.pair_gbps * 1e9
    cross = np.where(np.arange(400) % 200 < 100, 0.0, 0.98) * capacity
    save_model(tmp_path / "a.path", PathModel(capacity, 80e6, 1e7, cross, cross > 0))
    stormy = override(job, [f"cluster.wan.model={tmp_path / 'a.path'}"])
    by_constants = plan(job, tries=0, break_even=False).found.winner.candidate
    monkeypatch.setattr("atlas.planner.confidence.CLEARLY", 10.0)
    found = plan(stormy, tries=0, confidence=0.95, break_even=False).found
    assert found.winner.candidate == by_constants
    assert found.percentile_choice is not None
    assert not found.percentile_choice.changed
    assert found.percentile_choice.percentile_s == found.percentile_choice.constants_choice_s
