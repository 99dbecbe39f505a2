"""Every package that the source, the tests and the benches import is declared in pyproject.toml."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OURS = {path.name for path in (ROOT / "src").iterdir()} | {"bench"}
ELSEWHERE = {"vllm", "guidellm", "skyrl_gym", "verl"}
"""Packages in separate environments, where the code that imports them runs (docs/vllm.md, docs/tvcache.md)."""
DISTRIBUTION = {"yaml": "pyyaml", "resvg_py": "resvg-py", "prometheus_client": "prometheus-client"}


def _name(requirement: str) -> str:
    return re.split(r"[ \[<>=~!;]", requirement, maxsplit=1)[0].lower().replace("_", "-")


def declared(*extras: str) -> set[str]:
    """Distributions that the core and these extras require."""
    asked = list(PROJECT["dependencies"])
    for extra in extras:
        asked += PROJECT["optional-dependencies"][extra]
    return {_name(requirement) for requirement in asked}


@cache
def _local(folder: str) -> set[str]:
    """Modules in a folder of scripts that are imported by their bare name."""
    paths = list((ROOT / folder).rglob("*.py"))
    return {path.stem for path in paths} | {path.parent.name for path in paths}


def third_party(folder: str) -> dict[str, str]:
    """Top-level packages that the files of a folder import, each with one example file."""
    found: dict[str, str] = {}
    local = set() if folder == "src" else _local("tests") | _local("bench")
    for path in sorted((ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module or ""]
            for top in {name.split(".")[0] for name in names}:
                if top and top not in sys.stdlib_module_names and top not in OURS | ELSEWHERE | local:
                    found.setdefault(top, str(path.relative_to(ROOT)))
    return found


def _distributions(top: str) -> set[str]:
    known = packages_distributions().get(top, [DISTRIBUTION.get(top, top)])
    return {name.lower().replace("_", "-") for name in known}


USER_EXTRAS = tuple(name for name in PROJECT["optional-dependencies"] if name not in ("dev", "docs"))


@pytest.mark.parametrize(
    ("folder", "extras"),
    [("src", USER_EXTRAS), ("tests", (*USER_EXTRAS, "dev", "docs")), ("bench", (*USER_EXTRAS, "dev"))],
    ids=["src", "tests", "bench"],
)
def test_every_import_is_declared(folder: str, extras: tuple[str, ...]) -> None:
    asked = declared(*extras)
    missing = {top: path for top, path in third_party(folder).items() if not _distributions(top) & asked}
    assert not missing


def test_the_extra_allows_a_range_of_torch_and_make_pins_one() -> None:
    (torch,) = (r for r in PROJECT["optional-dependencies"]["runtime"] if _name(r) == "torch")
    assert "==" not in torch
    assert re.search(r"^torch==", (ROOT / "constraints.txt").read_text(), re.MULTILINE)


def test_make_installs_with_the_constraints() -> None:
    installs = [line for line in (ROOT / "Makefile").read_text().splitlines() if "pip install" in line]
    assert installs
    assert all("-c constraints.txt" in line for line in installs)
