"""What the command lines share: types and flags for argparse, checks on the files that a command writes, and tables,
remarks, JSON and progress on the terminal. Results go to stdout, everything else to stderr.

Knows no command; `atlas.commands` and `bubbletea` use it.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atlas.arguments import NUMBERS, WHOLE
from atlas.errors import AtlasError, SpecError
from atlas.ir.replace import write_whole

if TYPE_CHECKING:
    from rich.padding import Padding

PATIENCE_S = 1.0
"""A progress bar appears after this time."""


# ---- numbers and flags -------------------------------------------------------------------------------------
def whole(low: int, high: int) -> Callable[[str], Any]:
    """A whole number from `low` to `high`."""
    return _within(int, "a whole number", low, high)


def number(low: float, high: float) -> Callable[[str], Any]:
    """A number from `low` to `high`; NaN is not allowed."""
    return _within(float, "a number", low, high)


def ranged(name: str) -> Callable[[str], Any]:
    """A number in the range that the API's argument of this name has."""
    return whole(*WHOLE[name]) if name in WHOLE else number(*NUMBERS[name])


def _within(kind: type[int] | type[float], what: str, low: float, high: float) -> Callable[[str], Any]:
    def value_of(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not low <= value <= high:
            span = f"{low} to {high}" if kind is int else f"{low:g} to {high:g}"
            raise argparse.ArgumentTypeError(f"{text!r} is not {what} from {span}")
        return value

    return value_of


def positive(text: str, below: float = 1e9) -> float:
    """A number above zero."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < below:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return value


def share(text: str) -> float:
    """A number between zero and one."""
    value = positive(text)
    if value >= 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be between 0 and 1, such as 0.05")
    return value


def job_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change a key of the job")


def search_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--seed", type=ranged("seed"), default=0, metavar="N", help="seed of the schedule search")
    add(
        "--tries",
        type=ranged("tries"),
        metavar="N",
        help="about how many orders the schedule search tries (default: by the job's size)",
    )


# ---- files -------------------------------------------------------------------------------------------------
def require_writable(path: Path, flag: str) -> None:
    """Raise SpecError where a file of this name cannot be written."""
    folder = path.parent
    if path.is_dir():
        raise SpecError(where=flag, key="file", value=str(path), rule="is a folder", remedy="Name a file in it")
    if path.exists() and not path.is_file() and os.access(path, os.W_OK):
        return  # a device or a pipe: its folder need not be writable
    if not folder.is_dir():
        remedy = f"Create it first: mkdir -p {folder}"
        raise SpecError(where=flag, key="file", value=str(path), rule=f"there is no folder {folder}", remedy=remedy)
    if not os.access(folder, os.W_OK):
        rule = f"folder {folder} cannot be written to"
        raise SpecError(where=flag, key="file", value=str(path), rule=rule, remedy="Choose another place")


def require_apart(paths: Mapping[str, Path], inputs: Iterable[str | Path] = ()) -> None:
    """Raise SpecError where two flags name the same file, or where one names a file that the command reads (also by
    another path): it would be overwritten."""
    sources = [path for path in map(Path, inputs) if path.is_file()]
    taken: dict[Path, str] = {}
    for flag, path in paths.items():
        rule = ""
        if (other := taken.setdefault(path.absolute(), flag)) != flag:
            rule = f"{other} writes to the same file"
        elif path.is_file() and any(path.samefile(source) for source in sources):
            rule = "is an input of this command, and would be overwritten"
        if rule:
            raise SpecError(where=flag, key="file", value=str(path), rule=rule, remedy="Choose another name")


def require_outputs(paths: Mapping[str, Path | str | None], inputs: Iterable[str | Path] = ()) -> dict[str, Path]:
    """The files that flags name, without those that were not given. Raise SpecError where one cannot be written, or
    where two are the same, or one is an input."""
    wanted = {flag: Path(path) for flag, path in paths.items() if path is not None}
    for flag, path in wanted.items():
        require_writable(path, flag)
    require_apart(wanted, inputs)
    return wanted


def require_drawable(path: Path | None, flag: str) -> None:
    """Raise SpecError where the suffix is not that of a chart."""
    if path is not None and path.suffix.lower() not in (".svg", ".html", ".htm"):
        rule = "a chart is written as SVG, or as a page that holds it"
        raise SpecError(where=flag, key="file", value=str(path), rule=rule, remedy="End its name in .svg or .html")


def require_folder(path: Path, flag: str) -> None:
    """Raise SpecError where this folder is not writable and cannot be created."""
    there = next(parent for parent in (path, *path.absolute().parents) if parent.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        rule = f"{there} is not a folder that can be written to"
        raise SpecError(where=flag, key="folder", value=str(path), rule=rule, remedy="Choose another place")


def make_folder(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise AtlasError(f"{path}: cannot be created: {error.strerror}. Choose another place") from error


def secret_in(path: Path, flag: str) -> str:
    """The token or key in a file that a flag names."""
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise AtlasError(f"{flag} {path}: cannot be read: {why}. Name a file with one line") from None


# ---- the terminal ------------------------------------------------------------------------------------------
def show(*things: Any) -> None:
    """Print tables and text, as wide as the terminal (80 columns without one). Indented text stays indented."""
    from rich.console import Console  # 40 ms, which JSON and errors do not need

    console = Console(highlight=False)
    with console.capture() as capture:
        for thing in things:
            console.print(_indented(thing) if isinstance(thing, str) else thing, markup=False)
    sys.stdout.write(capture.get())


def _indented(line: str) -> str | Padding:
    from rich.padding import Padding  # as in `show`
    from rich.text import Text

    words = line.lstrip(" ")
    return line if words == line else Padding(Text(words), (0, 0, 0, len(line) - len(words)), expand=False)


def print_json(data: Any) -> None:
    sys.stdout.write(as_json(data))


def as_json(data: Any) -> str:
    """Strict JSON: NaN and infinity become null."""
    return json.dumps(_finite(data), indent=2, allow_nan=False) + "\n"


def _finite(data: Any) -> Any:
    if isinstance(data, dict):
        return {key: _finite(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_finite(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data


def say(text: str) -> None:
    """Print to stderr."""
    sys.stdout.flush()
    print(text, file=sys.stderr)


def remark(*lines: object) -> None:
    """Print each line to stderr, with the program's name before it."""
    for line in lines:
        say(f"atlas: {line}")


def write_text(path: Path, text: str) -> None:
    """Write a file that the user asked for, and say so."""
    write_whole(path, text.encode(errors="replace"))
    say(f"wrote {path}")


class Meter:
    """A progress bar on stderr, shown after `PATIENCE_S`, and only on a terminal."""

    def __init__(self) -> None:
        from rich.console import Console  # as in `show`
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        console = Console(stderr=True)
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[count]}"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
        )
        self._task = self._bar.add_task("", total=None, count="")
        self._timer = threading.Timer(PATIENCE_S, self._bar.start) if console.is_terminal else None

    def __call__(self, what: str, done: int, total: int) -> None:
        count = f"{done:,}/{total:,}" if total else ""
        self._bar.update(self._task, description=what[:30], completed=done, total=total or None, count=count)

    def __enter__(self) -> Meter:
        if self._timer is not None:
            self._timer.daemon = True
            self._timer.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer.join()
            self._bar.stop()
