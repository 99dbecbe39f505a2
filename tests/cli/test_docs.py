"""Every `$ atlas` block of the README and the tour is run, and its output compared with the page.

Update the pages with `ATLAS_RECORD=1 .venv/bin/python -m pytest tests/cli/test_docs.py`.
"""

from __future__ import annotations

import os
import re
import shlex
from datetime import date
from pathlib import Path

import pytest
from cli_runner import Atlas

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"```console\n(.*?)```", re.DOTALL)


@pytest.mark.parametrize("name", ["README.md", "docs/tour.md", "docs/regions.md"])
def test_the_commands_in_the_docs_print_what_is_recorded(
    atlas: Atlas, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(
        "atlas.catalogue.table.today", lambda: date(2026, 11, 16)
    )  # else later runs warn of more prices
    (tmp_path / "examples").symlink_to(ROOT / "examples")

    def answered(block: re.Match[str]) -> str:
        commands = [line for line in block[1].splitlines() if line.startswith("$ ")]
        return "```console\n" + "".join(f"{command}\n{_answer(atlas, command)}" for command in commands) + "```"

    text = (ROOT / name).read_text()
    found = BLOCK.sub(answered, text)
    if os.environ.get("ATLAS_RECORD"):
        (ROOT / name).write_text(found)
    else:
        assert found == text


def _answer(atlas: Atlas, command: str) -> str:
    program, *words = shlex.split(command[2:])
    assert program == "atlas"
    said = atlas(*words)
    assert said.code in (0, 2), said
    return "".join(line.rstrip() + "\n" for line in (said.out + said.err).splitlines())


def test_the_shell_lines_of_the_readme_parse() -> None:
    from atlas.cli import command_parser

    blocks = re.findall(r"```sh\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    lines = [line.split("#")[0] for block in blocks for line in block.splitlines() if line.startswith("atlas ")]
    assert len(lines) >= 3
    for line in lines:
        _, command, *words = shlex.split(line)
        parser, _ = command_parser(command)
        parser.parse_args(words)
