"""A worker whose service reads slowly keeps no more than a bounded heap of keys and values."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress
from types import SimpleNamespace

import pytest
import torch
from prefill_samples import LLAMA

from bubbletea.frames import receive
from bubbletea.prefill import service_link as module
from bubbletea.prefill.job import PrefillPiece, PrefillTask
from bubbletea.prefill.messages import DONE, FAILED, READY
from bubbletea.prefill.service_link import ServiceLink
from bubbletea.prefill.shard import Served


def test_a_service_that_does_not_read_makes_the_link_full(monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = socket.socketpair()
    monkeypatch.setattr(module, "MAX_PENDING_BYTES", 1 << 20)
    link, served = ServiceLink(here, {"order": {}}), Served(LLAMA)
    shard, changed = SimpleNamespace(served=served), threading.Event()
    link.serve(SimpleNamespace(shard=shard, changed=changed, cancel_all=lambda: None))  # type: ignore[arg-type]
    task, num = PrefillTask(1, 0, 4096, 0, (4096,), 0, 0), 4096
    kv = torch.zeros(2, LLAMA.num_kv_heads, num, LLAMA.head_width)
    assert kv.nbytes == num * served.kv_bytes_per_layer_token
    assert not link.is_full
    for layer in range(4):
        link.kv(task, PrefillPiece(0, 0, num, layer), lambda: kv)
    assert link.is_full
    read, deadline = 0, time.monotonic() + 60
    there.settimeout(0.2)
    while link.is_full and time.monotonic() < deadline:
        with suppress(TimeoutError):  # a busy host
            read += len(there.recv(1 << 20))
    assert not link.is_full
    assert read > 2 * kv.nbytes
    link.close()
    there.close()


def test_a_frame_that_cannot_be_built_fails_only_its_task() -> None:
    here, there = socket.socketpair()
    link, cancelled = ServiceLink(here, {"order": {}}), list[tuple[int, int]]()
    engine = SimpleNamespace(
        shard=SimpleNamespace(served=Served(LLAMA)),
        changed=threading.Event(),
        cancel_all=lambda: None,
        cancel=lambda job, attempt: cancelled.append((job, attempt)),
    )
    link.serve(engine)  # type: ignore[arg-type]
    lost, kept = PrefillTask(1, 0, 16, 0, (16,), 0, 0), PrefillTask(2, 0, 16, 0, (16,), 0, 0)

    def broken() -> torch.Tensor:
        raise RuntimeError("an illegal memory access was encountered")

    link.kv(lost, PrefillPiece(0, 0, 16, 0), broken)
    link.done(kept)
    there.settimeout(60)
    frames = [receive(there) for _ in range(3)]
    by_kind = {frame.kind: frame.fields for frame in frames}
    assert by_kind.keys() == {READY, DONE, FAILED}
    assert by_kind[DONE]["job"] == 2
    assert by_kind[FAILED]["job"] == 1
    assert "illegal memory access" in by_kind[FAILED]["why"]
    assert cancelled == [(1, 0)]
    assert link._queued_bytes == link._sent_bytes, "or the link would be full for good"
    link.close()
    there.close()
