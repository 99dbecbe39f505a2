"""The last part of the demo: BubbleTea in the workers of a training run. A client sends prompts over HTTP and prints
the streamed responses; background prompts use the remaining bubbles.

The model is tiny, and learnt one text by heart (`train_tiny.py`): it continues with sentences of that text.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import random
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from itertools import chain

from rich.console import Console

from atlas.cost.table import Costs
from atlas.errors import AtlasError
from atlas.ir.assemble import repeated
from atlas.ir.program import Program
from atlas.launch.emulate import Emulation, EmulationSettings
from atlas.runtime.assignment import FillerChoice
from atlas.sim import simulate
from bubbletea.costs import LayerTime
from bubbletea.prefill.shard import TINY, Served
from bubbletea.serve.assemble import AssembledService, ServiceSettings, assemble
from bubbletea.serve.auth import ApiKeys
from bubbletea.serve.http import HttpServer
from bubbletea.serve.run import ListenSettings, run
from bubbletea.serve.worker_windows import of_training

PROMPTS = ("The sea was calm, and", "We the People of", "Four score and seven years ago")
WAITING = 6
"""Background prompts that are always queued."""
PIECE_NS = 10_000_000
ARENA_BYTES = 64 << 20


@dataclass
class Client:
    """What the client measures."""

    first_s: list[float] = field(default_factory=list)
    """Seconds to the first token of each prompt."""
    printing: threading.Lock = field(default_factory=threading.Lock)
    """Held while a response is printed."""
    lines: deque[str] = field(default_factory=deque)
    """Lines about training that are not printed yet."""

    def say(self, line: str, console: Console) -> None:
        """Print a line about training, or leave it until the response that is being printed ends. Never waits."""
        self.lines.append(line)
        if self.printing.acquire(blocking=False):
            self.flush(console)
            self.printing.release()

    def flush(self, console: Console) -> None:
        while self.lines:
            console.print(self.lines.popleft())


class _OpenRequests:
    """Open requests."""

    def __init__(self) -> None:
        self._lock, self._over = threading.Lock(), False
        self._sockets: set[socket.socket] = set()

    def begin(self, sock: socket.socket) -> None:
        with self._lock:
            if self._over:
                raise AtlasError("training is over")
            self._sockets.add(sock)

    def end(self, sock: socket.socket) -> None:
        with self._lock:
            self._sockets.discard(sock)

    def cancel(self) -> None:
        with self._lock:
            self._over = True
            for sock in self._sockets:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)


class _Training(AbstractContextManager[object]):
    """A run in a thread whose workers connect to the service."""

    def __init__(self, train: Callable[[], Emulation]) -> None:
        self.result: list[Emulation] = []
        self.error: list[BaseException] = []
        self.thread = threading.Thread(target=self._run, args=(train,), daemon=True)
        self.thread.start()

    def _run(self, train: Callable[[], Emulation]) -> None:
        try:
            self.result.append(train())
        except BaseException as error:
            self.error.append(error)

    def __exit__(self, *_: object) -> None:
        pass  # on an interrupt its workers end with this process


def train_and_serve(
    client: Client,
    program: Program,
    costs: Costs,
    setup: EmulationSettings,
    train: Callable[[EmulationSettings], Emulation],
    console: Console,
) -> Emulation:
    """Train with the service beside it, and send prompts until training ends."""
    ground = of_training(
        simulate(repeated(program, 4), costs), ARENA_BYTES, LayerTime(PIECE_NS, 0.0, 0.0, 0.0), PIECE_NS
    )
    settings = ServiceSettings("tiny", Served.of_folder(TINY), split=2, chunk=128, arena_bytes=ARENA_BYTES)
    parts = assemble(settings, ground, ApiKeys.open_to_all())
    runs: list[_Training] = []
    requests = _OpenRequests()

    def workers(address: str, token_file: str) -> _Training:
        filler = FillerChoice("bubbletea", {"address": address, "token_file": token_file})
        names = [program.worker_name(w) for w in range(program.num_workers)]
        filled = replace(setup, fillers=dict.fromkeys(names, filler))
        runs.append(_Training(lambda: train(filled)))
        return runs[0]

    def on_start(server: HttpServer) -> None:
        parts.step_back()  # and the clients, whose threads start here; training has its own
        training = runs[0]
        in_background(_send_prompts, server, parts, training, requests, client, console)
        for number in range(WAITING):
            in_background(_fill, server, training, requests, number)
        in_background(_end, server, training, requests)

    asyncio.run(run(parts, ListenSettings(port=0, drain_s=5), workers, on_start))
    client.flush(console)
    if runs[0].thread.is_alive():
        raise KeyboardInterrupt  # the service was stopped before training ended
    if runs[0].error:
        raise runs[0].error[0]
    return runs[0].result[0]


def in_background(work: Callable[..., None], *args: object) -> None:
    threading.Thread(target=work, args=args, daemon=True).start()


def _end(server: HttpServer, training: _Training, requests: _OpenRequests) -> None:
    """Cancel open requests: the workers that would answer them have ended."""
    training.thread.join()
    requests.cancel()
    server.drain()


def _send_prompts(
    server: HttpServer,
    parts: AssembledService,
    training: _Training,
    requests: _OpenRequests,
    client: Client,
    console: Console,
) -> None:
    """Send one prompt after another, like a user."""
    while training.thread.is_alive() and not parts.dispatcher.planner.num_lanes:
        time.sleep(0.1)
    for prompt in PROMPTS:
        texts = _ask(server, requests, {"prompt": prompt, "max_tokens": 48}, client.first_s)
        try:
            first = next(texts, "")
            with client.printing:
                console.print(f"  [cyan]{prompt}[/cyan] ", end="")
                for text in chain([first], texts):
                    console.print("".join(c if c.isprintable() else "·" for c in text), end="", markup=False)
                console.print()
                client.flush(console)
        except (OSError, http.client.HTTPException, AtlasError) as error:
            client.say(f"  [cyan]{prompt}[/cyan] ... not answered: {error}", console)


def _fill(server: HttpServer, training: _Training, requests: _OpenRequests, number: int) -> None:
    rng = random.Random(number)
    while training.thread.is_alive():
        tokens = [rng.randrange(256) for _ in range(rng.randrange(128, 768))]
        try:
            for _ in _ask(server, requests, {"prompt": tokens, "max_tokens": 1, "priority": "offline"}, []):
                pass
        except (OSError, http.client.HTTPException, AtlasError):
            time.sleep(0.3)


def _ask(server: HttpServer, requests: _OpenRequests, more: dict[str, object], first_s: list[float]) -> Iterator[str]:
    """Print a completion as it streams; records the time of its first token."""
    began, has_begun = time.monotonic(), False
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.connect()
    sock = connection.sock  # released when the response ends
    try:
        requests.begin(sock)
        body = json.dumps({"model": "tiny", "temperature": 0, "ignore_eos": True, "stream": True, **more})
        connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
        answer = connection.getresponse()
        if answer.status != 200:
            raise AtlasError(f"HTTP {answer.status}")
        for line in answer:
            if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                continue
            if not has_begun:
                has_begun = True
                first_s.append(time.monotonic() - began)
            for choice in json.loads(line[6:]).get("choices", []):
                yield choice.get("text", "")
    finally:
        requests.end(sock)
        connection.close()
