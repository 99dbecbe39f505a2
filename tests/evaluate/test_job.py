"""From a job to a Result: what is compared is comparable, what is bounded is bounded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from atlas import evaluate as evaluating
from atlas.cost.price import price
from atlas.cost.table import Costs
from atlas.errors import InfeasibleError, SpecError
from atlas.evaluate import build, default_budget, default_choices, evaluate, evaluate_all, prepare, rows
from atlas.ir.assemble import check
from atlas.ir.program import Kind
from atlas.schedules import SCHEDULES
from atlas.sim import simulate
from atlas.spec import Job, load_job, override

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def tiny() -> Job:
    return load_job(EXAMPLES / "tiny.yaml")


@pytest.mark.parametrize("tcp", ["one", "many"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_ends_its_iteration_and_respects_the_bound(tiny: Job, name: str, tcp: str) -> None:
    result = evaluate(tiny, name, tcp=tcp, budget=20)  # type: ignore[arg-type]
    program = result.timeline.program
    check(program)
    assert {Kind.SYNC, Kind.STEP} <= set(program.kind.tolist())
    assert result.bound.ns <= result.timeline.makespan_ns
    assert result.timeline.meta["tcp"] == tcp
    assert not (tcp == "one" and program.sharing)


def test_an_interleaved_schedule_gets_the_pipelines_of_the_others(tiny: Job) -> None:
    derived = override(tiny, ["pipelines_per_cell="])
    frames = {name: prepare(derived, schedule).layout for name, schedule in SCHEDULES.items()}
    assert {frame.num_pipelines for frame in frames.values()} == {frames["1f1b"].num_pipelines}
    assert frames["interleaved"].num_stages == 2 * frames["1f1b"].num_stages


@pytest.fixture
def few_microbatches(tiny: Job) -> Job:
    """On a fast WAN: most of the time a pipeline fills and drains, which is faster with smaller stages."""
    fast = ["cluster.wan.latency_ms=0.1", "cluster.wan.pair_gbps=400", "num_microbatches=4", "recompute=false"]
    nets = [f"cluster.datacenters.{name}.net_gbps=400" for name in ("east", "west")]
    return override(tiny, [*fast, *nets, "model.layers=24", "pipelines_per_cell=1"])


def test_atlas_puts_several_stages_on_a_worker_where_that_is_faster(few_microbatches: Job) -> None:
    ours, other = (evaluate(few_microbatches, name, budget=24) for name in ("atlas", "interleaved"))
    assert ours.single.makespan_ns == other.single.makespan_ns
    assert ours.case.layout.num_stages == ours.single.program.num_stages == 8
    assert ours.row()["fits"]
    slow = evaluate(override(few_microbatches, ["cluster.wan.pair_gbps=1"]), "atlas", budget=24)
    assert slow.case.layout.num_stages == 4


def test_atlas_keeps_to_the_memory_and_to_the_layers_that_a_job_states(few_microbatches: Job) -> None:
    for change in ("layers_per_stage=[6,6,6,6]", "memory_gib=9.3"):
        result = evaluate(override(few_microbatches, [change]), "atlas", budget=24)
        assert result.single.program.num_stages == 4, change
        assert result.row()["fits"]


def test_short_turns_change_the_text_and_nothing_else(tiny: Job) -> None:
    case, schedule = prepare(tiny, SCHEDULES["atlas"]), SCHEDULES["atlas"]
    program = build(case, schedule, budget=60, seed=1)
    assert case.turns is not None
    assert program.sharing
    assert int(program.turn.max()) < program.num_pipelines * program.num_microbatches
    long = program.turn * 1_000_003 + 17
    again = simulate(type(program)(**{**vars_of(program), "turn": long}), case.turns)
    assert again.makespan_ns == simulate(program, case.turns).makespan_ns


def vars_of(program: object) -> dict[str, object]:
    return {name: getattr(program, name) for name in program.__dataclass_fields__}  # type: ignore[attr-defined]


def test_one_datacenter_or_one_pipeline_has_nothing_to_share(tiny: Job) -> None:
    alone = override(tiny, ["pipelines_per_cell=1"])
    assert prepare(alone, SCHEDULES["atlas"]).turns is None
    together = override(tiny, ["placement=[{dc: east, stages: 4}]", "pipelines_per_cell=1", "cells=1"])
    assert prepare(together, SCHEDULES["atlas"]).turns is None
    assert evaluate(together, "atlas", budget=10).row()["bubbles_s"]["wan"] == 0


def test_the_budget_shrinks_with_the_job_and_asks_no_clock(tiny: Job) -> None:
    large = override(tiny, ["num_microbatches=4000"])
    assert default_budget(prepare(tiny, SCHEDULES["atlas"])) == 600
    assert default_budget(prepare(large, SCHEDULES["atlas"])) == 104


def test_mfu_is_busy_time_less_recompute_at_the_stated_efficiency(tiny: Job) -> None:
    row = evaluate(override(tiny, ["recompute=false"]), "gpipe").row()
    # Every busy second does useful work at half of the peak, less what goes to memory traffic.
    assert 0.35 * row["utilization"] < row["mfu"] < 0.5 * row["utilization"]
    assert row["num_gpus"] == 8
    assert row["tokens_per_s"] == pytest.approx(2 * 8 * 2048 / row["iteration_s"])


def test_interleaved_is_left_out_only_if_it_was_not_named(tiny: Job) -> None:
    job = override(tiny, ["model.layers=5"])
    results, left_out = evaluate_all(job, default_choices(), budget=10)
    assert set(left_out) == {"interleaved"}
    assert len(rows(results)) == 9
    with pytest.raises(InfeasibleError):
        evaluate_all(job, [("interleaved", "many")], skip=False)


def test_schedules_of_one_job_share_their_prices(tiny: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, str, bool]] = []

    def counted(job: Job, *, tcp: str = "many", sharing: bool = False, **rest: Any) -> Costs:
        asked.append((job.interleave, tcp, sharing))
        return price(job, tcp=tcp, sharing=sharing, **rest)  # type: ignore[arg-type]

    monkeypatch.setattr(evaluating, "price", counted)
    evaluate_all(tiny, default_choices(), budget=1)
    assert sorted(asked) == [(1, "many", False), (1, "many", True), (1, "one", False), (2, "many", False)]


def test_only_the_wan_jitters_with_the_wan(tiny: Job) -> None:
    local = override(tiny, ["placement=[{dc: east, stages: 4}]", "pipelines_per_cell=1", "jitter.wan=0.5"])
    spread = evaluate(local, "1f1b", jitter_runs=5).spread
    assert spread is not None
    assert spread.row()["p5_s"] == spread.row()["worst_s"]
    with pytest.raises(SpecError, match="jitter"):
        evaluate(tiny, "1f1b", jitter_runs=5)


def test_progress_is_reported_by_name(tiny: Job) -> None:
    told: list[tuple[str, int, int]] = []
    evaluate_all(tiny, [("atlas", "many")], budget=12, progress=lambda *words: told.append(words))
    assert told[0] == ("atlas", 0, 0)
    assert told[-1][2] == 12
