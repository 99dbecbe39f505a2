"""Checkpoints in an object store: the verbs of a folder, against a real S3 server (moto) on loopback."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from checkpoint_samples import LAYERS, choose_verified, meta_at, numbered, same
from s3_servers import ABSENT, served

from atlas.cli import main
from atlas.errors import AtlasError
from atlas.runtime.checkpoint.checkpointer import Checkpointer
from atlas.runtime.checkpoint.load import load_layers
from atlas.runtime.checkpoint.manifest import SaveId, complete_ids
from atlas.runtime.checkpoint.object_store import S3BlobStore, require_object_store
from atlas.runtime.checkpoint.place import below, id_of, names_below, saves_under, store_at
from atlas.runtime.checkpoint.retention import Retention

pytestmark = pytest.mark.skipif(bool(ABSENT), reason=f"not installed: {', '.join(ABSENT)} (CONTRIBUTING.md)")


@pytest.fixture(scope="module")
def server() -> Iterator[None]:
    with served():
        yield


@pytest.fixture
def place(server: None, request: pytest.FixtureRequest) -> str:
    return f"s3://atlas/{request.node.name}"


def test_a_blob_appears_when_it_is_complete(place: str) -> None:
    store = S3BlobStore(place)
    data = os.urandom(17 << 20)  # more than one part of an upload
    writer = store.create("step-1/a")
    writer.write(data)
    assert store.names() == []
    writer.close()
    assert store.names() == [], "discarded"
    store.write("step-1/a", [memoryview(data)[: 9 << 20], data[9 << 20 :]])
    store.write("step-1/ab", [b"short"])
    store.write("step-2/a", [])
    assert store.names() == ["step-1/a", "step-1/ab", "step-2/a"]
    assert store.names("step-1/ab") == ["step-1/ab"]
    with store.open("step-1/a") as file:
        assert file.read(10) == data[:10]
        assert file.seek(-4, os.SEEK_END) == len(data) - 4
        assert file.read() == data[-4:]
        file.seek(0)
        assert file.read() == data
    store.delete("step-1/a")
    store.delete("step-1/a")
    assert store.names("step-1/") == ["step-1/ab"]


def test_a_write_that_fails_leaves_the_earlier_blob(place: str) -> None:
    store = S3BlobStore(place)
    store.write("a", [b"before"])

    def broken() -> Iterator[bytes]:
        yield b"after"
        raise OSError("the source is gone")

    with pytest.raises(OSError, match="the source is gone"):
        store.write("a", broken())
    with store.open("a") as file:
        assert file.read() == b"before"


def test_a_missing_blob_and_a_name_outside_are_errors_of_a_folder(place: str) -> None:
    store = S3BlobStore(place)
    with pytest.raises(FileNotFoundError):
        store.open("none")
    with pytest.raises(PermissionError):
        store.open("../other/a")


def test_checkpoints_are_saved_pruned_and_loaded(place: str) -> None:
    store = store_at(below(place, "own"))
    writers = [Checkpointer(store, f"p0.s{s}", LAYERS, retention=Retention(keep=2)) for s in range(2)]
    for step in range(1, 5):
        for s, writer in enumerate(writers):
            writer.save(step, numbered(step, LAYERS[3 * s : 3 * s + 3]), meta_at(step))
        for writer in writers:
            writer.close()
            assert not writer.failed
    assert complete_ids([store])[-2:] == [SaveId(0, 3), SaveId(0, 4)]
    assert SaveId(0, 1) not in complete_ids([store])
    found = choose_verified([store])
    assert found is not None
    assert same(load_layers(found, LAYERS), numbered(4))
    assert names_below(place) == ["own"]
    assert [str(found) for found in saves_under(place)] == [f"{place}/own"]


def test_launchers_with_one_place_find_out(place: str) -> None:
    assert id_of(place) == id_of(f"{place}/")
    assert id_of(place) != id_of(f"{place}-other")


def test_a_bucket_that_cannot_be_read_is_one_sentence(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AtlasError, match=r"none/run: the bucket cannot be read: The specified bucket does not exist"):
        require_object_store("s3://none/run", "--checkpoints")
    with pytest.raises(AtlasError, match=r"Write s3://BUCKET/PREFIX"):
        require_object_store("s3://Not_A_Bucket", "--checkpoints")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setattr("atlas.runtime.checkpoint.object_store.NUM_RETRIES", 0)
    with pytest.raises(AtlasError, match="the bucket cannot be read") as error:
        require_object_store(place, "--checkpoints")
    assert "\n" not in str(error.value)


def test_the_commands_read_an_object_store(place: str, capsys: pytest.CaptureFixture[str]) -> None:
    store = store_at(below(place, "east"))
    writer = Checkpointer(store, "p0.s0", LAYERS)
    writer.save(3, numbered(3), meta_at(3))
    writer.close()
    assert main(["checkpoint", "list", place, "--json"]) == 0
    assert '"complete": true' in capsys.readouterr().out
    assert main(["checkpoint", "verify", place]) == 0
    assert main(["checkpoint", "list", f"{place}-empty"]) == 2
