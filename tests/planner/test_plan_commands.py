"""`atlas plan` and `atlas whatif` from the command line: what they print, write and refuse."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from atlas import cli

TINY = str(Path(__file__).parents[2] / "examples" / "tiny.yaml")
THREE = str(Path(__file__).parents[2] / "examples" / "three-dcs.yaml")


@pytest.fixture(autouse=True)
def _commands(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("plan", "whatif"):
        if name not in cli.COMMANDS:
            monkeypatch.setitem(cli.COMMANDS, name, "")


def test_plan_prints_the_chosen_plan_and_why_not_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", TINY, "--tries", "2"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("Not worth it: east alone is fastest")
    assert "it would" in out
    assert "low communication" in out
    assert "semantics" in out
    assert "latency: worth it below" in out
    assert "chosen" in out
    assert "x slower (+" in out
    assert "Runnable: yes" in out


def test_plan_writes_what_it_is_asked_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = {flag: tmp_path / name for flag, name in (("out", "p.yaml"), ("page", "p.html"), ("pareto", "p.svg"))}
    flags = [word for flag, path in names.items() for word in (f"--{flag}", str(path))]
    assert cli.main(["plan", THREE, "--tries", "1", "--no-break-even", "--json", *flags]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["plan"]["origin"]["strategy"] == "ours"
    assert data["candidates"][0]["lost"] == ""
    assert data["pareto"]
    assert all(path.stat().st_size > 500 for path in names.values())
    assert cli.main(["whatif", str(names["out"]), "--sweep", "cluster.links[0].latency_ms=5,50", "--no-marginals"]) == 0
    assert "vs now" in capsys.readouterr().out


@pytest.mark.parametrize("strategy", ["algorithm1", "exhaustive"])
def test_the_other_strategies(strategy: str, capsys: pytest.CaptureFixture[str]) -> None:
    keep = ["--keep", "microbatch", "--keep", "pp"]
    assert cli.main(["plan", TINY, "--strategy", strategy, "--tries", "0", "--json", *keep]) == 0
    assert json.loads(capsys.readouterr().out)["plan"]["origin"]["strategy"] == strategy


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["plan"], "JOB.yaml"),
        (["plan", "nope.yaml"], "no such file"),
        (["plan", TINY, "--strategy", "best"], "no such strategy"),
        (["plan", TINY, "--objective", "fun"], "no such objective"),
        (["plan", TINY, "--objective", "cost"], "usd_per_gpu_hour"),
        (["plan", THREE, "--budget", "cheap"], "--budget"),
        (["plan", THREE, "--budget", "1/h"], "misses it by"),
        (["plan", THREE, "--tokens", "1T"], "--deadline"),
        (["plan", TINY, "--keep", "speed"], "--keep"),
        (["plan", TINY, "--set", "cluster.datacenters.east.gpu=H900"], "no such GPU type"),
        (["plan", TINY, "--set", "model.hidden=65536"], "no plan fits"),
        (["plan", TINY, "--out", "/nowhere/plan.yaml"], "no folder"),
        (["plan", THREE, "--pareto", "front.png"], ".svg or .html"),
        (["plan", TINY, "--global-batch", "0"], "whole number"),
        (["plan", TINY, "--from-sailor", ".", "--out", "x.yaml"], "JOB.yaml: cannot be used with --from-sailor"),
        (["plan", "--from-sailor", ".", "--out", "x.yaml"], "--out: cannot be used with --from-sailor"),
        (["plan", "--from-sailor", ".", "--out-sailor", "/nowhere/x.json"], "no folder"),
        (["plan", "--from-sailor", ".", "--strategy", "algorithm1"], "--strategy: cannot be used with --from-sailor"),
        (["plan", "--from-sailor", ".", "--tcp", "one"], "--tcp: cannot be used with --from-sailor"),
        (["plan", "--from-sailor", ".", "--seed", "3"], "--seed: cannot be used with --from-sailor"),
        (["plan", "--from-sailor", ".", "--tries", "0"], "--tries: cannot be used with --from-sailor"),
        (["plan", "--from-sailor", ".", "--no-break-even"], "--no-break-even: cannot be used with --from-sailor"),
        (["plan", TINY, "--out-sailor", "x.json"], "--out-sailor: needs --from-sailor"),
        (["plan", TINY, "--cost", "events"], "--cost: needs --from-sailor"),
        (["plan", TINY, "--cost", "sailor"], "--cost: needs --from-sailor"),
        (["plan", TINY, "--max-usd", "3"], "--max-usd: needs --from-sailor"),
        (["plan", TINY, "--max-usd", "cheap"], "'cheap' is not a positive number"),
        (["schedules", "--torch"], "--torch: needs --show"),
        (["fabric", TINY, "--fault", "late"], "--fault late: needs --rehearse"),
        (["whatif", TINY, "--sweep", "pp"], "key=values"),
        (["whatif", TINY, "--sweep", "speed=1"], "unknown key"),
        (["whatif", TINY, "--sweep", "lose=mars"], "no such datacenter"),
        (["whatif", TINY, "--out", "x.svg"], "needs a sweep over numbers"),
        (["whatif", TINY, "--sweep", "lose=west", "--page", "x"], "--page"),
        (["whatif", TINY, "--monte-carlo", "0"], "whole number"),
    ],
)
def test_bad_input_is_one_message_and_exit_code_2(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = cli.main(words)
    except SystemExit as stop:
        code = int(stop.code or 0)
    said = capsys.readouterr().err
    assert code == 2
    assert message in said
    assert "Traceback" not in said


def test_whatif_draws_a_curve_and_prints_the_bottleneck(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "curve"
    words = ["whatif", TINY, "--sweep", "cluster.wan.latency_ms=1..100:4log", "--monte-carlo", "3", "--page", str(page)]
    assert cli.main(words) == 0
    out = capsys.readouterr().out
    assert "Bottleneck:" in out
    assert "p95" in out
    assert page.read_text().startswith("<!doctype html>")
    assert "<svg" in page.read_text()
    assert "<h2>Bottleneck</h2>" in page.read_text()
    assert "<title>iteration: " in page.read_text()


def test_an_interrupt_prints_the_best_plan_so_far(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from atlas.planner import search

    real, calls = search.simulate_plan, iter(range(100))

    def simulate_plan(*args: Any, **named: Any) -> object:
        if next(calls) == 3:
            raise KeyboardInterrupt
        return real(*args, **named)

    monkeypatch.setattr(search, "simulate_plan", simulate_plan)
    assert cli.main(["plan", TINY]) == 0
    found = capsys.readouterr()
    assert "interrupted" in found.err
    assert "an iteration" in found.out


def test_plan_and_whatif_price_tp_over_two_nodes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Tensor parallelism of 16 on nodes of 8 GPUs: half of every all-reduce crosses the network."""
    plan, sets = tmp_path / "plan.yaml", ("--set", "tp=16", "--set", "pp=1", "--set", "runtime=megatron")
    gpus = [word for k in (0, 1) for word in ("--set", f"cluster.datacenters[{k}].gpus_per_node=8")]
    flags = ("--keep", "tp", "--tries", "0", "--no-break-even", "--json", "--out", str(plan))
    assert cli.main(["plan", TINY, *sets, *gpus, *flags]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["plan"]["predicted"]["num_gpus"] % 16 == 0
    assert "tp 16" in str(found["candidates"][0])
    sweep = ("--sweep", "cluster.datacenters[0].net_gbps=50,800", "--no-marginals", "--json")
    assert cli.main(["whatif", str(plan), *sweep]) == 0
    slow, fast = json.loads(capsys.readouterr().out)["sweeps"][0]["points"]
    assert slow["iteration_s"] > 1.1 * fast["iteration_s"]
    capsys.readouterr()
    assert cli.main(["plan", TINY, *sets, "--set", "runtime=atlas", *gpus, "--keep", "tp"]) == 2
    assert "tp = 16: `atlas train` keeps a tensor-parallel group in one node" in capsys.readouterr().err
