"""Who may import whom (docs/design.md), read from the source; and what `import atlas` and `atlas --help` may load."""

from __future__ import annotations

import ast
import functools
import re
import resource
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SRC = ROOT / "src"
MAX_MODULE_LINES, MAX_FUNCTION_LINES = 400, 60
MAY_IMPORT = {
    "addresses": set(),
    "arguments": set(),
    "callers": set(),
    "errors": set(),
    "jit": set(),
    "lifetime": set(),
    "priority": set(),
    "console": {"ir"},
    "api": {"ir", "spec", "cost", "schedules", "evaluate", "planner", "view", "launch"},
    "ir": set(),
    "weather": {"ir"},
    "spec": {"weather"},
    "catalogue": {"spec"},
    "cost": {"ir", "spec", "weather"},
    "sim": {"ir", "spec", "cost"},
    "fabric": {"ir", "spec", "cost", "sim"},
    "schedules": {"ir", "spec", "cost", "sim"},
    "evaluate": {"ir", "spec", "cost", "sim", "schedules"},
    "planner": {"ir", "spec", "cost", "sim", "schedules", "evaluate"},
    "sailor": {"ir", "spec", "cost", "sim", "schedules", "evaluate", "planner"},
    "wan": {"ir", "weather"},
    "runtime": {"ir", "wan", "weather", "spec", "cost"},
    "view": {"ir"},
    "evidence": {"ir", "spec", "cost", "view"},
    "ui": {"ir", "spec", "cost", "sim", "schedules", "evaluate", "planner", "view", "evidence"},
    "launch": {"ir", "spec", "cost", "sim", "fabric", "schedules", "evaluate", "planner", "wan", "runtime"},
}
"""`ir, spec <- cost <- sim <- schedules <- evaluate <- planner <- launch <- cli`; `planner <- sailor`;
`ir <- weather <- spec, wan`; `ir <- wan <- runtime <- launch`; `spec <- runtime`;
`spec, cost <- runtime`; `sim <- fabric <- launch`; `ir <- view <- cli`. Everybody may import `addresses`,
`arguments`, `callers`, `errors`, `jit`, `lifetime` and `priority`; `cli` and `commands` may import all. `console` is
for command lines, BubbleTea's too."""
EVERYBODYS = ("addresses", "arguments", "callers", "errors", "jit", "lifetime", "priority")
FREE = {"cli", "commands", "__main__"}
BUBBLETEA_MAY_IMPORT = {
    "constants": set(),
    "costs": {"atlas.spec", "atlas.cost"},
    "frames": set(),
    "flags": {"atlas.console"},
    "model_identity": set(),
    "kv_blocks": {"frames"},
    "nixl_plane": set(),
    "kv_server": {"frames", "kv_blocks", "nixl_plane"},
    "windows": {"atlas.ir", "atlas.spec", "atlas.cost"},
    "admit": {"atlas.ir", "costs", "windows"},
    "prefill": {"atlas.wan", "atlas.runtime", "costs", "frames", "kv_blocks", "kv_server", "model_identity"},
    "handoff": {
        *("atlas.runtime", "atlas.wan", "frames", "kv_blocks", "kv_server", "model_identity", "nixl_plane", "prefill")
    },
    "serve": {
        *("atlas.ir", "atlas.spec", "atlas.cost", "atlas.sim", "atlas.evaluate", "atlas.runtime", "atlas.launch"),
        *("atlas.console", "atlas.wan", "atlas.ui"),
        *("costs", "flags", "frames", "kv_blocks", "kv_server", "windows", "admit", "prefill", "handoff"),
    },
    "sim": {
        *("atlas.ir", "atlas.spec", "atlas.cost", "atlas.sim", "atlas.evaluate", "atlas.view", "atlas.console"),
        *("costs", "flags", "windows", "admit"),
    },
    "vllm": {"frames", "kv_blocks", "model_identity", "nixl_plane", "handoff"},
    "bench": {"atlas.console"},
    "cli": {"atlas.cli"},
}
"""`windows <- admit <- sim`; `frames <- kv_blocks <- kv_server <- prefill <- handoff <- serve`; `admit <- serve`;
`handoff <- vllm`. Nobody imports Atlas's commands or planner. Everybody may import `atlas.addresses`, `atlas.callers`,
`atlas.errors`, `atlas.jit`, `atlas.lifetime` and `atlas.priority`."""
BUBBLETEA_TORCH = {"kv_blocks", "kv_server", "prefill", "handoff", "serve", "vllm"}
HEAVY = ("torch", "numba", "pydantic", "numpy", "rich")
MAX_SECONDS = 0.3


def imports(path: Path) -> Iterator[str]:
    """Every module that a file imports, at its top or inside a function; not what only a type checker sees."""
    for node in _executed(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module or ""
            yield from (f"{node.module}.{name.name}" for name in node.names)


def _executed(tree: ast.AST) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            continue
        yield node
        yield from _executed(node)


def package_of(path: Path) -> str:
    """A top-level package of Atlas, or a module beside them."""
    return path.relative_to(SRC / "atlas").parts[0].removesuffix(".py")


def modules() -> list[Path]:
    return sorted((SRC / "atlas").rglob("*.py"))


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(SRC)))
def test_a_package_imports_only_what_lies_to_its_left(path: Path) -> None:
    own = package_of(path)
    for name in imports(path):
        parts = name.split(".")
        assert parts[0] != "bubbletea", f"{path} imports bubbletea: it is the other way round"
        if parts[0] == "torch":
            assert own == "runtime", f"{path} imports torch: only runtime does"
        if parts[0] != "atlas" or own in FREE or own == "__init__" or len(parts) == 1:
            continue
        allowed = {"__version__", *EVERYBODYS, own} | MAY_IMPORT[own]
        assert parts[1] in allowed, f"{own} may import {sorted(allowed)}, but {path.name} imports {name}"


def test_every_package_has_a_rule() -> None:
    assert {package_of(path) for path in modules()} - FREE - {"__init__"} == set(MAY_IMPORT)


MAPPED = MAY_IMPORT.keys() | FREE - {"__main__"} | {"bubbletea", "tvcache"}


def test_the_table_and_the_drawing_of_the_architecture_name_every_package() -> None:
    page = (ROOT / "docs/architecture.md").read_text()
    table = page[page.index("| package | contains |") : page.index("\n## Inside")]
    cells = " ".join(line.split("|")[1] for line in table.splitlines() if line.startswith("| `"))
    assert MAPPED - set(re.findall(r"`(\w+)`", cells)) == set()
    drawing = (ROOT / "docs/img/architecture.svg").read_text()
    boxes = ", ".join(re.findall(r'<text class="n"[^>]*>([^<]+)</text>', drawing))
    assert set(boxes.split(", ")) == MAPPED


BUBBLETEA = sorted((SRC / "bubbletea").rglob("*.py"))


@pytest.mark.parametrize("path", BUBBLETEA, ids=lambda path: str(path.relative_to(SRC)))
def test_a_part_of_bubbletea_imports_only_what_lies_below_it(path: Path) -> None:
    own = path.relative_to(SRC / "bubbletea").parts[0].removesuffix(".py")
    for name in imports(path):
        parts = name.split(".")
        assert parts[0] != "tvcache", f"{path} imports {name}: tvcache is a package of its own"
        if parts[0] == "torch":
            assert own in BUBBLETEA_TORCH, f"{path} imports torch: only {sorted(BUBBLETEA_TORCH)} may"
        if parts[0] not in ("atlas", "bubbletea") or len(parts) == 1:
            continue
        part = f"atlas.{parts[1]}" if parts[0] == "atlas" else parts[1]
        everybody = {f"atlas.{name}" for name in ("__version__", *EVERYBODYS)}
        allowed = {own, "constants"} | everybody | BUBBLETEA_MAY_IMPORT[own]
        assert part in allowed, f"bubbletea.{own} may import {sorted(allowed)}, but {path.name} imports {name}"


def modules_of_src() -> dict[str, Path]:
    """By dotted name; a package's name is that of its `__init__`."""
    paths = {".".join(path.relative_to(SRC).with_suffix("").parts): path for path in SRC.rglob("*.py")}
    return {name.removesuffix(".__init__"): path for name, path in paths.items()}


@functools.cache
def graph() -> dict[str, set[str]]:
    """By module of src: the modules of src that it imports. `from package import module` imports the module."""
    known = modules_of_src()
    found: dict[str, set[str]] = {}
    for name, path in known.items():
        others = found.setdefault(name, set())
        for node in _executed(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                others.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                inside = [f"{node.module}.{alias.name}" for alias in node.names]
                others.update(one if one in known else node.module for one in inside)
        others.intersection_update(known.keys() - {name})
    return found


def cycles(edges: dict[str, set[str]]) -> list[list[str]]:
    """Groups of nodes that reach each other."""

    def reached(start: str) -> set[str]:
        seen, waiting = set[str](), [start]
        while waiting:
            for other in edges.get(waiting.pop(), set()) - seen:
                seen.add(other)
                waiting.append(other)
        return seen

    reach = {node: reached(node) for node in edges}
    groups = {frozenset(b for b in reach[a] if a in reach.get(b, ())) for a in edges if a in reach[a]}
    return sorted(sorted(group) for group in groups)


def parts_of(package: str) -> dict[str, set[str]]:
    """The modules and packages right below a package, and which of each other they import."""
    prefix = f"{package}." if package else ""

    def part(module: str) -> str | None:
        if module == package:
            return "__init__"
        return module.removeprefix(prefix).split(".")[0] if module.startswith(prefix) else None

    edges: dict[str, set[str]] = {}
    for module, others in graph().items():
        own = part(module)
        if own is not None:
            edges.setdefault(own, set()).update(p for p in map(part, others) if p is not None and p != own)
    return edges


def packages() -> list[str]:
    return ["", *sorted(name for name, path in modules_of_src().items() if path.name == "__init__.py")]


@pytest.mark.parametrize("package", packages(), ids=lambda package: package or "src")
def test_no_import_cycles_between_the_parts_of_a_package(package: str) -> None:
    assert cycles(parts_of(package)) == []


def test_cycles_are_found() -> None:
    edges = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set(), "e": {"d"}}
    assert cycles(edges) == [["a", "b", "c"]]


@pytest.mark.parametrize("code", ["import atlas", "from atlas.cli import top_parser; top_parser().format_help()"])
def test_importing_atlas_and_its_help_load_nothing_heavy(code: str) -> None:
    script = f"import sys; {code}; print(*[name for name in {HEAVY!r} if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == ""


def _children_s() -> float:
    """CPU time of the processes that we have waited for: a busy host does not change it, as it does wall time."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.mark.parametrize("words", [("-c", "import atlas"), ("-m", "atlas.cli", "--help")], ids=["import", "help"])
def test_importing_atlas_and_its_help_are_instant(words: tuple[str, ...]) -> None:
    best = float("inf")
    for _ in range(8):
        began = _children_s()
        subprocess.run([sys.executable, *words], capture_output=True, check=True)
        best = min(best, _children_s() - began)
        if best <= MAX_SECONDS:
            return
    pytest.fail(f"{' '.join(words)} took {best:.2f} s at best, the bar is {MAX_SECONDS} s")


@pytest.mark.parametrize("name", ["sim", "schedules", "ir.analysis", "view", "evaluate", "commands.simulate"])
def test_what_is_small_is_simulated_without_numba_or_torch(name: str) -> None:
    script = f"import sys, atlas.{name}; print(*[m for m in ('torch', 'numba') if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == ""


TVCACHE = sorted((SRC / "tvcache").rglob("*.py"))
STARLETTE = {"server", "serve", "metrics", "fast_http"}
"""Modules of tvcache that may need more than the standard library: its `tvcache` extra."""


@pytest.mark.parametrize("path", TVCACHE, ids=lambda path: str(path.relative_to(SRC)))
def test_tvcache_stands_alone(path: Path) -> None:
    for name in imports(path):
        first = name.split(".")[0]
        assert first not in ("atlas", "bubbletea"), f"{path} imports {name}: tvcache is a package of its own"
        if path.stem not in STARLETTE:
            known = first == "tvcache" or first in sys.stdlib_module_names
            assert known or path.parent.name == "adapters", f"{path} imports {name}: only {STARLETTE} and adapters may"


@pytest.mark.parametrize("path", sorted((SRC / "atlas").rglob("*.py")), ids=lambda path: str(path.relative_to(SRC)))
def test_atlas_does_not_need_tvcache(path: Path) -> None:
    assert not any(name.split(".")[0] == "tvcache" for name in imports(path))


def test_no_two_classes_have_one_name() -> None:
    """`X` and `_X` are one name."""
    homes: dict[str, list[str]] = {}
    for name, path in modules_of_src().items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name.lstrip("_"), []).append(f"{name}.{node.name}")
    assert [classes for classes in homes.values() if len(classes) > 1] == []


def imports_without_reason(path: Path) -> Iterator[str]:
    """Imports inside functions that neither handle a missing package nor have a comment, on them or above, nor a
    docstring of the module or function that speaks of imports."""
    text = path.read_text()
    tree, lines = ast.parse(text), ["", *text.splitlines()]
    if "import" in (ast.get_docstring(tree) or "").lower():
        return
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            if "import" in (ast.get_docstring(function) or "").lower():
                continue
            tried = {
                inner
                for node in ast.walk(function)
                if isinstance(node, ast.Try) and any("ImportError" in ast.dump(caught) for caught in node.handlers)
                for inner in node.body
            }
            for node in ast.walk(function):
                if isinstance(node, ast.Import | ast.ImportFrom) and node not in tried:
                    first = node.lineno
                    while lines[first - 1].lstrip().startswith(("import ", "from ")):
                        first -= 1
                    if not any("#" in line for line in lines[first - 1 : (node.end_lineno or first) + 1]):
                        yield f"{path.relative_to(SRC)}:{node.lineno}"


def test_imports_inside_functions_have_a_reason() -> None:
    assert [place for path in modules_of_src().values() for place in imports_without_reason(path)] == []


def test_functions_and_modules_are_short() -> None:
    long = []
    for name, path in modules_of_src().items():
        text = path.read_text()
        if (lines := len(text.splitlines())) > MAX_MODULE_LINES:
            long.append((name, lines))
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > MAX_FUNCTION_LINES:
                    long.append((f"{name}.{node.name}", lines))
    assert long == []


def test_no_two_test_files_have_one_name() -> None:
    """They are imported by name."""
    names = Counter(path.name for path in Path(__file__).parent.rglob("*.py") if path.name != "conftest.py")
    assert [name for name, count in names.items() if count > 1] == []
