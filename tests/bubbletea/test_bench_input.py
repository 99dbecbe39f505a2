"""Wrong input of `bubbletea bench` is one message and exit code 2."""

from __future__ import annotations

from pathlib import Path

import pytest

from bubbletea.cli import main


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["foo"], "foo: not the address of a service. Write it like http://127.0.0.1:8000"),
        (["http://127.0.0.1:1"], "no service responds there (Connection refused)"),
        (["http://127.0.0.1:1", "--prompt", "x"], "--prompt x: give MIN:MAX"),
        (["http://127.0.0.1:1", "--key-file", "nowhere"], "--key-file nowhere: cannot be read: No such file"),
        (["http://127.0.0.1:1", "--key-file", "binary"], "--key-file binary: cannot be read: 'utf-8' codec"),
    ],
)
def test_bad_input_is_one_message(
    words: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("binary").write_bytes(b"\xff\xfe")
    assert main(["bench", *words]) == 2
    assert message in capsys.readouterr().err
