"""The simulator: traces read and scaled, policies compared, noise told."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from forecast_windows import ahead

from atlas.errors import AtlasError
from bubbletea.admit.aims import Aims
from bubbletea.cli import COMMANDS, command_parser, main
from bubbletea.sim.noise import Noise
from bubbletea.sim.paper_policy import PaperPolicy
from bubbletea.sim.replay import ReplayResult, ServicePolicy, play
from bubbletea.sim.simulated_cluster import SimulatedCluster, dedicated, simulated_cluster
from bubbletea.sim.traces import load_trace, synthetic
from bubbletea.windows.bubbles import Forecast

JOB = Path("examples/testbed/gpt-a-40ms.yaml")
CHUNK = 2048


@pytest.fixture(scope="module")
def cluster() -> SimulatedCluster:
    return simulated_cluster(JOB, steady=False)


def replayed(
    cluster: SimulatedCluster, load: float, *, policy: str = "ours", patience_s: float | None = 5.0
) -> ReplayResult:
    trace = synthetic(2000)
    state = cluster.state(Forecast(cluster.pattern), cluster.lanes(2 if policy != "dedicated" else 1, CHUNK), (CHUNK,))
    return play(
        cluster,
        PaperPolicy(state) if policy == "paper" else ServicePolicy(state),
        policy,
        trace,
        tokens_per_s=load * cluster.capacity_tokens_per_s(trace),
        periods=8,
        warm_up=2,
        kind="offline" if patience_s is None else "online",
        patience_s=patience_s,
    )


def test_offline_work_fills_the_bubbles(cluster: SimulatedCluster) -> None:
    figures = replayed(cluster, 1.5, patience_s=None).figures()
    assert figures["utilization"] >= 0.94
    assert figures["fill"] <= 1.0


def test_nothing_is_delivered_after_its_deadline(cluster: SimulatedCluster) -> None:
    found = replayed(cluster, 2.0, patience_s=3.0)
    assert found.refused["deadline"] > 0
    assert found.figures()["ttft_p99_s"] <= 3.0


def test_ours_prefills_no_less_than_the_papers_rule_at_its_p95(cluster: SimulatedCluster) -> None:
    rule = replayed(cluster, 2.0, policy="paper").figures()
    ours = replayed(cluster, 2.0, patience_s=rule["ttft_p95_s"]).figures()
    assert ours["tokens_per_s"] >= rule["tokens_per_s"]


def test_the_papers_rule_keeps_each_stage_in_one_bubble(cluster: SimulatedCluster) -> None:
    for placement in replayed(cluster, 1.0, policy="paper").placed.values():
        assert [s.worker for s in placement.slices] == list(placement.lane.workers)
        for piece in placement.slices:
            assert any(
                w.start_ns <= piece.start_ns and piece.end_ns <= w.end_ns
                for w in ahead(Forecast(cluster.pattern), piece.worker, piece.start_ns, piece.end_ns)
            )


def test_dedicated_accelerators_are_as_many_as_the_bubbles_amount_to(cluster: SimulatedCluster) -> None:
    assert dedicated(cluster).pattern.num_workers == round(cluster.idle_share * 12)
    assert replayed(dedicated(cluster), 0.3, policy="dedicated").figures()["refused"] == 0


def test_noise_slows_training_by_less_than_its_budget_and_a_forecast_without_margins_by_more(
    cluster: SimulatedCluster,
) -> None:
    assert cluster.result is not None
    noise, trace = Noise(cluster.result, 0.05, 0.05), synthetic(2000)
    slow = {}
    for name, forecast in (
        ("learnt", noise.learnt(cluster.pattern, 0.005, cluster.some_costs.layer(CHUNK, 0))),
        ("blind", Forecast(cluster.pattern)),
    ):
        state = cluster.state(forecast, cluster.lanes(2, CHUNK), (CHUNK,))
        rate = 1.5 * cluster.capacity_tokens_per_s(trace)
        found = play(
            cluster, ServicePolicy(state), name, trace, tokens_per_s=rate, periods=6, warm_up=0, kind="offline"
        )
        slow[name] = noise.slowdown(forecast, found.placed.values(), 6)
    assert slow["learnt"].mean <= 0.005
    assert slow["learnt"].cut < slow["blind"].cut


def test_the_format_of_a_trace_follows_from_its_first_line(tmp_path: Path) -> None:
    azure = tmp_path / "azure.csv"
    azure.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:05.9799600,12,8\n"
    )
    trace = load_trace(azure)
    assert trace.tokens.tolist() == [4808, 12]
    assert trace.at_s.tolist() == [0.0, 2.0]
    mooncake = tmp_path / "mooncake.jsonl"
    mooncake.write_text(
        '{"timestamp": 0, "input_length": 700, "output_length": 5, "hash_ids": [0]}\n'
        '{"timestamp": 1500, "input_length": 1200, "output_length": 5, "hash_ids": [0, 1]}\n'
    )
    trace = load_trace(mooncake)
    assert trace.blocks == ((0,), (0, 1))
    assert trace.at_s.tolist() == [0.0, 1.5]


@pytest.mark.parametrize("text", ["", "nothing\nhere\n", "{}\n{}\n", "TIMESTAMP,ContextTokens\nyesterday,5\n"])
def test_an_invalid_trace_file_gives_one_message(tmp_path: Path, text: str) -> None:
    path = tmp_path / "trace"
    path.write_text(text)
    with pytest.raises(AtlasError, match="trace"):
        load_trace(path)


def test_a_replayed_trace_has_the_given_rate() -> None:
    trace = synthetic(500)
    rows = list(trace.played(50_000, 100))
    assert sum(tokens for _, tokens, _ in rows) / 100 == pytest.approx(50_000, rel=0.1)
    assert all(a[0] <= b[0] for a, b in itertools.pairwise(rows))
    assert trace.resized(300).tokens.mean() == pytest.approx(300, rel=0.01)


def test_the_command_prints_figures_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "ttft.svg"
    words = ["simulate", str(JOB), "--requests", "synthetic", "--load", "0.3", "--load", "0.9", "--periods", "3"]
    assert main([*words, "--json", "--html", str(page)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["policy"] for row in found["rows"]] == ["ours", "paper", "dedicated"] * 2
    assert found["num_workers"] == 12
    assert np.isfinite([row["ttft_p95_s"] for row in found["rows"]]).all()
    assert page.read_text().count("<path") > 3


def test_a_missing_trace_gives_no_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", str(JOB), "--requests", "nowhere.csv"]) == 2
    assert "no such trace file" in capsys.readouterr().err
    assert main(["simulate", str(JOB), "--requests", "synthetic", "--html", "ttft.pdf"]) == 2
    assert "End its name in .svg or .html" in capsys.readouterr().err
    assert main(["simulat"]) == 2
    assert "did you mean 'simulate'" in capsys.readouterr().err


def test_every_command_explains_its_flags() -> None:
    for name in COMMANDS:
        parser, _ = command_parser(name)
        assert all(action.help for action in parser._actions), name


def test_the_simulator_and_the_help_load_no_torch() -> None:
    for code, heavy in (
        ("import bubbletea.sim.command", ("torch",)),
        ("from bubbletea.cli import top_parser; top_parser().format_help()", ("torch", "numba", "numpy", "rich")),
    ):
        script = f"import sys; {code}; print(*[name for name in {heavy!r} if name in sys.modules])"
        found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
        assert found.stdout.strip() == ""


@pytest.mark.slow  # two replays, 10 s of CPU; tests/bubbletea/admit has the rule itself
def test_some_are_late_instead_of_refused(cluster: SimulatedCluster) -> None:
    found, trace = {}, synthetic(2000)
    for late in (0.0, 0.1):
        state = cluster.state(Forecast(cluster.pattern), cluster.lanes(2, CHUNK), (CHUNK,), aims=Aims(late=late))
        rate = 0.8 * cluster.capacity_tokens_per_s(trace)
        times = {"periods": 6.0, "warm_up": 2.0, "cool_down": 1.0, "patience_s": 1.0}
        found[late] = play(cluster, ServicePolicy(state), "ours", trace, tokens_per_s=rate, **times).figures()
    assert found[0.0]["ttft_p99_s"] <= 1.0 < found[0.1]["ttft_p99_s"]
    assert found[0.1]["refused"] < found[0.0]["refused"]
