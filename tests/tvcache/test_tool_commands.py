"""The command line: help, wrong words, `show`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tvcache.cli import COMMANDS, main
from tvcache.keys import Task, ToolCall, root
from tvcache.log import LogStore
from tvcache.stores import Ask
from tvcache.values import Value


def test_help_names_every_command_and_loads_nothing_heavy() -> None:
    code = (
        "import sys; from tvcache.cli import top_parser; print(top_parser().format_help());"
        "assert not {'starlette', 'uvicorn', 'numpy', 'atlas', 'prometheus_client'} & set(sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    for name in COMMANDS:
        assert name in found.stdout


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        main([name, "--help"])
    assert done.value.code == 0
    assert f"usage: tvcache {name}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "word"),
    [
        (["sevre"], "did you mean 'serve'?"),
        (["serve", "--host", "0.0.0.0"], "a token is needed"),
        (["serve", "--port", "99999"], "a port from 0 to 65535"),
        (["serve", "--peer", "http://site-b:8765"], "sites need https"),
        (["serve", "--peer", "site-b"], "not the address of a server"),
        (["serve", "--peer", "http://127.0.0.1:x"], "the port is not a number"),
        (["serve", "--cert", "a.pem"], "belong together"),
        (["serve", "--cert", "a.pem", "--key", "b.pem"], "no such file"),
        (["serve", "--token-file", "none"], "Check --token-file"),
        (["serve", "--lease", "0"], "not a number from 1"),
        (["serve", "--log", "/dev/null/x"], "Choose another place"),
        (["show", "none.log"], "no such log"),
        (["show", "http://127.0.0.1:9"], "Start one: tvcache serve"),
        (["show", "ftp://x"], "not the address"),
        (["replay", "none.json"], "Check the path"),
    ],
)
def test_wrong_arguments_give_one_message(
    words: list[str], word: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TVCACHE_TOKEN", raising=False)
    try:
        code = main(words)
    except SystemExit as done:
        code = int(done.code or 0)
    assert code == 2
    told = capsys.readouterr().err
    assert word in told
    assert len(told.strip().splitlines()) == 1


def test_a_port_in_use_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["serve", "--port", str(port), "--log", str(tmp_path / "a.log")]) == 2
    assert "Choose another --port" in capsys.readouterr().err


def test_show_writes_a_page_of_a_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = LogStore(tmp_path / "a.log")
    one = Ask.of(Task("t", "sha256:1"), root(Task("t", "sha256:1")), ToolCall("search", {"q": "x"}), False)
    log.put(one, Value(b'{"json":1}', 90.0))
    log.get(one.key)
    log.close()
    before = log.path.read_bytes()
    assert main(["show", str(log.path), "--out", str(tmp_path / "p.html")]) == 0
    assert capsys.readouterr().out == "1 values of 1 tasks, 1 hits (50 %), 1.5 min of tool time saved\n"
    text = (tmp_path / "p.html").read_text()
    assert "search(q=&quot;x&quot;)" in text
    assert "prefers-color-scheme: dark" in text
    assert main(["show", str(log.path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tools"]["search"]["hits"] == 1
    assert main(["show", str(log.path), "--out", str(log.path)]) == 2
    assert log.path.read_bytes() == before
