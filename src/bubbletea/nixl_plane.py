"""NIXL as a second way for keys and values, beside the frames' own TCP: the worker registers the memory of its blocks
and names its addresses in frames; the decode engine reads them from there, with whatever NIXL finds between the two
(shared memory, RDMA, TCP), and checks every block as usual.

Handshake, tickets, leases and errors stay in the frames. NIXL does not encrypt: it is used within a host, and between
hosts only where the operator allows it. The package `nixl` is optional; this is the only module that imports it.
"""

from __future__ import annotations

import importlib
import importlib.util
import secrets
import threading
import time
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from atlas.errors import WorkerError

MEMORY = "DRAM"
POLL_S = 0.0002
"""Between two looks at whether a transfer has ended: NIXL has no call that waits."""
Span = tuple[int, int]
"""Address and number of bytes."""


def is_installed() -> bool:
    return importlib.util.find_spec("nixl") is not None


class NixlAgent:
    """One per process; thread-safe."""

    def __init__(self) -> None:
        api = importlib.import_module("nixl._api")
        self._agent: Any = api.nixl_agent(f"bubbletea {secrets.token_hex(8)}", api.nixl_agent_config(backends=["UCX"]))
        self._lock = threading.Lock()

    def register(self, spans: Sequence[Span]) -> Any:
        with self._lock:
            return self._agent.register_memory([(address, size, 0, "") for address, size in spans], MEMORY)

    def deregister(self, registered: Any) -> None:
        with self._lock:
            self._agent.deregister_memory(registered)

    @property
    def about(self) -> bytes:
        """How others reach what is registered now."""
        with self._lock:
            found: bytes = self._agent.get_agent_metadata()
            return found

    def read(self, about: bytes, theirs: Sequence[Span], until_s: float) -> list[memoryview]:
        """The bytes at these addresses of another process; raises WorkerError if they do not come by `until_s`."""
        whole: NDArray[np.uint8] = np.empty(sum(size for _, size in theirs), np.uint8)
        starts = np.cumsum([0, *(size for _, size in theirs)]).tolist()
        ours = [(whole.ctypes.data + start, size) for start, (_, size) in zip(starts, theirs, strict=False)]
        registered = self.register([(whole.ctypes.data, whole.nbytes)])
        try:
            self._transfer(about, ours, theirs, until_s)
        finally:
            self.deregister(registered)
        return [whole.data[start : start + size] for start, (_, size) in zip(starts, theirs, strict=False)]

    def _transfer(self, about: bytes, ours: Sequence[Span], theirs: Sequence[Span], until_s: float) -> None:
        agent = self._agent
        with self._lock:
            name = agent.add_remote_agent(about)
            try:
                here, there = (agent.get_xfer_descs([(*span, 0) for span in side], MEMORY) for side in (ours, theirs))
                handle = agent.initialize_xfer("READ", here, there, name)
                state = agent.transfer(handle)
            except Exception:
                agent.remove_remote_agent(name)
                raise
        try:
            while state == "PROC" and time.monotonic() < until_s:
                time.sleep(POLL_S)
                with self._lock:
                    state = agent.check_xfer_state(handle)
        finally:
            with self._lock:
                agent.release_xfer_handle(handle)
                agent.remove_remote_agent(name)
        if state != "DONE":
            raise WorkerError("NIXL did not finish reading in time" if state == "PROC" else f"NIXL failed: {state}")


@cache
def own_agent() -> NixlAgent:
    return NixlAgent()


class Offer(NamedTuple):
    """Blocks that another process may read until `close`."""

    about: bytes
    spans: list[Span]
    payloads: list[memoryview]
    """Keeps their memory."""
    registered: Any

    def close(self) -> None:
        own_agent().deregister(self.registered)


def offer(payloads: Sequence[memoryview]) -> Offer:
    spans = [(np.frombuffer(payload, np.uint8).ctypes.data, len(payload)) for payload in payloads]
    agent = own_agent()
    registered = agent.register(spans)
    return Offer(agent.about, spans, list(payloads), registered)
