"""The cache of compiled code: a change in any constant that is compiled in gives another folder."""

from __future__ import annotations

import ast
import importlib
import shutil
from pathlib import Path

import pytest
from numba.core.registry import CPUDispatcher

from atlas import jit

ROOT = Path(jit.__file__).parent
ENTRIES = [path for path in (ROOT / "sim").glob("*.py") if "@entry" in path.read_text()]
COMPILED = [
    path.stem for path in (ROOT / "sim").glob("*.py") if "@entry" in path.read_text() or "@njit" in path.read_text()
]


def origin(file: Path, name: str) -> Path:
    """The file that a global name of `file` is defined in, imports followed."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("atlas"):
            for alias in node.names:
                source = ROOT.joinpath(*node.module.split(".")[1:]).with_suffix(".py")
                if (alias.asname or alias.name) == name and source.is_file():
                    return origin(source, alias.name)
    return file


def constants() -> set[tuple[Path, str]]:
    """(file, name) of every global value, function or module that a compiled function mentions."""
    found = set()
    for stem in COMPILED:
        module = importlib.import_module(f"atlas.sim.{stem}")
        for value in vars(module).values():
            if isinstance(value, CPUDispatcher) and value.py_func.__module__ == module.__name__:
                for name in value.py_func.__code__.co_names:
                    if name in vars(module):
                        found.add((origin(ROOT / "sim" / f"{stem}.py", name), name))
    return found


def test_every_file_with_a_compiled_constant_is_in_the_digest() -> None:
    files = {file for file, _ in constants()}
    assert ROOT / "cost" / "table.py" in files
    assert len(ENTRIES) == 2
    assert files <= {source for file in ENTRIES for source in jit.sources(file)}


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
