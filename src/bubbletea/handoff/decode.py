"""The embedded decode engine: the whole served model in the service's process, on its own thread. It continues from the
keys and values of prefill and computes one token of each running request in turn, so that all of them stream.

For demos, tests and small models; a separate decode engine fetches keys and values from `kv_server`.
Knows parcels and logits; not requests, text or HTTP.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from atlas.runtime.models.block import KvSlab
from atlas.runtime.models.decoder import Decoder, LayerRange, build
from atlas.runtime.models.generate import run_cut
from atlas.runtime.models.weights import load
from bubbletea.handoff.sampling import Sampling, choose
from bubbletea.prefill.shard import Served

OnToken = Callable[[int, str | None], None]
"""The next token, and why it was the last: "stop", "length" or, if there are more, None. FAILED if none came."""
FAILED = (-1, "failed")
NARROW = 1024
"""Models up to this width are decoded with one CPU thread: several threads would mostly wait for each other on a busy
host."""
log = logging.getLogger("bubbletea.decode")


@dataclass
class _DecodeRun:
    cache: dict[int, KvSlab]
    prompt: Sequence[int]
    length: int
    """Tokens with computed keys and values."""
    logits_V: Tensor  # noqa: N815
    sampling: Sampling
    on_token: OnToken
    generator: torch.Generator
    output: list[int] = field(default_factory=list)
    cancelled: threading.Event = field(default_factory=threading.Event)


class DecodeEngine:
    """`submit` from any thread; `on_token` is called on the engine's."""

    def __init__(self, served: Served) -> None:
        self.served = served
        self._num_threads = 1 if served.config.width <= NARROW else torch.get_num_threads()
        self._decoder = load_whole(served)
        self._new: queue.SimpleQueue[_DecodeRun | None] = queue.SimpleQueue()
        self._running: deque[_DecodeRun] = deque()
        self._thread = threading.Thread(target=self._loop, daemon=True, name="bubbletea decode")
        self._thread.start()

    @property
    def thread_id(self) -> int:
        """The kernel's."""
        return self._thread.native_id or 0

    def submit(
        self,
        cache: dict[int, KvSlab],
        prompt: Sequence[int],
        logits_V: Tensor,  # noqa: N803
        sampling: Sampling,
        on_token: OnToken,
    ) -> Callable[[], None]:
        """Decodes after a prompt whose last logits are given. Returns a function that cancels it."""
        running = _DecodeRun(cache, prompt, len(prompt), logits_V, sampling, on_token, sampling.generator())
        self._new.put(running)
        return running.cancelled.set

    def close(self) -> None:
        self._new.put(None)
        self._thread.join()

    def _loop(self) -> None:
        torch.set_num_threads(self._num_threads)
        while True:
            while not self._running or not self._new.empty():
                running = self._new.get()
                if running is None:
                    return
                self._running.append(running)
            running = self._running.popleft()
            if not running.cancelled.is_set() and self._stepped(running):
                self._running.append(running)

    def _stepped(self, running: _DecodeRun) -> bool:
        """An error of one request must not end the thread."""
        try:
            return self._step(running)
        except Exception:
            log.exception("a request could not be decoded")
            running.on_token(*FAILED)
            return False

    def _step(self, running: _DecodeRun) -> bool:
        """Computes one token; returns whether there are more."""
        if running.output:
            token = torch.tensor([[running.output[-1]]])
            running.logits_V = run_cut(self._decoder, token, running.length, dict(running.cache))[0]
            running.length += 1
        chosen = choose(running.logits_V, running.sampling, running.generator, running.prompt, running.output)
        running.output.append(chosen)
        why = self._why_last(running, chosen)
        running.on_token(chosen, why)
        return why is None

    def _why_last(self, running: _DecodeRun, token: int) -> str | None:
        sampling, count = running.sampling, len(running.output)
        if token in sampling.stop_tokens and count > sampling.min_tokens:
            return "stop"
        full = running.length + 1 >= self.served.config.max_length
        return "length" if full or count >= sampling.max_tokens else None


def load_whole(served: Served) -> Decoder:
    cut = LayerRange.whole(served.config)
    if served.folder is None:
        return build(served.config, cut, seed=served.seed, dtype=served.torch_dtype).eval()
    return load(served.config, cut, served.folder, dtype=served.torch_dtype).eval()
