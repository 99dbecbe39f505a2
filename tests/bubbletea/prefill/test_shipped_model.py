"""The shipped model answers in English words."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from greedy_decoding import greedy

import atlas.runtime.data
from atlas.runtime.models.decoder import LayerRange
from atlas.runtime.models.huggingface import read_config
from atlas.runtime.models.weights import load
from bubbletea.prefill.shard import TINY

TEXT = Path(atlas.runtime.data.__file__).parent / "text" / "founding.txt"
WORDS = set(re.findall(r"[a-z]+", TEXT.read_text(encoding="utf-8").lower()))


def test_it_is_small() -> None:
    assert sum(file.stat().st_size for file in TINY.iterdir()) <= 2_000_000


@pytest.mark.parametrize("prompt", ["The sea was calm, and", "To be, or", "Hello", "<|user|>\nHello?\n<|assistant|>\n"])
def test_its_answers_are_english_words(prompt: str) -> None:
    config = read_config(TINY)
    decoder = load(config, LayerRange.whole(config), TINY)
    with torch.inference_mode():
        tokens = greedy(decoder, torch.tensor([list(prompt.encode())]), 120)[0, len(prompt) :]
    said = bytes(tokens.tolist()).decode()
    words = re.findall(r"[a-z]+", said.lower())[1:-1]  # the first and the last may be cut
    assert len(words) >= 10, said
    assert sum(word in WORDS for word in words) >= 0.8 * len(words), said
