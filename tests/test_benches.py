"""`make bench` runs every script, and each claim names a script that exists."""

from __future__ import annotations

import ast
import importlib.util
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BENCH = ROOT / "bench"
sys.path.insert(0, str(BENCH))

from common.claims import read_claims  # noqa: E402
from common.report import MISSED, NOT_MEASURED, OK, Report, not_measured  # noqa: E402
from run import (  # noqa: E402
    BENCHES,
    QUICK_S,
    README,
    Outcome,
    ResultFile,
    last_times,
    list_benches,
    quick_order,
    run,
    run_all,
    without_line,
)
from run import main as run_benches  # noqa: E402

from atlas.errors import InfeasibleError  # noqa: E402

SCRIPTS = sorted(path.stem for path in BENCH.glob("*.py") if path.stem != "run")


def test_benches_wait_for_messages_that_commands_print() -> None:
    """A reworded message would end a bench without a figure."""
    trees = [ast.parse(path.read_text()) for path in (ROOT / "src").rglob("*.py")]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    docs = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    printed = [str(node.value) for node in nodes if isinstance(node, ast.Constant) and id(node) not in docs]
    quoted = re.compile(r'"([^"]+)" in [\w.\[\]]+\.said\b|\.said(?:\([^)]*\))?\.count\("([^"]+)"\)')
    waited = {one or other for path in BENCH.glob("*.py") for one, other in quoted.findall(path.read_text())}
    assert waited
    assert [words for words in sorted(waited) if not any(words in text for text in printed)] == []


def test_make_bench_runs_every_script() -> None:
    assert sorted(BENCHES) == SCRIPTS


@pytest.mark.parametrize("name", SCRIPTS)
def test_quick_form_is_an_option_of_the_script(name: str) -> None:
    wanted = [argument for argument in BENCHES[name].quick or () if argument.startswith("--")]
    tree = ast.parse((BENCH / f"{name}.py").read_text())
    strings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    assert set(wanted) <= strings


@pytest.mark.parametrize("file", sorted(BENCH.rglob("*.py")), ids=lambda file: file.stem)
def test_what_a_script_imports_of_the_packages_exists(file: Path) -> None:
    """Long benches run rarely: a name that moved would be found hours later."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in ("atlas", "bubbletea"):
            module = importlib.import_module(str(node.module))
            for name in node.names:
                assert hasattr(module, name.name) or importlib.util.find_spec(f"{node.module}.{name.name}"), name.name


IMPORT_ALL = """
import importlib.util, pathlib, sys
bench, tests = map(pathlib.Path, sys.argv[1:])
path, loaded = [str(bench), *sys.path], set(sys.modules)
for file in sorted(bench.glob("*.py")):
    sys.path[:] = path
    spec = importlib.util.spec_from_file_location(file.stem, file)
    sys.modules[file.stem] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name, one in list(sys.modules.items()):
        if name not in loaded and (getattr(one, "__file__", None) or "").startswith(str(tests)):
            del sys.modules[name]
"""
"""Each script finds what it imports by itself, without the search path of the scripts before it."""


def test_every_script_finds_what_it_imports() -> None:
    command = [sys.executable, "-c", IMPORT_ALL, str(BENCH), str(BENCH.parent / "tests")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_the_figures_of_the_readme_fit_into_the_quick_run() -> None:
    assert quick_order()[: len(README)] == sorted(README, key=lambda name: BENCHES[name].quick_s)
    assert sum(BENCHES[name].quick_s for name in README) <= QUICK_S


def test_a_bench_that_would_end_after_the_budget_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_all(["wan", "testbed"], full=False, budget_s=1.0) == []
    assert "left out" in capsys.readouterr().out


def test_a_bench_that_is_slower_than_the_budget_is_cut_off(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    limits_s = list[float]()

    def slow(name: str, arguments: tuple[str, ...], minutes: float) -> Outcome:
        limits_s.append(60 * minutes)
        return Outcome(name, -signal.SIGKILL, 60 * minutes + 0.1)

    monkeypatch.setattr("run.run", slow)
    assert run_all(["accuracy_a100"], full=False, budget_s=20.0) == []
    assert limits_s[0] == pytest.approx(20.0, abs=1.0)
    assert "left out or cut off, no time within 0 minutes: accuracy_a100" in capsys.readouterr().out
    (failed,) = run_all(["accuracy_a100"], full=False, budget_s=600.0)
    assert limits_s[1] == 60.0, "its own limit"
    assert failed.verdict == "FAILED (-9)"


def test_quick_run_names_claims_without_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("run.run", lambda name, *_: Outcome(name, OK, 1.0, [{"name": "other", "ok": True}]))
    monkeypatch.setattr(sys, "argv", ["run.py", "--quick", "--only", "engine"])
    assert run_benches() == 1
    assert "bench/engine.py printed no line 'compiled engine'" in capsys.readouterr().out


def test_an_interrupted_run_continues_with_the_next_bench(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = ResultFile(tmp_path / "bench.jsonl", resume=True, full=False)
    kept.add(Outcome("wan", 0, 60.0, [{"name": "a line", "ok": True}]))
    again = ResultFile(tmp_path / "bench.jsonl", resume=True, full=False)
    (outcome,) = run_all(["wan"], full=False, budget_s=0.0, out=again)
    assert outcome == Outcome("wan", 0, 60.0, [{"name": "a line", "ok": True}])
    assert "bench/wan.py: its results are in" in capsys.readouterr().out
    assert not ResultFile(tmp_path / "bench.jsonl", resume=True, full=True).known, "a quick form is no full one"
    other = ResultFile(tmp_path / "bench.jsonl", resume=False, full=False)
    assert not other.known, "a new run starts with an empty file"


def test_the_list_has_the_times_of_the_last_run_and_marks_estimates(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ResultFile(tmp_path / "bench.jsonl", resume=False, full=True).add(Outcome("wan", 0, 600.0))
    list_benches(last_times(tmp_path / "bench.jsonl"))
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert " 10.0 min" in lines["wan"]
    assert f"~{BENCHES['engine'].minutes / 2:.1f} min" in lines["engine"]


def test_every_claim_names_a_bench() -> None:
    claims = read_claims(ROOT / "docs" / "claims.md")
    assert claims
    assert {claim.bench for claim in claims} <= set(SCRIPTS)


FIGURES = {
    "Megatron runs on A100": "accuracy_a100",
    "runs on GH200": "accuracy_sailor",
    "runs on mixed GPU types": "accuracy_sailor",
    "our own emulated runs": "testbed",
    "speed of Atlas relative to Varuna": "schedules",
    "throughput of the transport": "wan",
    "prefill while training waits": "gpu_fill",
}
"""By the beginning of a row of the README's tables of figures: its bench."""


def test_every_figure_of_the_readme_has_a_claim() -> None:
    text = (ROOT / "README.md").read_text().partition("\n## Figures\n")[2].partition("\n## ")[0]
    first = [line.strip("| ").split(" | ")[0] for line in text.splitlines() if line.startswith("| ")]
    rows = [cell for cell in first if cell not in ("compared with", "what")]
    assert len(rows) == len(FIGURES)
    for row, begins in zip(rows, FIGURES, strict=True):
        assert row.startswith(begins)
    claimed = {claim.bench for claim in read_claims(ROOT / "docs" / "claims.md")}
    assert set(FIGURES.values()) <= claimed
    assert set(FIGURES.values()) == set(README), "the quick run starts with these"


def test_a_better_value_that_is_refused_violates_a_sweep() -> None:
    from monotone import Tally, accepted

    tally, refused = Tally(), float("inf")
    for better_first in ([1.0, 2.0], [1.0, refused], [refused, 2.0], [2.0, 1.0, refused]):
        tally.add(better_first)
    assert (tally.sweeps, tally.violations, tally.refused, tally.worst) == (4, 2, 1, 1.0)

    def seconds(value: float) -> float:
        if value > 2:
            raise InfeasibleError(where="job", key="pp", rule="too many", remedy="Use fewer")
        return value

    assert accepted(seconds, [lambda: 3.0, lambda: 1.0], refused) == [refused, 1.0]
    with pytest.raises(InfeasibleError):
        accepted(seconds, [lambda: 3.0, lambda: 4.0], refused)


def test_claim_without_a_line_is_found() -> None:
    claims = read_claims(ROOT / "docs" / "claims.md")
    assert without_line(claims[:1], [Outcome(claims[0].bench, OK, 1.0, [])]) == claims[:1]
    line = {"name": f"x {claims[0].line} y", "ok": True}
    assert without_line(claims[:1], [Outcome(claims[0].bench, OK, 1.0, [line])]) == []


def test_exit_status_is_ok_missed_or_not_measured(capsys: pytest.CaptureFixture[str]) -> None:
    held, missed, void = (Report("title", "nothing") for _ in range(3))
    held.figure("a", 1.0, "s", at_most=2.0)
    missed.figure("a", 3.0, "s", at_most=2.0)
    missed.figure("b", 3.0, "s")
    void.void("a", "no GPU")
    assert [held.finish(), missed.finish(), void.finish()] == [OK, MISSED, NOT_MEASURED]
    assert not_measured("a", "no GPU") == NOT_MEASURED
    assert '"skipped": "no GPU"' in capsys.readouterr().out


def test_bench_without_a_gpu_is_not_measured() -> None:
    """A real script, run as `make bench` runs it."""
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("this host has a GPU")
    for name in ("gpu_fill", "calibrate_gpu"):
        assert run(name, BENCHES[name].arguments(full=False), 1.0).status == NOT_MEASURED


def test_calibration_runs_through_on_a_cpu() -> None:
    """Without bars: only a GPU has the constants."""
    pytest.importorskip("torch")
    found = run("calibrate_gpu", ("--device", "cpu", "--gpu", "H200", "--shapes", "1", "--repeats", "1"), 3.0)
    assert found.status == OK
    assert [line["ok"] for line in found.lines] == [None] * 3
