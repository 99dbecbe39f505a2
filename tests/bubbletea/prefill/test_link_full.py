"""A worker whose service reads slowly keeps no more than a bounded heap of keys and values."""

from __future__ import annotations

import socket
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from prefill_samples import LLAMA

from bubbletea.prefill import link as module
from bubbletea.prefill.job import Piece, Task
from bubbletea.prefill.link import Link
from bubbletea.prefill.shard import Served


def test_a_service_that_does_not_read_makes_the_link_full(monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = socket.socketpair()
    monkeypatch.setattr(module, "dial", lambda address: here)
    monkeypatch.setattr(module, "greet", lambda sock, token, who: {"now_ns": time.monotonic_ns(), "order": {}})
    monkeypatch.setattr(module, "MAX_PENDING_BYTES", 1 << 20)
    link, served = Link("unix:nobody", "token", {}), Served(LLAMA)
    shard, changed = SimpleNamespace(served=served), threading.Event()
    link.serve(SimpleNamespace(shard=shard, changed=changed, cancel_all=lambda: None))  # type: ignore[arg-type]
    task, num = Task(1, 0, 4096, 0, (4096,), 0, 0), 4096
    kv = torch.zeros(2, LLAMA.num_kv_heads, num, LLAMA.head_width)
    assert kv.nbytes == num * served.kv_bytes_per_layer_token
    assert not link.is_full
    for layer in range(4):
        link.kv(task, Piece(0, 0, num, layer), lambda: kv)
    assert link.is_full
    read, deadline = 0, time.monotonic() + 10
    there.settimeout(0.2)
    while link.is_full and time.monotonic() < deadline:
        read += len(there.recv(1 << 20))
    assert not link.is_full
    assert read > 2 * kv.nbytes
    link.close()
    there.close()
