"""The cache of compiled code: a change in any constant that is compiled in gives another folder."""

from __future__ import annotations

import ast
import importlib
import re
import shutil
from pathlib import Path

import pytest
from numba.core.registry import CPUDispatcher

from atlas import jit

ROOT = Path(jit.__file__).parent
FILES = {path: path.read_text() for name in ("atlas", "bubbletea") for path in (ROOT.parent / name).rglob("*.py")}
ENTRIES = [path for path, text in FILES.items() if re.search("^@(entry|kept)", text, re.MULTILINE)]
COMPILED = [path for path, text in FILES.items() if re.search("^@(entry|kept|njit)", text, re.MULTILINE)]


def module_of(file: Path) -> str:
    return ".".join(file.relative_to(ROOT.parent).with_suffix("").parts)


def origin(file: Path, name: str) -> Path:
    """The file that a global name of `file` is defined in, imports followed."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith(("atlas", "bubbletea")):
            for alias in node.names:
                source = ROOT.parent.joinpath(*node.module.split(".")).with_suffix(".py")
                if (alias.asname or alias.name) == name and source.is_file():
                    return origin(source, alias.name)
    return file


def constants() -> set[tuple[Path, str]]:
    """(file, name) of every global value, function or module that a compiled function mentions."""
    found = set()
    for file in COMPILED:
        module = importlib.import_module(module_of(file))
        for value in vars(module).values():
            if isinstance(value, CPUDispatcher) and value.py_func.__module__ == module.__name__:
                for name in value.py_func.__code__.co_names:
                    if name in vars(module):
                        found.add((origin(file, name), name))
    return found


def test_every_file_with_a_compiled_constant_is_in_the_digest() -> None:
    files = {file for file, _ in constants()}
    assert {ROOT / "cost" / "table.py", ROOT / "weather" / "path_model.py"} <= files
    assert files <= {source for file in ENTRIES for source in jit.sources(file)}


def test_only_one_module_compiles_with_numba_itself() -> None:
    """The caches of all others are in a folder of their digest."""
    own = [file for file, text in FILES.items() if re.search(r"numba\.n?jit|from numba import [^\n]*jit", text)]
    assert own == [Path(jit.__file__)]


@pytest.mark.parametrize("changed", ["cost/table.py", "sim/network.py", "sim/lower.py", "ir/program.py"])
def test_changing_a_constant_changes_the_folder(changed: str, tmp_path: Path) -> None:
    copy = tmp_path / "atlas"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns("__pycache__"))
    compiled = copy / "sim" / "compiled.py"
    before = jit.digest(compiled, tmp_path)
    assert before == jit.digest(ROOT / "sim" / "compiled.py")
    file = copy / changed
    file.write_text(file.read_text().replace("TURNS = 0, 1, 2", "TURNS = 0, 2, 1") + "\n# changed\n")
    assert jit.digest(compiled, tmp_path) != before
