"""The next token from logits."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from bubbletea.handoff.sampling import Sampling, choose  # noqa: E402


@pytest.mark.parametrize("penalty", [5e-324, 1e-300, 100.0])
@pytest.mark.parametrize("temperature", [0.0, 1e-4, 1.0])
def test_an_extreme_repetition_penalty_yields_a_token_and_beats_no_ban(penalty: float, temperature: float) -> None:
    logits_V = torch.tensor([3.0, -2.0, 0.0, 1.0])
    sampling = Sampling(4, temperature=temperature, repetition_penalty=penalty, bad=((0,),))
    generator = torch.Generator().manual_seed(1)
    assert choose(logits_V, sampling, generator, prompt=(0, 1), output=(2,)) in (1, 2, 3)
