"""What a worker's stages are filled with."""

from __future__ import annotations

import pytest

from atlas.ir.assemble import with_optimizer
from atlas.ir.program import Layout
from atlas.ir.text import to_text
from atlas.runtime.assignment import Assignment, SaveChoice, stand_in
from atlas.runtime.hardware import make_device
from atlas.runtime.models import decoder
from atlas.runtime.stage_set import StageSet
from atlas.schedules.classic import one_f_one_b

PROGRAM = to_text(with_optimizer(one_f_one_b(Layout(1, 1, 1, ("a",)))))


@pytest.mark.parametrize(("step", "num_drawn"), [(None, 1), (4, 0)])
def test_weights_that_a_checkpoint_replaces_are_not_drawn(
    step: int | None, num_drawn: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = list[int]()
    monkeypatch.setattr(decoder, "initialize", lambda _, seed: calls.append(seed))
    save = SaveChoice("folder", resume=step)
    assignment = Assignment(0, PROGRAM, stand_in(width=16, length=8, microbatch=2), num_steps=1, save=save)
    StageSet(assignment, assignment.role, make_device("cpu"))
    assert len(calls) == num_drawn
