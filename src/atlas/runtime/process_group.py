"""The torch.distributed backend `atlas`: point-to-point over the WAN transport, collectives by an inner Gloo group.

    import atlas.runtime.process_group  # registers it
    torch.distributed.init_process_group("atlas", ...)

Existing pipeline code crosses datacenters by changing the name of its backend. Messages between two ranks match by tag
and order; they use many streams, encrypted outside trusted networks. A send is done when its tensor may change again:
it is copied, so that no caller waits for a round trip. A failure raises in `wait()` and in every later operation. Knows
tensors and ranks, no Programs.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections import Counter
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store, Work

from atlas.errors import WorkerError
from atlas.wan.security.credentials import Credentials, Security
from atlas.wan.transport.base import Address, Handle, Key
from atlas.wan.transport.endpoint import Endpoint
from atlas.wan.transport.settings import TransportSettings

NAME = "atlas"
COPIED_BYTES = 256 << 20
"""Limit of copied sends that peers have not acknowledged. A send beyond it waits for its acknowledgement."""
COLLECTIVES = [
    "allreduce",
    "allreduce_coalesced",
    "broadcast",
    "allgather",
    "allgather_coalesced",
    "_allgather_base",
    "allgather_into_tensor_coalesced",
    "reduce_scatter",
    "_reduce_scatter_base",
    "reduce_scatter_tensor_coalesced",
    "reduce",
    "gather",
    "scatter",
    "alltoall",
    "alltoall_base",
    "barrier",
    "monitored_barrier",
]


@dataclass(frozen=True)
class Options:
    """Settings of this process. By default from the environment, beside MASTER_ADDR and RANK."""

    node: str = ""
    """`datacenter/worker`, as in the certificate. ATLAS_NODE; else `local/<rank>`."""
    host: str = ""
    """The address that peers connect to. ATLAS_HOST; else loopback."""
    certificates: Path | None = None
    """The folder of `atlas wan certs`. ATLAS_CERTS; without it, only trusted networks can be reached."""
    trusted_networks: tuple[str, ...] | None = None
    """Where bytes may travel unencrypted. ATLAS_TRUSTED_NETWORKS, separated by commas."""
    epoch: int = 0
    """The attempt of the group. TORCHELASTIC_RESTART_COUNT."""
    settings: TransportSettings = field(default_factory=TransportSettings)

    @classmethod
    def from_environment(cls, rank: int) -> Options:
        get, networks = os.environ.get, os.environ.get("ATLAS_TRUSTED_NETWORKS")
        folder = get("ATLAS_CERTS")
        return cls(
            node=get("ATLAS_NODE") or f"local/{rank}",
            host=get("ATLAS_HOST") or "127.0.0.1",
            certificates=Path(folder) if folder else None,
            trusted_networks=tuple(networks.split(",")) if networks else None,
            epoch=int(get("TORCHELASTIC_RESTART_COUNT") or 0),
        )

    @property
    def security(self) -> Security:
        credentials = Credentials.of_folder(self.certificates, self.node) if self.certificates else None
        return Security(credentials, self.trusted_networks)


_options: Options | None = None


def configure(options: Options | None) -> None:
    """Set the options of groups that this process creates from now on; None: from the environment."""
    global _options
    _options = options


class Transfer(Work):
    """A send or a receive. Not built from a future: such a Work treats a failed future as a success."""

    def __init__(self, handle: Handle, timeout: timedelta, target: Tensor | None = None, landing: Tensor | None = None):
        super().__init__()
        self._handle, self._timeout, self._target, self._landing = handle, timeout, target, landing
        self._lock = threading.Lock()

    def wait(self, timeout: timedelta | None = None) -> bool:
        limit = timeout if timeout else self._timeout
        self._handle.wait(limit.total_seconds())
        self._land()
        return True

    def is_completed(self) -> bool:
        return self._handle.done

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def exception(self) -> Any:
        return self._handle.error

    def synchronize(self) -> None:
        self.wait()

    def result(self) -> list[Tensor]:
        self.wait()
        return [self._target] if self._target is not None else []

    def get_future(self) -> Any:
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future()

        def settle() -> None:
            try:
                future.set_result(self.result())
            except Exception as error:  # possibly on the transport's thread: reported through the future
                future.set_exception(error)  # type: ignore[arg-type]

        if self.is_completed():
            settle()
        else:
            self._handle.on_done(lambda _: settle())
        return future

    def _land(self) -> None:
        """Copy a receive that could not go directly into its tensor, once."""
        with self._lock:
            if self._landing is not None and self._target is not None:
                self._target.detach().copy_(self._landing)  # it may require a gradient
                self._landing = None


class CopiedSend(Transfer):
    """Done at once unless there was an error: the bytes are copied and will be delivered."""

    def __init__(self, handle: Handle, timeout: timedelta, group: AtlasProcessGroup) -> None:
        super().__init__(handle, timeout)
        self._group = group

    def wait(self, timeout: timedelta | None = None) -> bool:
        failure = self.exception()
        if failure is not None:
            raise failure
        return True

    def is_completed(self) -> bool:
        return True

    def exception(self) -> Any:
        return self._handle.error or self._group.errored()


class AtlasProcessGroup(dist.ProcessGroup):
    """The process group. Ranks exchange addresses over the store; channels open when first used."""

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta, options: Options) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._rank, self._size, self._timeout, self._options = rank, size, timeout, options
        self._store, self._inner = store, dist.ProcessGroupGloo(PrefixStore("gloo", store), rank, size, timeout)
        self._endpoint = Endpoint(
            options.node, (options.host, 0), epoch=options.epoch, security=options.security, settings=options.settings
        )
        self._lock = threading.Lock()
        self._peers: dict[int, tuple[str, Address]] = {}
        self._num_sent, self._num_received = Counter[tuple[int, int]](), Counter[tuple[int, int]]()
        self._failure: WorkerError | None = None
        self._copied_bytes = 0
        self._connected: set[str] = set()
        store.set(f"atlas/{rank}", json.dumps([options.node, *self._endpoint.address]))

    # ---- point to point ----------------------------------------------------------------------------------------
    def send(self, tensors: list[Tensor], dstRank: int, tag: int = 0) -> Transfer:  # noqa: N803
        (tensor,) = tensors
        peer, address = self._peer(dstRank)
        self._connect(peer, address)
        num_bytes = tensor.numel() * tensor.element_size()
        with self._lock:
            number = self._num_sent[dstRank, tag]
            self._num_sent[dstRank, tag] += 1
            copies = self._copied_bytes + num_bytes <= COPIED_BYTES
            self._copied_bytes += num_bytes if copies else 0
        host = tensor.detach().contiguous().cpu()
        data = _bytes_of(host.clone() if copies and host.data_ptr() == tensor.data_ptr() else host).numpy()
        what = f"rank {self._rank} sends {num_bytes} bytes (tag {tag}, message {number}) to rank {dstRank}"
        handle = self._endpoint.send(Key(peer, 0, (tag, number, 0, 0)), data, number, what)
        if not copies:
            return self._watched(handle)
        handle.on_done(lambda _: self._delivered(num_bytes))
        handle.on_done(self._note)
        return CopiedSend(handle, self._timeout, self)

    def _connect(self, peer: str, address: Address) -> None:
        """Warm up the path before the first message to a peer: a burst on a cold path is far slower."""
        with self._lock:
            if peer in self._connected or self._failure is not None:
                self._endpoint.open(peer, 0, address)
                return
            self._connected.add(peer)
            channel = self._endpoint.open(peer, 0, address)
        with contextlib.suppress(WorkerError):  # the message itself will fail, with a better error
            self._endpoint.warm_up([channel], self._options.settings.deadline_s)

    def _delivered(self, num_bytes: int) -> None:
        with self._lock:
            self._copied_bytes -= num_bytes

    def recv(self, tensors: list[Tensor], srcRank: int, tag: int = 0) -> Transfer:  # noqa: N803
        (tensor,) = tensors
        peer, _ = self._peer(srcRank)
        direct = tensor.device.type == "cpu" and tensor.is_contiguous()
        landing = tensor.detach() if direct else torch.empty(tensor.shape, dtype=tensor.dtype)
        with self._lock:
            number = self._num_received[srcRank, tag]
            self._num_received[srcRank, tag] += 1
        what = f"rank {self._rank} waits for message {number} (tag {tag}) of rank {srcRank}"
        handle = self._endpoint.recv(Key(peer, 0, (tag, number, 0, 0)), _bytes_of(landing).numpy(), what)
        return self._watched(handle, tensor, None if direct else landing)

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> Transfer:
        raise NotImplementedError("the atlas backend receives from a named rank: pass src=")

    def warm_up(self, ranks: list[int]) -> None:
        """Open and warm up the paths to these ranks, so that the first step is not slower."""
        for rank in ranks:
            self._connect(*self._peer(rank))

    def _watched(self, handle: Handle, target: Tensor | None = None, landing: Tensor | None = None) -> Transfer:
        handle.on_done(self._note)
        return Transfer(handle, self._timeout, target, landing)

    def _note(self, handle: Handle) -> None:
        self._failure = self._failure or handle.error

    def _peer(self, rank: int) -> tuple[str, Address]:
        if rank not in self._peers:
            node, host, port = json.loads(self._store.get(f"atlas/{rank}"))
            self._peers[rank] = (node, (host, port))
        return self._peers[rank]

    # ---- the rest of a group -----------------------------------------------------------------------------------
    def errored(self) -> WorkerError | None:
        """The first failure, if any: then leave this group and create another, in a new epoch."""
        return self._failure

    def abort(self) -> None:
        self._endpoint.close(0.0)

    def shutdown(self) -> None:
        self._endpoint.close()

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank

    def getBackendName(self) -> str:  # noqa: N802
        return NAME

    def __repr__(self) -> str:
        return f"AtlasProcessGroup(rank {self._rank} of {self._size}, {self._options.node})"


def _delegate(name: str) -> Any:
    def collective(self: AtlasProcessGroup, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._inner, name)(*args, **kwargs)

    collective.__name__ = name
    return collective


for _name in COLLECTIVES:
    setattr(AtlasProcessGroup, _name, _delegate(_name))


def _bytes_of(tensor: Tensor) -> Tensor:
    """Flat, as bytes: numpy has no bfloat16."""
    return tensor.reshape(-1).view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8)


def _create(store: Store, rank: int, size: int, timeout: timedelta) -> AtlasProcessGroup:
    return AtlasProcessGroup(store, rank, size, timeout, _options or Options.from_environment(rank))


def register() -> None:
    """Register `backend="atlas"`; a second call changes nothing."""
    if NAME.upper() not in dist.Backend.__dict__:
        dist.Backend.register_backend(NAME, _create, devices=["cpu", "cuda"])


register()
