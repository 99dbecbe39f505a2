"""Shards of tokens: what is written is what is mapped, and any other file is refused by name."""

from __future__ import annotations

import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest

from atlas.errors import AtlasError
from atlas.runtime.data.batches import Batches, Dataset
from atlas.runtime.data.shard import HEADER_BYTES, ShardWriter, dtype_for, open_shard, verify_shard


def write_shard(path: Path, tokens: list[int], vocabulary: int = 256, tokenizer: str = "byte") -> Path:
    writer = ShardWriter(path, vocabulary, tokenizer)
    writer.append(np.array(tokens))
    writer.finish(0, 1)
    return path


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    return write_shard(tmp_path / "a.tokens", list(range(100)))


@pytest.mark.parametrize(("vocabulary", "itemsize"), [(256, 1), (257, 2), (65_536, 2), (65_537, 4), (200_000, 4)])
def test_tokens_come_back_in_the_smallest_type_that_holds_them(tmp_path: Path, vocabulary: int, itemsize: int) -> None:
    tokens = [0, 1, vocabulary - 1, 7]
    found = open_shard(write_shard(tmp_path / "a.tokens", tokens, vocabulary, "hf:abc"))
    assert found.tokens.tolist() == tokens
    assert found.header.dtype.itemsize == dtype_for(vocabulary).itemsize == itemsize
    assert (found.header.vocabulary, found.header.tokenizer) == (vocabulary, "hf:abc")
    verify_shard(found)


def damage(path: Path, at: int, new: bytes, *, fix_header: bool = False) -> None:
    data = bytearray(path.read_bytes())
    data[at : at + len(new)] = new
    if fix_header:
        data[HEADER_BYTES - 4 : HEADER_BYTES] = zlib.crc32(data[: HEADER_BYTES - 4]).to_bytes(4, "little")
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("at", "new", "mend", "says"),
    [
        (0, b"PK\x03\x04", False, "does not begin with ATLASTOK"),
        (8, b"\x09", True, "format version 9, this atlas reads version 1"),
        (30, b"\x01", False, "header is damaged"),
        (16, b"f4", True, "tokens of type b'f4', allowed are u1, u2 and u4"),
        (16, b"u2", True, "cut short: 356 bytes, its header says 456"),
        (24, b"\x63", True, "too long: 356 bytes, its header says 355"),
        (24, b"\x00", True, "it holds no tokens"),
    ],
)
def test_a_foreign_or_damaged_header_is_named(shard: Path, at: int, new: bytes, mend: bool, says: str) -> None:
    damage(shard, at, new, fix_header=mend)
    with pytest.raises(AtlasError, match=rf"a\.tokens: .*{says}.*atlas data tokenize"):
        open_shard(shard)


@pytest.mark.parametrize("size", [0, 5, 100, HEADER_BYTES + 99])
def test_a_truncated_file_is_refused(shard: Path, size: int) -> None:
    shard.write_bytes(shard.read_bytes()[:size])
    with pytest.raises(AtlasError, match=r"a\.tokens: (cut short|not a shard)"):
        open_shard(shard)


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(AtlasError, match="cannot be read: No such file"):
        open_shard(tmp_path / "none.tokens")


def test_a_flipped_bit_among_the_tokens_is_found_by_verifying(shard: Path) -> None:
    damage(shard, HEADER_BYTES + 50, b"\xff")
    with pytest.raises(AtlasError, match=r"a\.tokens: its tokens are damaged"):
        Dataset.open(shard, verify=True)


def test_a_token_outside_the_vocabulary_is_found_before_it_is_trained_on(tmp_path: Path) -> None:
    shard = write_shard(tmp_path / "a.tokens", [1, 2, 3, 99, 4], vocabulary=10)
    batches = Batches(Dataset.open(shard), length=4, global_batch=1, seed=0)
    with pytest.raises(AtlasError, match=r"a\.tokens: token 99 at 3 is outside its vocabulary of 10"):
        batches.batch(0)


def test_shards_of_different_tokenizers_do_not_mix(tmp_path: Path, shard: Path) -> None:
    other = write_shard(tmp_path / "b.tokens", [1, 2], tokenizer="hf:1")
    with pytest.raises(AtlasError, match=r"b\.tokens: tokenizer hf:1, but .*a\.tokens has byte"):
        Dataset.open(shard, other)


def test_a_folder_with_a_missing_or_extra_shard_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(AtlasError, match="no shards"):
        Dataset.open(tmp_path)
    for index in (0, 2):
        writer = ShardWriter(tmp_path / f"{index}.tokens", 256, "byte")
        writer.append(np.arange(9))
        writer.finish(index, 3)
    with pytest.raises(AtlasError, match="shard 1 of 3 is missing"):
        Dataset.open(tmp_path)
    for index in (1, 3):
        writer = ShardWriter(tmp_path / f"{index}.tokens", 256, "byte")
        writer.append(np.arange(9))
        writer.finish(index % 3, 3)
    with pytest.raises(AtlasError, match=r"4 shards, but .* is one of 3"):
        Dataset.open(tmp_path)


def test_a_model_with_too_small_a_vocabulary_is_refused(shard: Path) -> None:
    Dataset.open(shard).require_vocabulary(256)
    with pytest.raises(AtlasError, match=r"a\.tokens: tokens of a vocabulary of 256, but the model has 64"):
        Dataset.open(shard).require_vocabulary(64)


def test_data_needs_no_torch() -> None:
    script = "import sys, atlas.commands.data; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stdout == "False\n"
