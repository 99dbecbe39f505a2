"""A void run, and results of an earlier call, do not count in a bench."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

BENCH = Path(__file__).parents[1] / "bench"
sys.path.insert(0, str(BENCH))
sys.path.insert(0, str(BENCH.parent / "tests" / "launch"))

import faults  # noqa: E402
import serve_slowdown  # noqa: E402
import testbed  # noqa: E402
import torch_pipelining  # noqa: E402
import wan  # noqa: E402
import wan_emulator  # noqa: E402
import wan_faults  # noqa: E402
import weather  # noqa: E402
from common.claims import read_claims  # noqa: E402
from common.report import MISSED, NOT_MEASURED, OK, Report  # noqa: E402
from lab.lines import Lines  # noqa: E402

from atlas.wan.emulator.lateness import EmulatorLateError  # noqa: E402

LATE = "the emulator was 9.0 ms late"


def row(schedule: str, tcp: str, measured_s: float, void: str = "", workers: int = 12) -> testbed.Row:
    scale = 1 if (workers, tcp) == (12, "turns") else 3
    return testbed.Row(schedule, tcp, workers, "paced", scale, measured_s, measured_s, 0, 0, 0, 0, 0.1, 0, 0, void)


def test_a_speed_up_over_a_void_run_is_void_and_the_others_count(capsys: pytest.CaptureFixture[str]) -> None:
    ours = row("atlas", "turns", 3.0)
    assert testbed.report([ours, row("gpipe", "many", 1.5), row("varuna", "many", 0.5, LATE)]) == OK
    said = capsys.readouterr().out
    assert '"name": "12 workers: Atlas over gpipe, many", "value": 1.5' in said
    assert '"name": "12 workers: Atlas over varuna, many", "skipped": "the emulator was 9.0 ms late"' in said
    assert testbed.report([ours, row("gpipe", "many", 1.1)]) == MISSED


def test_no_speed_up_is_reported_if_our_run_is_void(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [row("atlas", "turns", 3.0, LATE), row("gpipe", "many", 0.5)]
    assert testbed.report(rows) == OK, "the prediction of gpipe was measured"
    assert '"name": "12 workers: Atlas over gpipe, many", "skipped"' in capsys.readouterr().out
    assert testbed.report([row("atlas", "turns", 3.0, LATE)]) == NOT_MEASURED


def test_runs_of_an_earlier_call_do_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "12-gpipe-many-paced.html").write_text("a timeline of last week")
    (tmp_path / "12-gpipe-many-paced.json").write_text("{}")
    monkeypatch.setattr(testbed.world, "probe", lambda *_: testbed.world.Found(10**6, 10**6, 0))
    monkeypatch.setattr(testbed, "one_run", lambda name, tcp, workers, found, args: row(name, tcp, 1.0, LATE, workers))
    args = argparse.Namespace(
        workers=[6], schedules=["atlas"], tcp=["many"], scale=None, steps=1, device="paced", quick=True, out=tmp_path
    )
    found = testbed.measure(args)
    assert [(r.workers, r.schedule, r.tcp, r.void) for r in found] == [(6, "atlas", "many", LATE)]
    assert testbed.report(found) == NOT_MEASURED
    assert not list(tmp_path.glob("*.html"))


def test_a_run_without_its_fault_is_void_and_a_failed_run_is_a_failure() -> None:
    struck = {"event": "cut", "same": True, "starts": 1}
    missed = {"event": "kill", "same": None, "starts": 1}
    assert faults.print_report([missed]) == NOT_MEASURED
    assert faults.print_report([missed, struck]) == OK
    assert faults.print_report([struck, {**struck, "same": False}]) == MISSED


def test_no_speed_is_reported_if_others_used_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    others = iter([0.0, 0.9, 0.9, 0.9, 0.0, 0.0, 0.0])
    monkeypatch.setattr(torch_pipelining, "one_round", lambda size, **_: torch_pipelining.Round(1, 1, 0, next(others)))
    void, counted = Report("void", ""), Report("counted", "")
    torch_pipelining.measure("small", 2, 3, void)
    assert [row["name"] for row in void.rows if "skipped" in row] == ["small: our speed over torch's"]
    torch_pipelining.measure("small", 2, 3, counted)
    assert [row["ok"] for row in counted.rows if row["name"] == "small: our speed over torch's"] == [True]


def test_no_round_starts_after_the_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_pipelining, "one_round", lambda size, **_: torch_pipelining.Round(1, 1, 0, 0.9))
    late = Report("late", "")
    torch_pipelining.measure("small", 2, 10**6, late, limit_s=0.0)
    assert [row["ok"] for row in late.rows] == [True, None], "the losses of the first round agree; no speed is reported"


def test_the_cost_of_nat_is_judged_only_if_the_bar_is_outside_its_interval(capsys: pytest.CaptureFixture[str]) -> None:
    from real_sites import Span, report_ratio

    def verdict(*ratios: float) -> bool | None:
        report = Report("NAT", "no NAT")
        spans = [Span(False, [1.0, 1.0, 1.0], [ratio, 0.9 * ratio, 1.1 * ratio], 0, 0.1) for ratio in ratios]
        report_ratio(report, spans)
        return bool(report.rows[-1]["ok"]) if report.rows[-1]["ok"] is not None else None

    assert verdict(1.00, 1.01, 1.02, 1.00) is True
    assert verdict(1.10, 1.11, 1.12, 1.10) is False
    assert verdict(0.90, 1.01, 1.12, 1.00) is None, "the interval has the bar in it"
    assert verdict(1.00) is None, "one span has no interval"
    report = Report("NAT", "no NAT")
    report_ratio(report, [Span(False, [], [], 3, 0.1)])
    assert "no block of 5 s" in report.rows[-1]["skipped"]


def test_a_few_runs_beside_a_competing_flow_are_not_judged() -> None:
    """The model is 33 % off and replay 40 %: both bars are missed if there are runs enough."""

    def judged(num_paths: int, num_void: int = 0) -> Lines:
        lines, ours = Lines(), {name: {"throughput": 1.4} for name in weather.REACTIVE_METHODS}
        figures = {**ours, "true": {"throughput": 1.0}, "auto": {"throughput": 1.33}}
        about = {"part": "reactive", "seconds": 8.0, "lead_s": weather.LEADS_S[0], "rivals": 1}
        keys = [(path, control) for path in range(num_paths) for control in weather.TESTED]
        rows = [{**about, "path": path, "control": control, "figures": figures} for path, control in keys]
        for row in rows[:num_void]:
            row["figures"] = None
        weather.verdict(lines, rows)
        return lines

    few, voids, enough = judged(2), judged(6, num_void=1), judged(6)
    assert [line["ok"] for line in few.rows] == [None] * 4
    assert [line["ok"] for line in voids.rows[:2]] == [None, None]
    assert [line["ok"] for line in enough.rows[:2]] == [False, False]
    assert [line["name"] for line in few.rows] == [line["name"] for line in enough.rows], "claims find their lines"


def test_a_block_with_a_late_emulator_or_few_steps_does_not_count() -> None:
    from lab.site_runs import Block
    from real_sites import span_of

    def run(seconds: float, late: str, first: int = 11) -> SimpleNamespace:
        """Twelve steps a block; three blocks."""
        blocks = [Block(12.0 * k, 12.0 * (k + 1), late if k == 1 else "") for k in range(3)]
        steps = [{"step": k + 1, "time": k + 0.5, "iteration_s": seconds} for k in range(36)]
        counted = lambda began, ended: [  # noqa: E731
            s["iteration_s"] for s in steps if s["step"] >= first and began < s["time"] <= ended
        ]
        return SimpleNamespace(blocks=blocks, counted=counted)

    found = span_of(run(1.0, ""), run(1.01, "late"), control=False, others_cores=0.0)
    assert (list(found.plain_s), found.num_late) == ([1.0], 1)
    assert found.ratio == pytest.approx(1.01)


CLAIMS = read_claims(BENCH.parent / "docs" / "claims.md")


def lines_of(bench: str, *parts: str) -> set[str]:
    """The lines of its claims that contain one of `parts`."""
    return {claim.line for claim in CLAIMS if claim.bench == bench and any(part in claim.line for part in parts)}


def void_lines(rows: list[dict[str, object]], wanted: set[str]) -> set[str]:
    """Of `wanted`, those that were reported as not measured."""
    return {line for line in wanted if any(line in str(row["name"]) and "skipped" in row for row in rows)}


def late(*_: object, **__: object) -> None:
    raise EmulatorLateError("9.0 ms late")


def test_void_runs_of_the_transport_name_the_lines_of_their_claims(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = Lines()
    for name in ("two_nodes", "cells"):
        monkeypatch.setattr(wan, name, late)
    wan.far(lines, "", quick=True)
    wan.cell(lines, quick=True)
    wanted = lines_of("wan", "")
    assert len(wanted) == 2
    assert void_lines(lines.rows, wanted) == wanted


def test_without_root_the_lines_of_claims_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    found = list[Lines]()
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    for module in (wan, weather):
        monkeypatch.setattr(module, "Lines", lambda: found.append(Lines()) or found[-1])
    monkeypatch.setattr(sys, "argv", ["wan.py", "--only", "far,cell"])
    assert wan.main() == NOT_MEASURED
    monkeypatch.setattr(sys, "argv", ["weather.py", "--part", "senders", "--part", "reactive"])
    assert weather.main() == NOT_MEASURED
    for bench, lines in zip(("wan", "weather"), found, strict=True):
        assert void_lines(lines.rows, lines_of(bench, "")) == lines_of(bench, "")
    lines = Lines()
    wan_faults.garbage(lines, 10, "")
    assert void_lines(lines.rows, {"speed during the flood"}) == lines_of("wan_faults", "flood")


def test_void_runs_of_faults_emulator_and_weather_name_the_lines_of_their_claims(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines = Lines()
    monkeypatch.setattr(wan_faults, "garbage", late)
    for part in ("broken_connections", "certificates", "sealed"):
        monkeypatch.setattr(wan_faults, part, lambda *_: None)
    monkeypatch.setattr(wan_faults, "Lines", lambda: lines)
    monkeypatch.setattr(sys, "argv", ["wan_faults.py", "--quick"])
    assert wan_faults.main() == NOT_MEASURED
    assert void_lines(lines.rows, lines_of("wan_faults", "flood")) == {"speed during the flood"}
    behind = SimpleNamespace(reason=lambda: "9.0 ms late", p99_s=0.009, worst_s=0.009)
    monkeypatch.setattr(wan_emulator, "proxy_run", lambda _: SimpleNamespace(late=behind, priority="nice"))
    wan_emulator.proxy_with_twelve_workers(lines, realtime=True)
    assert void_lines(lines.rows, lines_of("wan_emulator", "")) == {"worst of 16 rates off"}
    weather.verdict(lines, [{"part": part, "figures": None} for part in ("senders", "reactive")])
    assert void_lines(lines.rows, lines_of("weather", "")) == lines_of("weather", "")


def test_a_noisy_run_of_serving_beside_training_is_void_and_a_slow_one_misses(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def judged(alone: list[float], loaded: list[float]) -> Report:
        serve_slowdown.judge(report := Report("", ""), "512 tokens", alone, loaded)
        return report

    quiet = [1.0, 1.001, 0.999, 1.0] * 10
    assert [row["ok"] for row in judged(quiet, quiet).rows] == [True, True]
    assert [row["ok"] for row in judged(quiet, [1.02 * s for s in quiet]).rows] == [False, False]
    noisy = judged(quiet, [0.8, 1.0, 1.1, 1.3] * 10)
    assert noisy.finish() == NOT_MEASURED
    assert void_lines(noisy.rows, lines_of("serve_slowdown", "512")) == lines_of("serve_slowdown", "512")
    rare = judged(quiet, [*quiet[:38], 1.2, 1.2])
    assert [row["name"] for row in rare.rows if "skipped" in row] == ["512 tokens: mean iteration longer by"]
