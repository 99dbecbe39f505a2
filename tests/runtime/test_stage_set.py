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
from atlas.schedules.classic import gpipe, one_f_one_b

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


@pytest.mark.parametrize(("tp", "widths"), [(1, 16), (2, 10), (4, 7)])
def test_layers_are_recomputed_one_by_one_if_their_inputs_take_less_than_a_ranks_activations(
    tp: int, widths: int
) -> None:
    """`widths`: of the model, that one layer's activations take on a rank; 4 of them are whole on every rank."""
    for num_in_flight in widths - 1, widths:
        program = to_text(with_optimizer(gpipe(Layout(1, 2, num_in_flight, ("a", "b")), recompute=True)))
        assignment = Assignment(0, program, stand_in(width=16, length=8, microbatch=2), num_steps=1, tp=tp)
        (stage,) = StageSet(assignment, assignment.role, make_device("cpu")).stages.values()
        assert stage.by_layer == (num_in_flight < widths)
