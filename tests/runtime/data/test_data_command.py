"""`atlas data`: text in, shards out, whole or not at all; and what it says about what it cannot read."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from atlas.cli import command_parser, main
from atlas.errors import AtlasError
from atlas.runtime.data.batches import Batches, Dataset
from atlas.runtime.data.tokenize import sample_text, tokenize
from atlas.runtime.data.tokenizers import ByteTokenizer, FileTokenizer


@pytest.fixture
def tokenizer_file(tmp_path: Path) -> Path:
    """A small one, trained on the text that ships."""
    hf = pytest.importorskip("tokenizers")
    trained = hf.Tokenizer(hf.models.BPE())
    trained.pre_tokenizer = hf.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = hf.decoders.ByteLevel()
    alphabet = hf.pre_tokenizers.ByteLevel.alphabet()
    trainer = hf.trainers.BpeTrainer(
        vocab_size=600, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    trained.train([str(sample_text())], trainer)
    trained.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


def test_the_flags_are_these() -> None:
    parser, _ = command_parser("data")
    actions = next(action.choices for action in parser._actions if action.dest == "action")
    found = {name: {o for a in sub._actions for o in a.option_strings or [a.dest]} for name, sub in actions.items()}
    wanted = {"inputs", "--out", "--tokenizer", "--end", "--shard-tokens", "--json", "-h", "--help"}
    assert found == {"tokenize": wanted, "check": {"paths", "--json", "-h", "--help"}}
    assert all(action.help for sub in actions.values() for action in sub._actions)


def test_the_text_that_ships_becomes_bytes_and_batches(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "tokenize", "--out", str(tmp_path / "tokens"), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    text = sample_text().read_text(encoding="ascii")
    assert facts["tokens"] == len(text) + 1 >= 40_000
    assert (facts["vocabulary"], facts["bytes_per_token"]) == (256, 1)
    dataset = Dataset.open(tmp_path / "tokens")
    assert ByteTokenizer().decode(dataset.shards[0].tokens[:-1]) == text
    assert Batches(dataset, length=64, global_batch=48, seed=0).num_samples >= 600
    assert main(["data", "check", str(tmp_path / "tokens")]) == 0
    assert "41,007 tokens in 1 shard(s), tokenizer byte" in capsys.readouterr().out


def test_any_hugging_face_tokenizer_can_be_used(tmp_path: Path, tokenizer_file: Path) -> None:
    tokenizer = FileTokenizer(tokenizer_file)
    tokenize([sample_text()], tmp_path / "tokens", tokenizer)
    dataset = Dataset.open(tmp_path / "tokens", verify=True)
    tokens = dataset.shards[0].tokens
    assert dataset.shards[0].header.tokenizer.startswith("hf:")
    assert dataset.vocabulary == tokenizer.vocabulary == 600
    assert dataset.num_tokens < 25_000
    assert tokens[-1] == tokenizer.end == 0
    assert tokenizer.decode(tokens[:-1]) == sample_text().read_text()


def test_documents_follow_each_other_with_an_end_between(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "b.jsonl").write_text('{"text": "two"}\n\n{"text": "dré"}\n{"text": ""}\n', encoding="utf-8")
    tokenize([tmp_path / "a.txt", tmp_path / "b.jsonl"], tmp_path / "tokens", ByteTokenizer())
    tokens = Dataset.open(tmp_path / "tokens").shards[0].tokens
    assert tokens.tobytes() == "one\0two\0dré\0".encode()


@pytest.mark.parametrize(
    ("length", "sizes"), [(99, [100]), (199, [100, 100]), (249, [100, 100, 50]), (204, [100, 105])]
)
def test_shards_are_filled_and_a_small_rest_joins_the_last(tmp_path: Path, length: int, sizes: list[int]) -> None:
    text = "".join(chr(65 + i % 26) for i in range(length))
    (tmp_path / "a.txt").write_text(text)
    tokenize([tmp_path / "a.txt"], tmp_path / "tokens", ByteTokenizer(), shard_tokens=100)
    dataset = Dataset.open(tmp_path / "tokens", verify=True)
    assert [shard.header.num_tokens for shard in dataset.shards] == sizes
    assert np.concatenate([shard.tokens for shard in dataset.shards]).tobytes() == text.encode() + b"\0"


def refused(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    assert main([str(word) for word in ("data", "tokenize", *words)]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    return said.err


def test_bad_input_is_one_message_and_leaves_no_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "tokens"
    (tmp_path / "empty.txt").touch()
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n{"txt": "b"}\n')
    (tmp_path / "tokenizer.json").write_text("{}")
    assert "empty.txt: no text" in refused(capsys, tmp_path / "empty.txt", "--out", out)
    assert "latin.txt: not UTF-8 at byte 3" in refused(capsys, tmp_path / "latin.txt", "--out", out)
    assert "bad.jsonl: line 2" in refused(capsys, tmp_path / "bad.jsonl", "--out", out)
    assert "none.txt: No such file" in refused(capsys, tmp_path / "none.txt", "--out", out)
    assert "choose a larger" in refused(capsys, "--out", out, "--shard-tokens", 0).lower()
    assert "--end '<e>'" in refused(capsys, "--out", out, "--end", "<e>")
    pytest.importorskip("tokenizers")
    wrong = ("--tokenizer", tmp_path / "tokenizer.json")
    assert "tokenizer.json: not a tokenizer" in refused(capsys, "--out", out, *wrong)
    assert not out.exists()
    assert not list(tmp_path.glob(".*"))


def test_a_tokenizer_without_an_end_token_is_refused(tmp_path: Path, tokenizer_file: Path) -> None:
    tokenizer_file.write_text(tokenizer_file.read_text().replace("<|endoftext|>", "<stop>"))
    with pytest.raises(AtlasError, match="--end TOKEN"):
        FileTokenizer(tokenizer_file)
    with pytest.raises(AtlasError, match="no token '<x>'"):
        FileTokenizer(tokenizer_file, "<x>")
    assert FileTokenizer(tokenizer_file, "<stop>").end == 0


def test_nothing_is_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "tokens").mkdir()
    (tmp_path / "tokens" / "mine").touch()
    assert "exists already" in refused(capsys, "--out", tmp_path / "tokens")
    assert [path.name for path in (tmp_path / "tokens").iterdir()] == ["mine"]
