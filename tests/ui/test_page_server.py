"""Who may read the page, and what becomes of clients that misbehave."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from ui_samples import saved_run

from atlas.cli import main
from atlas.errors import AtlasError
from atlas.ui import server as server_module
from atlas.ui.live_run import LiveRun
from atlas.ui.serve import ServedPage
from atlas.ui.server import PageServer, page_address


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedPage]:
    folder = tmp_path_factory.mktemp("run")
    saved_run(folder, 3)
    with ServedPage(str(folder)) as served:
        yield served


def asked(
    port: int, path: str = "/", headers: dict[str, str] | None = None, body: str | None = None
) -> tuple[int, http.client.HTTPMessage, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET" if body is None else "POST", path, body, headers or {})
    reply = connection.getresponse()
    data = reply.read()
    connection.close()
    return reply.status, reply.headers, data


def test_the_page_loads_nothing_from_elsewhere(page: ServedPage) -> None:
    code, headers, body = asked(page.server.port)
    assert code == 200
    assert "default-src 'none'" in str(headers["Content-Security-Policy"])
    assert b"http://" not in body.replace(b"http://www.w3.org/2000/svg", b"")
    assert b"https://" not in body


def test_a_foreign_name_or_origin_is_refused(page: ServedPage) -> None:
    port = page.server.port
    assert asked(port, headers={"Host": "evil.example"})[0] == 403
    assert asked(port, headers={"Origin": "http://evil.example"})[0] == 403
    assert asked(port, headers={"Host": f"localhost:{port}"})[0] == 200
    assert asked(port, "/etc/passwd")[0] == 404


def test_a_post_must_be_a_small_json_object(page: ServedPage) -> None:
    port, kind = page.server.port, {"Content-Type": "application/json"}
    assert asked(port, "/api/whatif/quick", {"Content-Type": "text/plain"}, "{}")[0] == 400
    assert asked(port, "/api/whatif/quick", kind, "[1]")[0] == 400
    assert asked(port, "/api/whatif/quick", kind, "[" * 60_000)[0] == 400
    assert asked(port, "/api/whatif/quick", kind, " " * (server_module.MAX_BODY + 1))[0] == 400
    code, _, body = asked(port, "/api/whatif/quick", kind, '{"cells": "many"}')
    assert code == 422
    assert "cells = 'many': must be a whole number" in json.loads(body)["error"]
    assert asked(port, "/api/whatif/none", kind, "{}")[0] == 404


def test_beyond_loopback_a_token_is_needed() -> None:
    with pytest.raises(AtlasError, match="needs a token"):
        PageServer(LiveRun(), lambda: "page", {}, "0.0.0.0")
    server = PageServer(LiveRun(), lambda: "page", {}, "0.0.0.0", token="secret")
    try:
        port = server.port
        assert asked(port)[0] == 401
        assert asked(port, "/?token=wrong")[0] == 401
        assert asked(port, "/api/state", {"Cookie": "atlas_token=wrong"})[0] == 401
        assert asked(port, "/api/state", {"Authorization": "Bearer secret"})[0] == 200
        code, headers, _ = asked(port, "/?token=secret")
        assert (code, headers["Location"]) == (303, "/")
        cookie = str(headers["Set-Cookie"])
        assert "HttpOnly" in cookie
        assert "SameSite=Strict" in cookie
        assert asked(port, "/", {"Cookie": cookie.partition(";")[0]})[2] == b"page"
    finally:
        server.close()


def test_two_hundred_clients_get_events_and_a_silent_one_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module.PageHandler, "timeout", 0.5)
    monkeypatch.setattr(server_module, "PAUSE_S", 0.0)
    monkeypatch.setattr(server_module, "MAX_STREAMS", 202)
    run = LiveRun()
    server = PageServer(run, lambda: "page", {})
    clients = []
    try:
        request = f"GET /events HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\n\r\n".encode()
        for _ in range(201):  # the first one never reads
            client = socket.socket()
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.settimeout(60)
            client.connect(("127.0.0.1", server.port))
            client.sendall(request)
            clients.append(client)
        for client in clients[1:]:
            text = b""
            while b"data: " not in text:
                text += client.recv(65536)
            client.close()
        silent = server.streams
        while True:  # new versions until the buffers of the silent client are full and it is disconnected
            run.set_service([{"label": "x" * 200_000, "unit": "", "value": run.version}])
            if silent.acquire(blocking=False):
                break
        assert asked(server.port)[0] == 200
    finally:
        for client in clients:
            client.close()
        server.close()


def test_a_page_beyond_the_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "MAX_STREAMS", 0)
    server = PageServer(LiveRun(), lambda: "page", {})
    try:
        assert asked(server.port, "/events")[0] == 503
    finally:
        server.close()


def test_the_page_of_another_host_is_shown_here(page: ServedPage) -> None:
    with ServedPage(page.url) as here:
        theirs, ours = page.run.state(), here.run.state()
        assert {**ours, "whatif": True} == theirs
        assert asked(here.server.port, "/api/timeline")[2] == page.run.timeline_json()


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["ui", "nowhere"], "there is no such file or folder"),
        (["ui", "http://127.0.0.1:9"], "no page of a run there"),
        (["ui", "http://"], "not the address of a page"),
        (["ui", "examples/tiny.yaml", "--at", "x:y"], "must be PORT or HOST:PORT"),
        (["ui", "examples/tiny.yaml", "--at", "127.0.0.1:99999"], "a port up to 65535"),
        (["ui", "examples/tiny.yaml", "--token-file", "nowhere"], "cannot be read"),
    ],
)
def test_bad_input_ends_with_one_sentence(words: list[str], error: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert error in capsys.readouterr().err


def test_addresses() -> None:
    assert page_address("8642", "--at") == ("127.0.0.1", 8642)
    assert page_address("[::1]:0", "--at") == ("::1", 0)
    assert page_address("0.0.0.0:80", "--at") == ("0.0.0.0", 80)


def test_a_token_comes_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "token").write_text("two words\n")
    assert main(["ui", "examples/tiny.yaml", "--token-file", str(tmp_path / "token")]) == 2
    assert "must have one line" in capsys.readouterr().err
