"""Two gloo processes that share every matrix compute what one process computes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from atlas.errors import SpecError
from atlas.runtime.models.config import gpt
from atlas.runtime.models.parallel import require_divisible


def test_two_ranks_give_the_logits_gradients_and_steps_of_one(tmp_path: Path) -> None:
    script = Path(__file__).with_name("tensor_parallel_ranks.py")
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), str(tmp_path / "store")],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [rank.communicate(timeout=120)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(said)
    assert all("equal" in words for words in said)


def test_an_indivisible_model_is_refused() -> None:
    config = gpt(num_layers=1, width=12, num_heads=3, vocabulary=8, max_length=8)
    with pytest.raises(SpecError, match=r"num_heads = 3: cannot be divided among 2 tensor-parallel GPUs"):
        require_divisible(config, 2)
