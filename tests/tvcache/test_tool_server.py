"""`tvcache serve` and its clients: real processes, real sockets, `kill -9`."""

from __future__ import annotations

import json
import logging
import random
import resource
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from histories import check_group, random_group
from servers import Served

from tvcache import Cache, Task, Tool
from tvcache.client import Client
from tvcache.endpoint import HttpEndpoint
from tvcache.environments.memory import MemoryEnvironment
from tvcache.keys import ToolCall, key, root
from tvcache.messages import asked
from tvcache.stores import Ask, Lease
from tvcache.values import Value


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with Served(tmp_path_factory.mktemp("served") / "a.log", "--lease", "1") as made:
        yield made


def ask(task: str, name: str = "f", mutates: bool = False) -> Ask:
    return Ask.of(Task(task), root(Task(task)), ToolCall(name, {}), mutates)


def sent(served: Served, path: str, body: bytes | None = None, token: str = "") -> tuple[int, Any, bytes]:
    with HttpEndpoint(served.url, token) as endpoint:
        return endpoint.request("GET" if body is None else "POST", path, body, 30.0)


VALUE = Value(b'{"json":"x"}', 1.5)


def test_a_value_is_stored_once_and_found_by_everyone(served: Served) -> None:
    one, other = Client(served.url), Client(served.url)
    lease = one.begin(ask("once"), 0.0)
    assert isinstance(lease, Lease)
    assert lease.number
    assert one.finish(ask("once"), lease, VALUE) == VALUE
    assert other.begin(ask("once"), 0.0) == VALUE
    assert other.finish(ask("once"), Lease(), Value(b'{"json":"y"}')) == VALUE
    one.close()
    other.close()


def test_64_equal_calls_of_many_clients_are_executed_once(served: Served) -> None:
    started, executed = threading.Barrier(64), []

    def f(_: Any) -> int:
        executed.append(1)
        return len(executed)

    def play(_: int) -> Any:
        cache = Cache(Client(served.url), [Tool("f", "reads")], audit=0.0)
        with cache, cache.rollout("64", lambda: MemoryEnvironment({}, {"f": f})) as rollout:
            started.wait(60)
            return rollout.call("f", {})

    with ThreadPoolExecutor(64) as pool:
        assert set(pool.map(play, range(64))) == {1}
    assert len(executed) == 1


def test_a_client_that_dies_with_a_lease_blocks_the_others_for_a_second(served: Served) -> None:
    code = (
        "import sys; from tvcache.client import Client; sys.path.insert(0, sys.argv[2]);"
        "from test_tool_server import ask; print(Client(sys.argv[1]).begin(ask('dies'), 0.0).number, flush=True);"
        "import os; os.kill(os.getpid(), 9)"
    )
    here = str(Path(__file__).parent)
    died = subprocess.run([sys.executable, "-c", code, served.url, here], capture_output=True, text=True, check=False)
    assert died.returncode == -9
    assert int(died.stdout)
    client = Client(served.url)
    found = client.begin(ask("dies"), 60.0)
    assert isinstance(found, Lease)
    assert found.number not in (0, int(died.stdout))
    client.close()


def test_a_call_that_takes_longer_than_a_lease_is_still_executed_once(served: Served) -> None:
    slow, waiting = Client(served.url), Client(served.url)
    lease = slow.begin(ask("slow"), 0.0)
    assert isinstance(lease, Lease)
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(waiting.begin, ask("slow"), 60.0)
        renewed = threading.Event()
        whole, times = slow._post, []

        def counted(path: str, sent: Any, timeout_s: float) -> Any:
            answer = whole(path, sent, timeout_s)
            if path == "/v1/renew":
                times.append(answer)
                if len(times) == 8:  # two seconds: twice the lease
                    renewed.set()
            return answer

        slow._post = counted  # type: ignore[method-assign]
        assert renewed.wait(60)
        assert not found.done()
        slow.finish(ask("slow"), lease, VALUE)
        assert found.result(60) == VALUE
    slow.close()
    waiting.close()


def test_random_rollouts_through_a_server_are_as_without_a_cache(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR, "tvcache")
    hits = 0
    for seed in range(2):
        cache = check_group(random_group(random.Random(seed)), seed, Client(served.url), f"random {seed}")
        hits += cache.counters.hits
        cache.close()
    assert hits > 40


def test_without_a_server_a_rollout_runs_and_logs_it_once(caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    with caplog.at_level(logging.WARNING, "tvcache"), Cache(Client(url), [Tool("f", "reads")]) as cache:
        for _ in range(3):
            with cache.rollout("t", lambda: MemoryEnvironment({}, {"f": lambda _: 7})) as rollout:
                assert rollout.call("f", {}) == 7
    assert [record.message for record in caplog.records] == [
        f"tvcache: no server at {url} (Connection refused): running without a cache"
    ]


def test_acknowledged_values_survive_kill_9_and_rollouts_go_on(tmp_path: Path) -> None:
    """Three kills here; bench/tvcache_kills.py does fifty."""
    chance, acknowledged = random.Random(3), {}
    with Served(tmp_path / "k.log") as served:
        client = Client(served.url)
        for round_ in range(3):
            killer = threading.Timer(chance.uniform(0.0, 0.02), served.kill)
            begin, number, alive = chance.randint(1, 40), 0, True
            while alive:
                if number == begin:
                    killer.start()
                one = ask(f"k{round_}", str(number))
                alive = client.finish(one, Lease(), Value(b'{"json":%d}' % number)) is not None
                if alive:
                    acknowledged[one.key] = (one, number)
                number += 1
            killer.join()
            served.start()
            client.close()
            client = Client(served.url)
            assert served.num_values >= len(acknowledged)
            for one, stored in acknowledged.values():
                assert client.begin(one, 0.0) == Value(b'{"json":%d}' % stored)
        client.close()
    assert len(acknowledged) > 3


def test_a_full_disk_refuses_new_values_and_keeps_the_old(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Served(tmp_path / "f.log") as served:
        client = Client(served.url)
        assert client.finish(ask("old"), Lease(), VALUE) == VALUE
        assert served.process is not None
        resource.prlimit(served.process.pid, resource.RLIMIT_FSIZE, (served.log.stat().st_size + 50, -1))
        with caplog.at_level(logging.WARNING, "tvcache"):
            for _ in range(2):
                assert client.finish(ask("new"), Lease(), VALUE) is None
        assert [record.message for record in caplog.records] == [
            f"tvcache: {served.url}: not stored: No space left on device"
        ]
        assert client.begin(ask("old"), 0.0) == VALUE
        resource.prlimit(served.process.pid, resource.RLIMIT_FSIZE, (-1, -1))
        assert client.finish(ask("new"), Lease(), VALUE) == VALUE
        client.close()
        served.kill()
        served.start()
        assert served.num_values == 2


def test_a_server_ends_and_starts_again_with_its_hits(tmp_path: Path) -> None:
    with Served(tmp_path / "e.log") as served:
        client = Client(served.url)
        client.finish(ask("e"), Lease(), VALUE)
        assert client.begin(ask("e"), 0.0) == VALUE
        client.close()
        served.stop()
        served.start()
        _, _, data = sent(served, "/v1/summary")
        found = json.loads(data)
        assert (found["values"], found["hits"], found["saved_s"]) == (1, 1, 1.5)


def test_a_difference_is_counted_by_tool_in_the_metrics(served: Served) -> None:
    client = Client(served.url)
    client.finish(ask("drop"), Lease(), VALUE)
    client.drop(ask("drop"), "f", "it differed")
    assert isinstance(client.begin(ask("drop"), 0.0), Lease)
    _, _, data = sent(served, "/metrics")
    assert b'tvcache_differences_total{tool="f"} 1.0' in data
    for name in (b"tvcache_hits_total", b"tvcache_values", b"tvcache_saved_seconds_total", b"tvcache_request_seconds"):
        assert name in data
    client.close()


GOOD = asked(ask("good")) | {"wait_s": 0}
DEEP: Any = 1
for _ in range(70):
    DEEP = [DEEP]


@pytest.mark.parametrize(
    ("path", "body", "word"),
    [
        ("/v1/begin", b"", "not JSON"),
        ("/v1/begin", b"[]", "task is missing"),
        ("/v1/begin", b"\xff", "UTF-8"),
        ("/v1/begin", b"[" * 100_000, "deep"),
        ("/v1/begin", b'{"a": 1, "a": 2}', "appears twice"),
        ("/v1/begin", b'{"a": NaN}', "NaN"),
        ("/v1/begin", GOOD | {"task": "t"}, "task is missing or is not a list"),
        ("/v1/begin", GOOD | {"task": ["t", 1]}, "list of two strings"),
        ("/v1/begin", GOOD | {"state": "00"}, "64 hexadecimal"),
        ("/v1/begin", GOOD | {"call": {"name": "f"}}, "a call is an object"),
        ("/v1/begin", GOOD | {"wait_s": -1}, "wait_s"),
        ("/v1/begin", GOOD | {"call": GOOD["call"] | {"arguments": "x" * 2_000_000}}, "bytes of arguments"),
        ("/v1/begin", GOOD | {"call": GOOD["call"] | {"arguments": DEEP}}, "deep"),
        ("/v1/finish", GOOD | {"lease": 0, "value": {"body": "1", "seconds": 0}}, "a value must be an object"),
        ("/v1/finish", GOOD | {"lease": 0, "value": {"body": '{"bytes":"%"}', "seconds": 0}}, "base64"),
        ("/v1/finish", GOOD | {"lease": 0, "value": {"body": '{"json":1}', "seconds": "x"}}, "seconds"),
        ("/v1/finish", GOOD | {"lease": "a", "value": None}, "lease"),
        ("/v1/renew", {"leases": 3}, "leases"),
        ("/v1/drop", GOOD, "tool"),
    ],
)
def test_an_invalid_request_is_refused_with_a_message(served: Served, path: str, body: Any, word: str) -> None:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    status, _, answer = sent(served, path, data)
    assert status == 400
    assert word in json.loads(answer)["error"]


def test_a_request_that_is_too_large_is_refused(served: Served) -> None:
    status, _, answer = sent(served, "/v1/begin", b" " * (25 << 20))
    assert status == 400
    assert "more than" in json.loads(answer)["error"]


def test_requests_from_web_pages_are_refused(served: Served) -> None:
    for headers, status in (
        ("Host: attacker.example", 421),
        (f"Host: localhost:{served.port}", 200),
        (f"Host: 127.0.0.1:{served.port}", 200),
    ):
        with socket.create_connection(("127.0.0.1", served.port), 10) as raw:
            raw.sendall(f"GET /healthz HTTP/1.1\r\n{headers}\r\nConnection: close\r\n\r\n".encode())
            assert raw.recv(4096).startswith(f"HTTP/1.1 {status}".encode())
    with socket.create_connection(("127.0.0.1", served.port), 10) as raw:
        raw.sendall(
            f"POST /v1/begin HTTP/1.1\r\nHost: 127.0.0.1:{served.port}\r\nContent-Type: text/plain\r\n"
            "Content-Length: 2\r\nConnection: close\r\n\r\n{}".encode()
        )
        assert raw.recv(4096).startswith(b"HTTP/1.1 415")


def test_beyond_this_machine_every_request_needs_the_token(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "token").write_text("correct horse\n")
    with Served(tmp_path / "t.log", "--host", "0.0.0.0", "--token-file", str(tmp_path / "token")) as served:
        for path in ("/", "/metrics", "/v1/log", "/v1/summary", "/healthz"):
            for token, status in (("", 401), ("wrong", 401), ("correct horse", 200)):
                assert sent(served, path, token=token)[0] == status
        wrong, right = Client(served.url, "wrong"), Client(served.url, "correct horse")
        with caplog.at_level(logging.WARNING, "tvcache"):
            assert wrong.begin(ask("t"), 0.0) == Lease()
            assert wrong.begin(ask("t"), 0.0) == Lease()
        assert [record.message for record in caplog.records] == [
            f"tvcache: {served.url} refuses the token: running without a cache. Give its token"
        ]
        assert right.finish(ask("t"), Lease(), VALUE) == VALUE
        wrong.close()
        right.close()


def test_the_page_shows_the_tree_and_escapes_what_an_agent_wrote(served: Served) -> None:
    task = Task("<script>alert(1)</script>")
    first = Ask.of(task, root(task), ToolCall("write", {"text": "<img src=x>"}), True)
    second = Ask.of(task, key(root(task), first.call), ToolCall("read", {}), False)
    client = Client(served.url)
    for one in (first, second):
        client.finish(one, Lease(), VALUE)
        client.begin(one, 0.0)
    _, _, data = sent(served, "/")
    text = data.decode()
    assert "<script" not in text
    assert "<img" not in text
    assert "write(text=&quot;&lt;img src=x&gt;&quot;)" in text
    assert '--depth:1"' in text
    client.close()


def exchanged(served: Served, *parts: bytes) -> list[tuple[int, bytes]]:
    """What a raw connection answers until it is closed or silent for all it was sent."""
    found = []
    with socket.create_connection(("127.0.0.1", served.port), 30) as raw:
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for part in parts:
            raw.sendall(part)
        stream = raw.makefile("rb")
        for _ in range(b"".join(parts).count(b" HTTP/1.1\r\n")):
            status = stream.readline().split()
            if not status:
                break
            length = 0
            while (line := stream.readline().strip()) != b"":
                name, _, value = line.partition(b":")
                length = int(value) if name.lower() == b"content-length" else length
            found.append((int(status[1]), stream.read(length)))
        stream.close()
    return found


def framed(body: bytes, *headers: str, path: str = "/v1/begin") -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: 127.0.0.1", "Content-Type: application/json", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def test_every_way_to_send_a_request_has_the_same_answer(served: Served) -> None:
    client = Client(served.url)
    client.finish(ask("ways"), Lease(), VALUE)
    client.close()
    body = json.dumps(asked(ask("ways")) | {"wait_s": 0}).encode()
    size = f"Content-Length: {len(body)}"
    whole = framed(body, size)
    chunked = framed(b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body), "Transfer-Encoding: chunked")
    ways = {
        "at once": [whole],
        "byte by byte": [whole[k : k + 1] for k in range(len(whole))],
        "head first": [whole[: -len(body)], body],
        "chunked": [chunked],
        "pipelined": [whole + whole + whole],
        "close": [framed(body, size, "Connection: close")],
        "odd names": [framed(body, size.upper(), "X-Other: 1", "X-Other: 2")],
        "after another": [whole, chunked, whole],
    }
    answers = {name: exchanged(served, *parts) for name, parts in ways.items()}
    ((status, text),) = {answer for one in answers.values() for answer in one}
    assert (status, json.loads(text)) == (200, {"value": {"body": VALUE.body.decode(), "seconds": 1.5}})
    assert [len(one) for one in answers.values()] == [1, 1, 1, 1, 3, 1, 1, 3]


@pytest.mark.parametrize(
    "headers",
    [
        ("Content-Length: 2", "Content-Length: 3"),
        ("Content-Length: -2",),
        ("Content-Length: 2x",),
        ("Content-Length: 2", "Transfer-Encoding: chunked", "Transfer-Encoding: x"),
        ("Content-Length: 2", "Bad Name: x"),
        ("Content-Length : 2",),
        ("Content-Length: 2", "No-Colon"),
        ("Content-Length: 2", "Nul: \x00"),
    ],
)
def test_a_malformed_request_is_refused_as_http(served: Served, headers: tuple[str, ...]) -> None:
    found = exchanged(served, framed(b"{}", *headers))
    assert [status for status, _ in found] == [400]
    assert b"missing" not in found[0][1]  # refused as HTTP, before anything was read as JSON
