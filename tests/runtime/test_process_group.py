"""The torch backend `atlas`: what torch code expects of a process group, and errors that surface."""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import os
import queue
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from atlas.errors import WorkerError
from atlas.runtime import process_group
from atlas.runtime.process_group import Options
from atlas.wan.transport.settings import TransportSettings

PATIENT = TransportSettings(max_streams=2, deadline_s=60.0)
HASTY = TransportSettings(max_streams=2, deadline_s=1.0, stall_s=1.0)
"""Of a rank whose peer dies."""
CONTEXT = mp.get_context("forkserver")
"""Children of this process itself would inherit locks that threads of earlier tests hold, and hang."""
CONTEXT.set_forkserver_preload(["torch.distributed", "atlas.runtime.process_group"])


def _child(rank: int, size: int, file: str, options: Options | None, body: Callable[[int], Any], out: Any) -> None:
    try:
        torch.set_num_threads(1)
        process_group.configure(options or Options(node=f"dc{rank}/w", host="127.0.0.1", settings=PATIENT))
        dist.init_process_group(
            "atlas", init_method=f"file://{file}", rank=rank, world_size=size, timeout=timedelta(seconds=120)
        )
        out.put((rank, body(rank)))
        if dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()
    except BaseException:
        out.put((rank, traceback.format_exc()))


def run_group(size: int, tmp_path: Path, body: Callable[[int], Any], options: list[Options] | None = None) -> list[Any]:
    out = CONTEXT.Queue()
    file = str(tmp_path / "store")
    children = [
        CONTEXT.Process(target=_child, args=(r, size, file, options[r] if options else None, body, out))
        for r in range(size)
    ]
    for child in children:
        child.start()
    found = dict[int, Any]()
    for _ in children:
        with contextlib.suppress(queue.Empty):
            found.update([out.get(timeout=120)])
    assert len(found) == size, f"only some ranks ended: {found}"
    for child in children:
        child.join(120)
        assert child.exitcode == 0
    return [found[rank] for rank in range(size)]


def _send_and_receive(rank: int) -> Any:
    peer = 1 - rank
    mine = torch.arange(50_000, dtype=torch.bfloat16) * (rank + 1)
    got, strided = torch.empty(50_000, dtype=torch.bfloat16), torch.zeros(10, 4, requires_grad=True)
    requests = [dist.isend(mine, peer), dist.irecv(got, peer)]
    for request in requests:
        request.wait()
    dist.isend(torch.ones(10, 2), peer, tag=7)
    dist.recv(strided[:, ::2], peer, tag=7)
    first, second = torch.zeros(1), torch.zeros(1)
    dist.send(torch.tensor([1.0]), peer, tag=1)
    dist.send(torch.tensor([2.0]), peer, tag=2)
    dist.recv(second, peer, tag=2)
    dist.recv(first, peer, tag=1)
    objects: list[Any] = [None]
    if rank == 0:
        dist.send_object_list([{"a": 1}], 1)
    else:
        dist.recv_object_list(objects, 0)
    batch = [dist.P2POp(dist.isend, mine, peer), dist.P2POp(dist.irecv, got, peer)]
    for request in dist.batch_isend_irecv(batch):
        request.wait()
    total = torch.ones(3)
    dist.all_reduce(total)
    return (
        torch.equal(got * (rank + 1), mine * (peer + 1)),
        strided.sum().item(),
        first.item(),
        second.item(),
        objects,
        total.tolist(),
    )


def test_sends_receives_tags_batches_objects_and_collectives(tmp_path: Path) -> None:
    one, two = run_group(2, tmp_path, _send_and_receive)
    assert one == (True, 20.0, 1.0, 2.0, [None], [2.0] * 3)
    assert two == (True, 20.0, 1.0, 2.0, [{"a": 1}], [2.0] * 3)


def _peer_dies(rank: int) -> Any:
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.wait(["initialized"])  # or rank 0 would fail while it connects
        os._exit(0)
    store.set("initialized", "")
    tensor = torch.zeros(1000)
    request = dist.irecv(tensor, 1)
    with pytest.raises(WorkerError) as waiting:
        request.wait()
    with pytest.raises(WorkerError):
        dist.isend(tensor, 1).wait()
    with pytest.raises(WorkerError):
        request.wait()
    assert not request.is_success()
    group: Any = dist.group.WORLD
    assert group.errored() is not None
    os.write(2, b"")
    return str(waiting.value)


def test_a_dead_peer_is_an_error_in_wait_and_stays_one(tmp_path: Path) -> None:
    out = CONTEXT.Queue()
    options = [Options(f"dc{r}/w", "127.0.0.1", settings=HASTY) for r in range(2)]
    args = [(r, 2, str(tmp_path / "store"), options[r], _die_and_leave, out) for r in range(2)]
    children = [CONTEXT.Process(target=_child, args=a) for a in args]
    for child in children:
        child.start()
    rank, message = out.get(timeout=120)
    assert rank == 0
    assert "rank 0 waits for message 0 (tag 0) of rank 1" in message
    assert "dc1/w" in message
    for child in children:
        child.join(120)


def _die_and_leave(rank: int) -> Any:
    message = _peer_dies(rank)
    group: Any = dist.group.WORLD
    group.abort()
    dist.destroy_process_group()
    return message


def _twice(rank: int) -> Any:
    pair = dist.new_group([0, 1], backend="atlas")
    tensor = torch.full((4,), float(rank))
    if rank == 0:
        dist.send(tensor, 1, group=pair)
    elif rank == 1:
        dist.recv(tensor, 0, group=pair)
    return tensor.tolist()


def test_a_second_group_works_beside_the_first(tmp_path: Path) -> None:
    assert run_group(3, tmp_path, _twice) == [[0.0] * 4, [0.0] * 4, [2.0] * 4]


def test_encrypted_between_datacenters(tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    from atlas.wan.security.certs import make_ca, make_node

    make_ca(tmp_path)
    for rank in range(2):
        make_node(tmp_path, f"dc{rank}/w")
    options = [Options(f"dc{r}/w", "127.0.0.1", tmp_path, (), settings=PATIENT) for r in range(2)]
    one, _ = run_group(2, tmp_path, _send_and_receive, options)
    assert one[1:] == (20.0, 1.0, 2.0, [None], [2.0] * 3)
