"""A worker joins a service that comes late, loses it, and joins the next one: at another address, with another model,
with certificates. What cannot work is refused with one sentence, and training continues."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from prefill_samples import LLAMA, greedy_alone, whole
from serving import MIB, PERIOD_S, TINY, post_patiently

from atlas.callers import MAX_GREETING
from atlas.cli import main as atlas
from atlas.errors import AtlasError, WorkerError
from atlas.ir.assemble import with_optimizer
from atlas.ir.program import Layout
from atlas.runtime.hardware import make_device
from atlas.runtime.waits import Position, SharedDevice, Waits, WorkerFacts
from atlas.schedules.classic import one_f_one_b
from atlas.wan.security.certs import make_ca, make_node
from atlas.wan.security.credentials import Credentials, Security
from bubbletea.prefill import prefill_worker
from bubbletea.prefill.messages import WorkerOrder
from bubbletea.prefill.prefill_worker import PrefillWorker
from bubbletea.prefill.service_files import ServicePlace, announced, find
from bubbletea.prefill.shard import Served
from bubbletea.serve import http
from bubbletea.serve.assemble import ServiceSettings, WorkersAt, assemble
from bubbletea.serve.auth import ApiKeys
from bubbletea.serve.http import HttpServer
from bubbletea.serve.roster import Roster
from bubbletea.serve.run import ListenSettings, run
from bubbletea.serve.worker_windows import alone

PROGRAM = with_optimizer(one_f_one_b(Layout(1, 1, 1, ("here",))))
SETTINGS = replace(TINY, split=1, arena_bytes=32 * MIB)
EXAMPLE = Path(__file__).parents[3] / "examples" / "tiny.yaml"


@contextmanager
def training(folder: Path, security: Security | None = None) -> Iterator[PrefillWorker]:
    """A worker that waits all the time, as `atlas train --filler bubbletea` has it."""
    filler, over = PrefillWorker({"folder": str(folder), "memory_mib": 32}), threading.Event()
    facts = WorkerFacts(
        "p0.s0", "here", 0, PROGRAM, (), np.zeros((1, 1), np.int64), "plan", security=security or Security()
    )
    filler.attach(facts, SharedDevice(make_device("cpu"), lambda span: None))

    def work() -> None:
        step = time.monotonic_ns() // int(PERIOD_S * 1e9)
        while not over.is_set():
            end_ns, began_ns, step = time.monotonic_ns() + int(PERIOD_S * 1e9), time.monotonic_ns(), step + 1
            filler.fill(Position(step, 0), lambda end_ns=end_ns: time.monotonic_ns() >= end_ns)  # type: ignore[misc]
            over.wait(max(0, end_ns - time.monotonic_ns()) / 1e9)
            filler.waited(Position(step, 0), began_ns, end_ns)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield filler
    finally:
        over.set()
        thread.join()
        filler.close()


@contextmanager
def service(folder: Path, settings: ServiceSettings = SETTINGS, security: Security | None = None) -> Iterator[str]:
    windows = replace(alone(1, settings.arena_bytes, PERIOD_S), plan="plan", device="cpu")
    parts, started, found = assemble(settings, windows, ApiKeys.open_to_all()), threading.Event(), list[HttpServer]()

    def on_start(server: HttpServer) -> None:
        found.append(server)
        started.set()

    def announce(address: str, token_file: str):  # type: ignore[no-untyped-def]
        return announced(folder, "here", ServicePlace(address, parts.token, security is not None))

    where = ListenSettings(port=0, drain_s=0.1, workers=WorkersAt(security=security))
    thread = threading.Thread(target=lambda: asyncio.run(run(parts, where, announce, on_start)))
    thread.start()
    assert started.wait(120)
    try:
        yield f"http://127.0.0.1:{found[0].port}"
    finally:
        found[0].drain()
        thread.join(120)


def answer(url: str) -> list[str]:
    body = {"model": "tiny", "prompt": list(range(40)), "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    return [post_patiently(f"{url}/v1/completions", json=body).json()["choices"][0]["text"]]


HAND_OFF = {"kv_transfer_params": {"do_remote_decode": True}}


def expected(settings: ServiceSettings) -> list[str]:
    from bubbletea.serve.tokens import ServedTokenizer

    return [ServedTokenizer.of_bytes().decode(greedy_alone(whole(settings.served), list(range(40)), 4))]


def test_a_service_comes_late_leaves_and_another_one_comes_with_certificates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill_worker, "AGAIN_S", 0.02)
    make_ca(tmp_path)
    make_node(tmp_path, "here")
    security = Security(Credentials.of_folder(tmp_path, "here/bubbletea"), ())
    other = replace(SETTINGS, served=Served(LLAMA, seed=2))
    with training(tmp_path / "meet", security) as filler:
        with service(tmp_path / "meet") as url:
            assert answer(url) == expected(SETTINGS)
            assert filler._filling is not None
            first = filler._filling.engine
            ask = {"prompt": list(range(40)), "model": "tiny", "max_tokens": 1}
            handed = post_patiently(f"{url}/v1/completions", json=ask | HAND_OFF).json()["kv_transfer_params"]
            assert [part["name"] for part in handed["remote_parts"]] == ["here/p0.s0"], "it has a certificate"
            assert handed["remote_service"] == "", "and the service has none"
        with service(tmp_path / "meet") as url:
            assert answer(url) == expected(SETTINGS)
            assert filler._filling is not None
            assert filler._filling.engine is first, "the same model is not loaded again"
        with service(tmp_path / "meet", other, security) as url:
            assert answer(url) == expected(other)
    assert not list((tmp_path / "meet").iterdir())


def test_a_refused_worker_prints_why_once_and_training_continues(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    large = replace(SETTINGS, arena_bytes=48 * MIB)
    with service(tmp_path, large), training(tmp_path) as filler:
        assert filler._join() is False
        filler.fill(Position(0, 0), lambda: False)  # returns at once
    said = [record.message for record in caplog.records if "BubbleTea on p0.s0" in record.message]
    assert len(said) == 1
    assert "train with --filler-mib 48, or serve with --arena-mib 32" in said[0]


def test_a_worker_with_another_token_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as an old copy of the service's file, on a host that does not share its folder."""
    monkeypatch.setattr(prefill_worker, "AGAIN_S", 0.02)
    with service(tmp_path / "new"):
        place = find({"folder": str(tmp_path / "new")}, "here")
        assert place is not None
        with announced(tmp_path / "old", "there", replace(place, token="old")) as file:
            file.rename(file.with_name("here.json"))
            with training(tmp_path / "old") as filler:
                for _ in range(3):
                    assert filler._join() is False
    said = [record.message for record in caplog.records if "BubbleTea on p0.s0" in record.message]
    assert len(said) == 1
    assert "the service has another token: give both sides the same. Training continues without it" in said[0]


ORDER = WorkerOrder(Served(LLAMA), (4,), 0, arena_bytes=8 * MIB, workspace_bytes=1, chunk=1)
WHO = {"name": "p0.s1", "worker": 5, "datacenter": "east", "plan": "x", "device": "cuda", "memory_bytes": 8 * MIB}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"plan": "y"}, "runs another plan"),
        ({"device": "cpu"}, "serve with --device cpu"),
        ({"worker": 4}, "check its --dc"),
        ({"worker": 7}, "is not needed"),
        ({"memory_bytes": MIB}, "train with --filler-mib 8, or serve with --arena-mib 1"),
    ],
)
def test_a_worker_that_does_not_fit_is_refused_by_name(change: dict[str, object], says: str) -> None:
    roster = Roster({1: ORDER}, (3, 5, 7), "x", "cuda")
    assert roster.find(WHO) == (1, ORDER)
    with pytest.raises(WorkerError, match=says):
        roster.find({**WHO, **change})


def test_a_file_that_others_may_write_is_refused(tmp_path: Path) -> None:
    place = ServicePlace("127.0.0.1:1", "token")
    with announced(tmp_path, None, place) as file:
        assert file.stat().st_mode & 0o777 == 0o600
        assert find({"folder": str(tmp_path)}, "anywhere") == place
        file.chmod(0o666)
        with pytest.raises(AtlasError, match="others may write it"):
            find({"folder": str(tmp_path)}, "anywhere")
        file.write_text("{}")
        file.chmod(0o600)
        with pytest.raises(AtlasError, match="not a file of `bubbletea serve`"):
            find({"folder": str(tmp_path)}, "anywhere")
    assert find({"folder": str(tmp_path / "nowhere")}, "anywhere") is None


def test_a_second_service_of_a_datacenter_is_refused_while_the_first_listens(tmp_path: Path) -> None:
    new = ServicePlace("127.0.0.1:2", "new")
    with service(tmp_path), pytest.raises(AtlasError, match="Stop it first"), announced(tmp_path, "here", new):
        pass
    left = ServicePlace("127.0.0.1:1", "killed")
    announced(tmp_path, "here", left).__enter__()
    with announced(tmp_path, "here", new):
        assert find({"folder": str(tmp_path)}, "here") == new
    assert not list(tmp_path.iterdir())


def test_a_filler_that_fails_is_closed_and_not_called_again() -> None:
    calls = list[str]()

    class Broken(PrefillWorker):
        def fill(self, position: Position, arrived: object) -> None:
            raise MemoryError("out of memory")

        def close(self) -> None:
            calls.append("closed")

    class Arrived:
        what, done, end_ns = "an input", False, 0

        def wait(self, timeout_s: float | None = None) -> object:
            calls.append("waited")
            return None

    waits = Waits(1.0, Broken({}))
    for _ in range(2):
        waits.until(Position(0, 0), [Arrived()])
    assert calls == ["closed", "waited", "waited"]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--filler", "cofee"], "filler 'cofee': not installed; installed are bubbletea"),
        (["--filler-folder", "meet"], "filler.folder: no filler is named"),
        (["--filler-mib", "64"], "filler.memory_mib: no filler is named"),
        (["--filler", "bubbletea", "--set", "tp=2", "--set", "cluster.datacenters.0.gpus_per_node=2"], "tp"),
    ],
)
def test_a_filler_that_cannot_be_used_is_refused_before_the_start(
    flags: list[str], says: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("atlas.commands.train.end_on_signals", lambda: None)  # they are this process's own
    assert atlas(["train", str(EXAMPLE), "--emulate", *flags]) == 2
    assert says in capsys.readouterr().err


def test_idle_connections_do_not_block_new_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each server keeps few of them, and a worker and a client still get in."""
    monkeypatch.setattr(http, "MAX_WAITING", 40)
    make_ca(tmp_path)
    make_node(tmp_path, "here")
    security = Security(Credentials.of_folder(tmp_path, "here/bubbletea"), ())
    with service(tmp_path / "meet", SETTINGS, security) as url, ExitStack() as stack:
        place = find({"folder": str(tmp_path / "meet")}, "here")
        assert place is not None
        ports = [int(place.address.rpartition(":")[2]), int(url.rpartition(":")[2])]
        idle = [stack.enter_context(socket.create_connection(("127.0.0.1", p), 60)) for p in ports for _ in range(200)]
        assert len(idle) == 400
        with training(tmp_path / "meet", security):
            assert answer(url) == expected(SETTINGS)
        closed = sum(is_closed(sock) for sock in idle)
        assert closed >= 200 - MAX_GREETING + 200 - 40 - 2


def is_closed(sock: socket.socket) -> bool:
    """By the other side; what it has said before is read."""
    sock.setblocking(False)
    try:
        while sock.recv(4096):
            pass
    except BlockingIOError:
        return False
    except ConnectionError:
        return True
    return True
