"""Saving and loading: what comes back is what was there at the step boundary, and damage is named."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest
import safetensors.torch
import torch
from checkpoint_samples import LAYERS, Faulty, choose_verified, meta_at, numbered, same

from atlas.errors import AtlasError
from atlas.runtime.checkpoint.checkpointer import Checkpointer
from atlas.runtime.checkpoint.load import choose, load_layers, verify
from atlas.runtime.checkpoint.manifest import SaveId, next_attempt
from atlas.runtime.checkpoint.retention import Retention
from atlas.runtime.checkpoint.state import LayerState
from atlas.runtime.checkpoint.store import LocalStore

Told = list[str]


def saved(root: Path, *steps: int, attempt: int = 0) -> LocalStore:
    store = LocalStore(root)
    checkpointer = Checkpointer(store, "p0.s0", LAYERS, attempt=attempt, retention=Retention(keep=10))
    for step in steps:
        checkpointer.save(step, numbered(step), meta_at(step))
    checkpointer.close()
    return store


def test_a_loaded_checkpoint_equals_the_saved_one(tmp_path: Path) -> None:
    store = saved(tmp_path, 10, 20)
    checkpoint = choose_verified([store])
    assert checkpoint is not None
    assert (checkpoint.step, checkpoint.meta) == (20, meta_at(20))
    assert same(load_layers(checkpoint, LAYERS), numbered(20))
    assert same(load_layers(checkpoint, ["4"]), numbered(20, ["4"]))
    older = choose([store], step=10)
    assert older is not None
    assert same(load_layers(older, LAYERS), numbered(10))


def test_equal_states_have_equal_files_in_whatever_order_their_entries_are(tmp_path: Path) -> None:
    """A resumed optimizer has its entries in the order of the file that it was read from."""
    files = []
    for name in ("a", "b"):
        states = numbered(10)
        if name == "b":
            turned = {n: dict(reversed(list(entries.items()))) for n, entries in states["0"].optimizer.items()}
            states["0"] = LayerState(states["0"].parameters, turned)
        checkpointer = Checkpointer(LocalStore(tmp_path / name), "w", LAYERS)
        checkpointer.save(10, states, meta_at(10))
        checkpointer.close()
        files.append({p.name: p.read_bytes() for p in (tmp_path / name / "step-00000010-a0").iterdir()})
    assert files[0] == files[1]


def test_every_dtype_and_shape_comes_back(tmp_path: Path) -> None:
    tensors = {
        "0.bf16": torch.randn(3, 5).bfloat16(),
        "0.half": torch.randn(2).half(),
        "0.f64": torch.randn(1, 1, 2, dtype=torch.float64),
        "0.ints": torch.arange(7),
        "0.flags": torch.tensor([True, False]),
        "0.scalar": torch.tensor(3.5),
        "0.empty": torch.empty(0, 4),
        "0.turned": torch.randn(4, 6).t(),
    }
    checkpointer = Checkpointer(LocalStore(tmp_path), "w", ["0"])
    checkpointer.save(1, {"0": LayerState(tensors)}, meta_at(1))
    checkpointer.close()
    checkpoint = choose([LocalStore(tmp_path)])
    assert checkpoint is not None
    found = load_layers(checkpoint, ["0"])["0"].parameters
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


def test_the_files_are_plain_safetensors_under_the_models_own_names(tmp_path: Path) -> None:
    saved(tmp_path, 3)
    found = safetensors.torch.load_file(tmp_path / "step-00000003-a0" / "p0.s0.2.weights.safetensors")
    assert torch.equal(found["2.weight"], numbered(3)["2"].parameters["2.weight"])


def test_training_may_change_its_tensors_while_they_are_written(tmp_path: Path) -> None:
    gate = threading.Event()
    store = Faulty(LocalStore(tmp_path), lambda name, done: gate.wait(120) and None)
    checkpointer = Checkpointer(store, "w", LAYERS)
    states = numbered(5)
    checkpointer.save(5, states, meta_at(5))
    assert not checkpointer.wait(timeout_s=0.05)
    for state in states.values():
        for tensor in state.parameters.values():
            tensor.zero_()
    assert choose([store]) is None
    gate.set()
    checkpointer.close()
    checkpoint = choose([store])
    assert checkpoint is not None
    assert same(load_layers(checkpoint, LAYERS), numbered(5))


def test_a_second_save_waits_for_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, wait = threading.Event(), Checkpointer.wait

    def waits(checkpointer: Checkpointer, timeout_s: float | None = None) -> bool:
        threading.Timer(0.1, gate.set).start()
        return wait(checkpointer, timeout_s)

    slow = Faulty(LocalStore(tmp_path), lambda name, done: gate.wait(120) and None)
    written: list[SaveId] = []
    checkpointer = Checkpointer(slow, "w", LAYERS, on_written=written.append)
    checkpointer.save(1, numbered(1), meta_at(1))
    monkeypatch.setattr(Checkpointer, "wait", waits)
    checkpointer.save(2, numbered(2), meta_at(2))
    assert written[:1] == [SaveId(0, 1)]
    checkpointer.close()
    assert written == [SaveId(0, 1), SaveId(0, 2)]


def test_a_layer_missing_anywhere_means_no_checkpoint(tmp_path: Path) -> None:
    told: Told = []
    store = saved(tmp_path, 1)
    half = Checkpointer(store, "p0.s0", LAYERS)
    half.save(2, numbered(2, LAYERS[:3]), meta_at(2))
    half.close()
    checkpoint = choose([store], report=told.append)
    assert checkpoint is not None
    assert checkpoint.step == 1
    assert "step 2 (attempt 0) is incomplete and skipped: no layer 3, 4, 5 in any store" in told[0]
    with pytest.raises(AtlasError, match="no complete checkpoint of step 2"):
        choose([store], step=2, report=told.append)
    assert choose([LocalStore(tmp_path / "none")]) is None


def test_a_damaged_file_is_named_and_never_loaded(tmp_path: Path) -> None:
    store = saved(tmp_path, 1, 2)
    path = tmp_path / "step-00000002-a0" / "p0.s0.3.optimizer.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    checkpoint = choose([store])
    assert checkpoint is not None
    assert same(load_layers(checkpoint, ["2"]), numbered(2, ["2"]))
    with pytest.raises(AtlasError, match=r"p0\.s0\.3\.optimizer\.safetensors: damaged.*replica.*an earlier one"):
        load_layers(checkpoint, ["3"])
    assert len(verify(checkpoint)) == 1


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b"\x80\x81", b'{"format": "atlas-checkpoint-part"}'])
def test_a_damaged_manifest_is_an_error(tmp_path: Path, content: bytes) -> None:
    store = saved(tmp_path, 1, 2)
    (tmp_path / "step-00000002-a0" / "p0.s0.part.json").write_bytes(content)
    with pytest.raises(AtlasError, match=r"step-00000002-a0/p0\.s0\.part\.json: not a complete checkpoint manifest"):
        choose([store])


def test_a_manifest_changed_by_hand_is_refused(tmp_path: Path) -> None:
    store = saved(tmp_path, 1)
    path = tmp_path / "step-00000001-a0" / "p0.s0.part.json"
    path.write_text(path.read_text().replace('"samples_seen":4', '"samples_seen":5'))
    with pytest.raises(AtlasError, match="checksum does not match"):
        choose([store])


def test_a_store_is_never_left(tmp_path: Path) -> None:
    for name in ("../x", "/etc/passwd", "a/../../x", ""):
        with pytest.raises(OSError, match="outside"):
            LocalStore(tmp_path).open(name)
    (tmp_path.parent / "beside").write_text("")
    for prefix in ("../", "a/../../", "/etc/"):
        with pytest.raises(OSError, match="outside"):
            LocalStore(tmp_path).names(prefix)


def test_only_the_folder_of_a_prefix_is_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the time of a save grows with the square of the number of saves that are kept."""
    store, walked = saved(tmp_path, 10, 20, 30), list[str]()
    every, walk = store.names(), os.walk
    monkeypatch.setattr(os, "walk", lambda top: walked.append(os.path.relpath(top, tmp_path)) or walk(top))
    for prefix in ("", "step-", "step-00000020-a0/", "step-00000020-a0/p0.s0.", "step-00000099-a0/"):
        assert store.names(prefix) == [name for name in every if name.startswith(prefix)]
    assert walked == [".", ".", "step-00000020-a0", "step-00000020-a0", "step-00000099-a0"]


def test_fewer_saves_than_are_kept_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = saved(tmp_path, 10, 20)
    monkeypatch.setattr(LocalStore, "open", lambda *_: pytest.fail("read"))
    assert Retention(3).prune(store) == []


def test_other_models_data_or_settings_are_refused_by_name() -> None:
    meta_at(1).require_same_run({"width": 8}, "d" * 64)
    with pytest.raises(AtlasError, match="saved with width = 8, this run has 16"):
        meta_at(1).require_same_run({"width": 16}, "d" * 64)
    with pytest.raises(AtlasError, match="other data"):
        meta_at(1).require_same_run({"width": 8}, "e" * 64)


def test_a_later_attempt_counts_more_than_a_later_step(tmp_path: Path) -> None:
    store = saved(tmp_path, 10, 20, 30)
    assert next_attempt([store]) == 1
    saved(tmp_path, 15, attempt=1)  # went back to 10 on purpose
    checkpoint = choose([store])
    assert checkpoint is not None
    assert checkpoint.id == SaveId(attempt=1, step=15)


def test_the_last_n_are_kept_and_leftovers_go_with_them(tmp_path: Path) -> None:
    checkpointer = Checkpointer(LocalStore(tmp_path), "w", LAYERS, retention=Retention(keep=2))
    for step in range(1, 6):
        checkpointer.save(step, numbered(step), meta_at(step))
        checkpointer.wait()
        (tmp_path / f"step-{step:08}-a0" / ".w.0.weights.safetensors.123.456.part").write_bytes(b"killed")
    checkpointer.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000004-a0", "step-00000005-a0"]


def test_one_process_of_a_store_deletes_for_all(tmp_path: Path) -> None:
    store = saved(tmp_path, 10, 20, 30)
    assert Retention(1, prunes=False).prune(store) == []
    assert [id.step for id in Retention(1).prune(store)] == [10, 20]


def test_a_worker_deletes_only_confirmed_old_saves(tmp_path: Path) -> None:
    """Its peer may have failed to write: then the old checkpoint is the only one."""
    retention = Retention(keep=1)
    checkpointer = Checkpointer(LocalStore(tmp_path), "w", LAYERS, retention=retention)
    for step in (1, 2, 3):
        checkpointer.save(step, numbered(step, LAYERS[:3]), meta_at(step))
    checkpointer.wait()
    assert len(list(tmp_path.iterdir())) == 3
    retention.confirm(SaveId(0, 2))
    checkpointer.save(4, numbered(4, LAYERS[:3]), meta_at(4))
    checkpointer.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"step-{step:08}-a0" for step in (2, 3, 4)]


def test_a_full_disk_is_reported_and_training_continues(tmp_path: Path) -> None:
    told: Told = []
    full = False

    def disk(name: str, done: int) -> None:
        if full and "4.weights" in name and done:
            raise OSError(errno.ENOSPC, "No space left on device")

    store = Faulty(LocalStore(tmp_path), disk)
    checkpointer = Checkpointer(store, "w", LAYERS, report=told.append)
    checkpointer.save(1, numbered(1), meta_at(1))
    checkpointer.wait()
    full = True
    checkpointer.save(2, numbered(2), meta_at(2))
    checkpointer.wait()
    assert checkpointer.failed == {SaveId(0, 2): "No space left on device"}
    assert "step 2 (attempt 0) not written by w" in told[0]
    assert "its last checkpoint is of step 1 (attempt 0). Training continues" in told[0]
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001-a0"], "the failed save gave its space back"
    full = False
    checkpointer.save(3, numbered(3), meta_at(3))
    checkpointer.close()
    for step in (1, 3):
        checkpoint = choose_verified([store], step=step)
        assert checkpoint is not None
        assert same(load_layers(checkpoint, LAYERS), numbered(step))


def test_a_bug_in_the_writing_thread_is_not_lost(tmp_path: Path) -> None:
    def bug(name: str, done: int) -> None:
        raise ZeroDivisionError

    checkpointer = Checkpointer(Faulty(LocalStore(tmp_path), bug), "w", LAYERS)
    checkpointer.save(1, numbered(1), meta_at(1))
    with pytest.raises(ZeroDivisionError):
        checkpointer.wait()
