"""No module-level number is defined twice under one name: import it instead."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

SRC = Path(__file__).parents[1] / "src"
BY_CHANCE = {
    "VERSION": "every file format and protocol counts its own versions",
    "POLL_S": "every loop has a period of its own",
    "TICK_S": "every loop has a period of its own",
    "FEW": "what is few depends on what is counted",
    "PARTS": "different things are divided",
    "SAME": "times of plans, estimates and throughputs are compared",
    "ROUNDING": "different quantities are rounded",
    "REMEMBERED": "different caches",
    "BACKLOG": "different sockets",
    "TAIL_LINES": "of a worker's log, and of the log of a rank in an error",
    "HOUR_S": "a unit, and a limit of an emulator",
    "MAX_POINTS": "different charts",
    "MAX_BYTES": "different files and answers",
    "MAX_HEADER_BYTES": "of a checkpoint's calls, and of the service's HTTP",
    "CHUNK_BYTES": "of a data set, and of a sum",
    "START_TIMEOUT_S": "of workers, and of the emulator",
    "END_S": "of different threads and processes",
    "PATIENCE_S": "of different connections and requests",
    "IDLE_S": "of different loops",
    "MOST_HOLD_S": "of slices in a relay, and of the first slice after a rest",
    "GIB": "a unit; light modules of bubbletea and sailor do not import atlas.cost, which loads pydantic",
    "SWITCH_INTERVAL_S": "a dedicated prefill worker does not import atlas.runtime, which loads torch",
}
"""Names that different modules use for different things, and why their values are equal by chance."""
NUMBER = (ast.Constant, ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop)


def number(node: ast.expr) -> float | None:
    """The value of an expression of literals, such as `4 << 20`."""
    if not all(isinstance(inner, NUMBER) for inner in ast.walk(node)):
        return None
    value = eval(compile(ast.Expression(node), "", "eval"), {})
    return value if type(value) in (int, float) else None


def constants(path: Path) -> Iterator[tuple[str, float]]:
    """Names, without leading underscores, and values."""
    for node in ast.parse(path.read_text()).body:
        pairs: list[tuple[ast.expr, ast.expr | None]] = []
        if isinstance(node, ast.AnnAssign):
            pairs = [(node.target, node.value)]
        elif isinstance(node, ast.Assign):
            target, value = node.targets[0], node.value
            several = isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple)
            pairs = list(zip(target.elts, value.elts, strict=False)) if several else [(target, value)]
        for target, value in pairs:
            if isinstance(target, ast.Name) and value is not None and (found := number(value)) is not None:
                yield target.id.lstrip("_"), found


def twice(*packages: str) -> dict[tuple[str, float], list[str]]:
    homes: dict[tuple[str, float], list[str]] = {}
    for path in sorted(path for package in packages for path in (SRC / package).rglob("*.py")):
        for constant in constants(path):
            homes.setdefault(constant, []).append(str(path.relative_to(SRC)))
    return {constant: paths for constant, paths in homes.items() if len(paths) > 1}


def test_no_number_is_defined_in_two_modules() -> None:
    found = {**twice("atlas", "bubbletea"), **twice("tvcache")}
    assert {constant: paths for constant, paths in found.items() if constant[0] not in BY_CHANCE} == {}


def test_exceptions_are_still_needed() -> None:
    assert BY_CHANCE.keys() <= {name for name, _ in twice("atlas", "bubbletea")}
