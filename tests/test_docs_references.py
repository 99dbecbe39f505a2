"""Links, file names and commits in README, CONTRIBUTING, SECURITY, CHANGELOG and docs/ refer to something that exists,
tables have a header, and every flag of every command is described."""

from __future__ import annotations

import argparse
import re
import subprocess
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

import atlas.cli
import bubbletea.cli
import tvcache.cli

ROOT = Path(__file__).parents[1]
GUIDES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES = [*GUIDES, *(ROOT / f"{name}.md" for name in ("CONTRIBUTING", "SECURITY", "CHANGELOG"))]
FOLDERS = [ROOT / folder for folder in (".", "src", "src/atlas", "src/bubbletea")]
NAMED = re.compile(r"`([\w./-]+/[\w.-]+\.(?:py|yaml|md))`")
LINKED = re.compile(r"\]\(([^)#\s]+)")
PLACEHOLDER = "NAME.py"
FLAG = re.compile(r"(?<![\w-])--[a-z][\w-]*")
NOT_GUIDES = {"log.md", "claims.md"}
"""Pages about results, which do not tell how a flag is used."""
EVERYWHERE = {"--json", "--set"}
"""Flags of many commands with one meaning: one page describes them for all."""
SAME_FLAGS = {"atlas coordinator": "atlas train"}
"""docs/operating.md says that the first command takes flags of the second."""
UNDESCRIBED: set[tuple[str, str]] = set()
"""(command, flag) that may be missing from the pages."""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_named_files_exist(page: Path) -> None:
    named = set(NAMED.findall(page.read_text()))
    missing = [name for name in named if not any((folder / name).exists() for folder in FOLDERS)]
    assert [name for name in missing if not name.endswith(PLACEHOLDER)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_linked_files_exist(page: Path) -> None:
    linked = [target for target in LINKED.findall(page.read_text()) if not target.startswith("http")]
    assert [target for target in linked if not (page.parent / target).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_table_begins_with_a_header(page: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    tables = re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)
    assert [table for table in tables if not re.match(r"\|.*\n\|[-|]+\n", table)] == []


def git(*words: str) -> str:
    found = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True)
    return found.stdout.strip() if found.returncode == 0 else ""


def recipes() -> list[tuple[str, str, list[str]]]:
    """Of CONTRIBUTING's sections on how to add something: title, subject of the example commit, files named."""
    text = (ROOT / "CONTRIBUTING.md").read_text().partition("## How to add")[2]
    sections = [section.partition("\n") for section in text.split("\n### ")[1:]]
    return [
        (title, " ".join(subject.split()), re.findall(r"`((?:src|docs|tests)/[\w./-]*)`", body))
        for title, _, body in sections
        for subject in re.findall(r'Example\s+commit:\s+"([^"]+)"', body)
    ]


def test_every_recipe_of_contributing_has_an_example() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text().partition("## How to add")[2]
    assert len(recipes()) == text.count("\n### ")


@pytest.mark.parametrize(("title", "subject", "named"), recipes(), ids=[title for title, _, _ in recipes()])
def test_example_commits_exist_and_touch_the_source_of_their_recipe(title: str, subject: str, named: list[str]) -> None:
    if not (ROOT / ".git").exists() or git("rev-parse", "--is-shallow-repository") != "false":
        pytest.skip("no git history")
    commits = git("log", "--format=%H", "--fixed-strings", "--grep", subject).split()
    assert len(commits) == 1, f"{title}: {len(commits)} commits contain {subject!r}"
    touched = git("show", "--format=", "--name-only", commits[0]).splitlines()
    source = [name.removesuffix(PLACEHOLDER) for name in named if name.startswith("src/")]
    assert source
    assert [name for name in source if not any(file.startswith(name) for file in touched)] == []


def flags_of(command: str, parser: argparse.ArgumentParser) -> Iterator[tuple[str, str]]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, inner in action.choices.items():
                yield from flags_of(f"{command} {name}", inner)
        elif action.help is not argparse.SUPPRESS:
            yield from ((command, option) for option in action.option_strings if option.startswith("--"))


def parsers() -> Iterator[tuple[str, argparse.ArgumentParser]]:
    for cli in (atlas.cli, bubbletea.cli):
        for name in cli.COMMANDS:
            parser, _ = cli.command_parser(name)
            yield parser.prog, parser
    for name in tvcache.cli.COMMANDS:
        parser = tvcache.cli.TvcacheParser()
        import_module(f"tvcache.commands.{name}").configure(parser)
        yield f"tvcache {name}", parser


def test_every_flag_is_named_on_a_page_that_names_its_command() -> None:
    pages = [page.read_text() for page in GUIDES if page.name not in NOT_GUIDES]
    named = [(text, set(FLAG.findall(text))) for text in pages]

    def is_named(command: str, flag: str) -> bool:
        commands = {command, SAME_FLAGS.get(command, command)}
        return any(
            flag in flags and (flag in EVERYWHERE or any(one in text for one in commands)) for text, flags in named
        )

    every = {flag for command, parser in parsers() for flag in flags_of(command, parser) if flag[1] != "--help"}
    assert {"atlas train", "atlas wan probe", "bubbletea serve", "tvcache replay"} <= {command for command, _ in every}
    assert {one for one in every if not is_named(*one)} == UNDESCRIBED
