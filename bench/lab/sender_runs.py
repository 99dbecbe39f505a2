"""What bench/weather.py runs: a cubic sender over a path, models fitted to its packets, and other senders over the true
path and over each model. A row of figures for each of them, as JSON lines, so that pieces of a bench can be joined.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from atlas.wan.emulator.paths import PathSpec
from atlas.weather.fit import learn
from atlas.weather.packets import PacketTable
from atlas.weather.path_model import WINDOW_NS, PathModel
from lab.senders import Jobs, Sender, run_senders

Row = dict[str, Any]


# ---- models --------------------------------------------------------------------------------------------------------
def path_of(model: PathModel) -> PathSpec:
    """A model as a path of the emulator."""
    replays = model.rivals == 0 and model.cross_bps.any()
    cross = tuple((model.cross_bps / model.capacity_bps).tolist()) if replays else ()
    queue = max(3000, round(model.buffer_bytes))
    return PathSpec(model.rtt_ns / 2e9, None, model.capacity_bps, queue_bytes=queue, cross=cross, rivals=model.rivals)


def replayed(table: PacketTable) -> PathModel:
    """The sender's own rate over time as what the link carries."""
    base = learn(table, "peak").model
    arrived = ~table.lost
    window = (table.sent_ns[arrived] - table.sent_ns[0]) // WINDOW_NS
    rate = np.bincount(window, table.num_bytes[arrived]) * (8e9 / WINDOW_NS)
    cross = np.maximum(0.0, base.capacity_bps - np.maximum(rate, 0.02 * base.capacity_bps))
    return replace(base, cross_bps=cross, known=cross >= 0, method="replay")


def gru_model(table: PacketTable) -> PathModel | None:
    try:
        from atlas.runtime.weather_fit import fit_gru
    except ImportError:
        return None
    return fit_gru(table)


METHODS: dict[str, Callable[[PacketTable], PathModel | None]] = {
    "constant": lambda table: learn(table, "constant").model,
    "replay": replayed,
    "peak": lambda table: learn(table, "peak").model,
    "auto": lambda table: learn(table).model,
    "gru": gru_model,
}


# ---- jobs ----------------------------------------------------------------------------------------------------------
class Recording(NamedTuple):
    """A path to record, and then the models that were fitted."""

    part: str
    number: int
    path: PathSpec
    seconds: float
    methods: tuple[str, ...]
    lead_s: float = 0.0
    """How much earlier a competing flow starts than the sender, if the path has one."""
    until_s: float | None = None
    """No run starts after this moment of the monotonic clock."""
    models: dict[str, PathSpec] = {}  # noqa: RUF012
    said: str = ""


class Test(NamedTuple):
    """Senders of one net."""

    one: Recording
    controls: tuple[str, ...]
    lead_s: float = 0.0
    twice: bool = False


def rivals_of(path: PathSpec, name: str = "rival") -> list[Sender]:
    return [] if path.trunk is None else [Sender(name, path, "cubic", first=True)]


def recorded(one: Recording) -> Recording | None:
    """The models of a path. None: the emulator was late in every try, or the time was over."""
    senders = [Sender("cubic", one.path, "cubic"), *rivals_of(one.path)]
    found = run_senders(senders, one.seconds, one.lead_s, one.until_s)
    if found is None:
        return None
    fitted = {name: model for name in one.methods if (model := METHODS[name](found["cubic"])) is not None}
    said = "".join(f"# {one.part}, path {one.number}, {name}: {_constants(m)}\n" for name, m in fitted.items())
    return one._replace(models={name: path_of(model) for name, model in fitted.items()}, said=said)


def _constants(model: PathModel) -> str:
    figures = f"{model.capacity_bps / 1e6:.4g} Mbit/s, {model.rtt_ns / 1e6:.4g} ms, {model.buffer_bytes / 1e3:.4g} KB"
    return f"{figures}, cross {100 * model.mean_share:.0f} %, flows {model.rivals} ({model.method})"


def tested(test: Test) -> list[Row]:
    """A row for each congestion control; `figures` is None if the run is void. Equal models share a run."""
    one = test.one
    ahead = (0.0,) * round(test.lead_s * 10)
    runs = {path: name for name, path in reversed(one.models.items())}
    senders = []
    for control in test.controls:
        path = one.path if one.path.trunk is None else replace(one.path, trunk=replace(one.path.trunk, name=control))
        senders += [Sender(f"{control} true", path, control), *rivals_of(path, f"{control} rival")]
        senders += [Sender(f"{control} again", path, control)] if test.twice else []
        for model, name in runs.items():
            cross = model.cross and (*ahead, *model.cross)
            senders.append(Sender(f"{control} {name}", replace(model, cross=cross), control))
    tables = run_senders(senders, one.seconds, test.lead_s, one.until_s)
    rows = void(test)
    for row in rows if tables is not None else []:
        assert tables is not None
        names = dict.fromkeys(["true", *(["again"] if test.twice else []), *runs.values()])
        got = {name: figures(tables[f"{row['control']} {name}"], one.seconds) for name in names}
        row["figures"] = got | {name: got[runs[path]] for name, path in one.models.items()}
    return rows


def void(test: Test) -> list[Row]:
    one = test.one
    about = {"part": one.part, "path": one.number, "seconds": one.seconds, "lead_s": test.lead_s}
    same = bool(one.models) and one.models["auto"] == one.models["peak"]
    rivals = one.models["auto"].rivals if one.models else 0
    return [{**about, "control": c, "auto_is_peak": same, "rivals": rivals, "figures": None} for c in test.controls]


def figures(table: PacketTable, seconds: float) -> dict[str, float]:
    arrived = ~table.lost & (table.sent_ns - table.sent_ns[0] < seconds * 1e9)
    delay = table.rtt_ns[arrived]
    return {
        "mean delay": float(delay.mean()),
        "p95 delay": float(np.percentile(delay, 95)),
        "throughput": float(table.num_bytes[arrived].sum()),
    }


# ---- side by side --------------------------------------------------------------------------------------------------
def run_all(
    jobs: Jobs, recordings: Iterable[Recording], tests_of: Callable[[Recording], list[Test]], keep: Callable[[Row], Any]
) -> None:
    """Records paths, and tests each as soon as its models are fitted. The first test of every path comes before the
    second of any. `keep` gets each row as it is made."""
    waiting: dict[Future[Any], Recording | Test] = {jobs.submit(recorded, one): one for one in recordings}
    later: list[list[Test]] = []
    while waiting or later:
        if not any(isinstance(what, Recording) for what in waiting.values()):
            for test in sorted((t for tests in later for t in tests[1:]), key=lambda t: t.lead_s != t.one.lead_s):
                waiting[jobs.submit(tested, test)] = test
            later = []
        for done in wait(waiting, return_when=FIRST_COMPLETED).done if waiting else ():
            what = waiting.pop(done)
            if isinstance(what, Test):
                for row in done.result():
                    keep(row)
                continue
            found = done.result()
            print(found.said if found is not None else "", end="", file=sys.stderr, flush=True)
            tests = tests_of(found or what)
            if found is None:
                for row in (row for test in tests for row in void(test)):
                    keep(row)
                continue
            waiting[jobs.submit(tested, tests[0])] = tests[0]
            later.append(tests)


class RowFile:
    """Rows of figures, one JSON object a line, written as they are made."""

    def __init__(self, path: Path | None) -> None:
        self.rows: list[Row] = []
        self._path, self._began_s = path, time.monotonic()

    def keep(self, row: Row) -> None:
        self.rows.append(row)
        said = "void" if row["figures"] is None else _off(row["figures"])
        at_s = time.monotonic() - self._began_s
        print(f"# {at_s:.0f} s: {row['part']}, path {row['path']}, {row['control']}: {said}", flush=True)
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps(row) + "\n")


def read_rows(files: Iterable[Path]) -> list[Row]:
    """Rows of several pieces. A run that was void in one piece and measured in another counts as measured."""
    rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    found: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        key = tuple(row[name] for name in ("part", "path", "control", "lead_s", "seconds"))
        if found.get(key, row)["figures"] is None or key not in found:
            found[key] = row
    return list(found.values())


def _off(figures: dict[str, dict[str, float]]) -> str:
    true = figures["true"]
    each = {name: [abs(one[key] / true[key] - 1) for key in true] for name, one in figures.items() if name != "true"}
    return "; ".join(f"{name} {'/'.join(f'{100 * off:.1f}' for off in offs)}" for name, offs in each.items())
