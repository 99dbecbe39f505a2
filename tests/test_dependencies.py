"""Every package that the source, the tests and the benches import is declared in pyproject.toml, and pinned for
`make`; what a module of src imports at its top belongs to the core, or to an extra that the module is part of."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
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
        for top in _packages(ast.walk(ast.parse(path.read_text()))):
            if top not in local:
                found.setdefault(top, str(path.relative_to(ROOT)))
    return found


def _packages(nodes: Iterator[ast.AST]) -> set[str]:
    """Top-level packages that these nodes import, apart from the standard library, ours and those of `ELSEWHERE`."""
    names: list[str] = []
    for node in nodes:
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names.append(node.module or "")
    return {name.split(".")[0] for name in names} - {"", *sys.stdlib_module_names, *OURS, *ELSEWHERE}


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


EXTRAS_OF = {
    "atlas/runtime": ("runtime",),
    **{f"bubbletea/{part}": ("runtime",) for part in ("kv_blocks", "prefill", "handoff", "vllm")},
    "bubbletea/serve": ("runtime", "serve"),
    "tvcache": ("tvcache",),
}
"""By package or module of src: the extras without which it cannot be imported. All others need the core alone."""


def _at_import(node: ast.AST) -> Iterator[ast.AST]:
    """What runs when a module is imported: no function, and not what only a type checker sees."""
    for inner in ast.iter_child_nodes(node):
        checked = isinstance(inner, ast.If) and isinstance(inner.test, ast.Name) and inner.test.id == "TYPE_CHECKING"
        if not checked and not isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield inner
            yield from _at_import(inner)


def test_modules_import_packages_of_other_extras_only_inside_functions() -> None:
    wrong = []
    for path in sorted((ROOT / "src").rglob("*.py")):
        module = path.relative_to(ROOT / "src").with_suffix("")
        homes = [str(module), *map(str, module.parents)]
        asked = declared(*(extra for home in homes for extra in EXTRAS_OF.get(home, ())))
        tops = _packages(_at_import(ast.parse(path.read_text())))
        wrong += [(str(module), top) for top in sorted(tops) if not _distributions(top) & asked]
    assert wrong == []


ABSENT = (
    "import sys, importlib; sys.modules.update(dict.fromkeys({tops})); list(map(importlib.import_module, {modules}))"
)
COMMANDS = ("simulate", "compare", "schedules", "plan", "whatif", "view", "regions", "init")


def test_simulating_and_planning_need_no_extra() -> None:
    extras = {top: path for top, path in third_party("src").items() if not _distributions(top) & declared()}
    modules = ["atlas", "atlas.api", "atlas.cli", *(f"atlas.commands.{name}" for name in COMMANDS)]
    assert "torch" in extras
    script = ABSENT.format(tops=sorted(extras), modules=modules)
    subprocess.run([sys.executable, "-c", script], check=True)


def _pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if not line.startswith("#"))


def test_make_pins_every_declared_package() -> None:
    assert set(_pins()) == declared(*PROJECT["optional-dependencies"]) - {PROJECT["name"]}


def test_the_extra_allows_a_range_of_torch_and_the_workflow_tests_its_lowest() -> None:
    (torch,) = (r for r in PROJECT["optional-dependencies"]["runtime"] if _name(r) == "torch")
    (lowest,) = re.findall(r">=([\d.]+)", torch)
    assert "==" not in torch
    workflow = (ROOT / ".github/workflows/test.yml").read_text()
    assert re.findall(r"torch: ([\d.]+)", workflow) == [f"{lowest}.0"]


def test_make_installs_with_the_constraints() -> None:
    installs = [line for line in (ROOT / "Makefile").read_text().splitlines() if "pip install" in line]
    assert installs
    assert all("-c constraints.txt" in line for line in installs)
