"""Links and file names in README, CONTRIBUTING and docs/ refer to files that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
FOLDERS = [ROOT / folder for folder in (".", "src", "src/atlas", "src/bubbletea")]
NAMED = re.compile(r"`([\w./-]+/[\w.-]+\.(?:py|yaml|md))`")
LINKED = re.compile(r"\]\(([^)#\s]+)")
PLACEHOLDER = "NAME.py"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_named_files_exist(page: Path) -> None:
    named = set(NAMED.findall(page.read_text()))
    missing = [name for name in named if not any((folder / name).exists() for folder in FOLDERS)]
    assert [name for name in missing if not name.endswith(PLACEHOLDER)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_linked_files_exist(page: Path) -> None:
    linked = [target for target in LINKED.findall(page.read_text()) if not target.startswith("http")]
    assert [target for target in linked if not (page.parent / target).exists()] == []
