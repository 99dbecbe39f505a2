"""The verdict: the best of each family is really the best, one time for the winner, break-even on the right side."""

from __future__ import annotations

import re
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
from plan_jobs import job_of, random_job

from atlas.api import PlanSearch, plan
from atlas.errors import AtlasError, SpecError
from atlas.planner import breakeven
from atlas.planner.breakeven import BreakEven, break_even, changed_links
from atlas.planner.families import Families, find_families
from atlas.planner.objective import Objective
from atlas.planner.report import distinct, rows
from atlas.planner.run import explore, finds_better, make_plan, start
from atlas.planner.verdict import dollars, family_rows, headline, origins
from atlas.spec import Job, parse_job


def families_of(job: Job) -> Families:
    return find_families(make_plan(job, tries=0), tries=0)


@pytest.fixture(scope="module")
def slow() -> Families:
    """Of two sites that are too far apart."""
    return families_of(job_of())


@pytest.mark.parametrize("seed", [5])
def test_the_best_of_a_family_is_as_good_as_simulating_all_of_it(seed: int) -> None:
    """bench/first_job.py does it for 30 clusters."""
    job = random_job(seed)
    found = families_of(job)
    for kind, judged in found.best.items():
        assert judged.candidate.kind == kind
        every = start(job, Objective(), kind=kind)
        explore(every, "exhaustive")
        assert every.best is not None
        assert judged.figures.iteration_s <= 1.01 * every.best.figures.iteration_s


@pytest.fixture(scope="module")
def search() -> PlanSearch:
    return plan(job_of(), tries=0, break_even=False)


def test_the_winner_has_one_time_everywhere(search: PlanSearch) -> None:
    predicted = search.plan.predicted.iteration_s
    assert search.table()[0]["iteration_s"] == pytest.approx(predicted)
    winner = next(row for row in search.as_dict()["families"] if not row["lost"])
    assert winner["plan"]["iteration_s"] == pytest.approx(predicted)


def test_mirror_images_and_duplicates_are_folded() -> None:
    found = make_plan(job_of(), tries=0)
    seen = [
        (one.candidate.tp, sorted((g.replicas, *sorted(g.places)) for g in one.candidate.groups))
        for one in distinct(found)
    ]
    assert len(seen) == len({str(one) for one in seen})
    assert len(rows(found)) == len(seen)


def test_a_better_network_turns_the_verdict(slow: Families) -> None:
    assert headline(slow).startswith("Not worth it: east alone is fastest ($")
    said = headline(families_of(changed_links(job_of(), gbps=20.0, latency=0.05)))
    assert said.startswith("Worth it: ")
    assert "x faster than east alone and costs" in said
    assert "per trillion tokens" in said


def test_the_verdict_names_the_limit_that_the_other_plan_misses() -> None:
    job = changed_links(job_of(), gbps=20.0, latency=0.05)
    price = min(dc.usd_per_gpu_hour for dc in job.cluster.datacenters)
    found = find_families(make_plan(job, objective=Objective(max_usd_per_hour=1.01 * price), tries=0), tries=0)
    said = headline(found)
    assert said.startswith("Not worth it: ")
    assert " alone is fastest of the plans that meet the limits ($" in said
    assert re.search(r"east \+ west takes .* per token, and misses the limit by \d+ %\.$", said)
    alone = families_of(job).alone
    assert alone is not None
    goal = Objective("cost", min_tokens_per_s=1.05 * alone.figures.tokens_per_s)
    said = headline(find_families(make_plan(job, objective=goal, tries=0), tries=0))
    assert re.fullmatch(r"Worth it: .*; east alone misses the limit by \d+ %\.", said)


def test_break_even_is_between_what_wins_and_what_loses(slow: Families) -> None:
    """bench/first_job.py asks all four questions."""
    answers = {one.what: one for one in break_even(slow, ask=("bandwidth", "egress"))}
    edge = answers["bandwidth"].value
    assert edge is not None
    for factor, wins in ((0.9, False), (1.1, True)):
        changed = changed_links(job_of(), gbps=factor * edge / 5.0)
        best = make_plan(changed, tries=0)
        assert (best.winner.candidate.kind != "one") is wins
    assert "Gbit/s per node pair on (now 5)" in answers["bandwidth"].text
    assert "egress: does not change the speed" in answers["egress"].text


def test_a_break_even_without_time_to_narrow_it_down_is_a_range(
    slow: Families, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact = break_even(slow, ask=("bandwidth",))[0].value
    assert exact is not None
    clock = count(step=2.5)  # each look at the clock is later: there is time for a few plans
    monkeypatch.setattr(breakeven, "time", SimpleNamespace(process_time=lambda: next(clock)))
    (answer,) = break_even(slow, ask=("bandwidth",))
    found = re.fullmatch(
        r"bandwidth: the verdict changes between ([\d.,]+) and ([\d.,]+) Gbit/s .*no time to narrow it down\)\.",
        answer.text,
    )
    assert found is not None, answer.text
    low, high = (float(one.replace(",", "")) for one in found.groups())
    assert low < exact < high


def test_the_verdict_says_nothing_of_a_bandwidth_that_was_not_found(slow: Families) -> None:
    never = BreakEven("bandwidth", None, "bandwidth: no change up to 1,280 Gbit/s per node pair (now 5).")
    assert "more bandwidth would not change that" in headline(slow, [never])
    late = BreakEven("bandwidth", None, f"bandwidth: {breakeven.NOT_FOUND} within 13 s of CPU time.")
    assert "bandwidth" not in headline(slow, [late])


def test_kinds_of_plans_that_lose_with_the_best_links_are_not_planned_again(
    slow: Families, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def finds(job: Job, *args: Any, kind: str, **options: Any) -> bool:
        asked.append(kind)
        return kind == "pipeline" and finds_better(job, *args, kind=kind, **options)

    monkeypatch.setattr(breakeven, "finds_better", finds)
    (answer,) = break_even(slow, ask=("bandwidth",))
    assert answer.value is not None
    assert asked.count("pipeline") > 2
    assert asked.count("data") == 1


def test_low_communication_is_a_row_that_says_it_is_not_run(slow: Families) -> None:
    row = family_rows(slow)[-1]
    assert "DiLoCo-style, 100 inner steps" in row["family"]
    assert row["lost"] == "changes training semantics; not run by Atlas"
    data = next(one for one in family_rows(slow) if one["kind"] == "data")
    assert row["plan"]["iteration_s"] < data["plan"]["iteration_s"]


def test_the_page_begins_with_the_verdict_and_has_families_as_tabs(search: PlanSearch) -> None:
    page = search.page()
    assert f"<h1>{search.verdict}</h1>" in page
    assert page.index("<h1>") < page.index("<svg")
    for row in search.as_dict()["families"]:
        assert f">{row['family']} · " in page
    assert "20 ms · " in page
    assert "/hour</text>" in page
    captions = re.findall(r"<figcaption>.*?(\d+) % of its critical path is ([\w\s-]+)\.</figcaption>", page)
    assert len(captions) == page.count("<figcaption>")
    assert len({name for _, name in captions}) > 1, "every tab tells what its own plan spends its time on"
    assert page.count("dots: gradients between groups") == 2  # data parallelism and low communication, no other map


def test_priors_and_unknown_figures_are_named() -> None:
    job = job_of()
    data = job.model_dump(mode="json", exclude_none=True)
    data["cluster"]["datacenters"][0]["prior"] = {"usd_per_gpu_hour": 2.0}
    data["cluster"]["datacenters"][1].pop("usd_per_gpu_hour")
    data["cluster"]["datacenters"][1]["prior"] = {"usd_per_gpu_hour": "unknown"}
    known = {"latency_ms": 20.0, "pair_gbps": 4.0, "egress_usd_per_gb": "unknown"}
    data["cluster"]["links"] = [{"between": ["east", "west"], "latency_ms": 20.0, "pair_gbps": 5.0, "prior": known}]
    prior, unknown = origins(parse_job(data))
    assert prior == "Prior, not measured by you: GPU price of east; latency between east and west."
    assert unknown == ("Unknown and left out: the price of A100-40 in west; the egress price between east and west.")
    assert origins(job) == []


def test_a_batch_in_tokens_or_sequences_is_kept_by_every_plan() -> None:
    data = job_of().model_dump(mode="json", exclude_none=True)
    data["batch"] = "32 sequences"
    assert make_plan(parse_job(data), tries=0).space.sequences == 32
    data["batch"] = "64K"
    assert make_plan(parse_job(data), tries=0).space.sequences == 32
    data["batch"] = "65000"
    with pytest.raises(SpecError, match=r"31\.74 sequences of 2,048 tokens") as error:
        parse_job(data)
    assert "63488 (31 sequences) or 65536 (32 sequences)" in str(error.value)


def test_keeping_what_the_job_leaves_open_is_refused() -> None:
    with pytest.raises(AtlasError, match="not chosen by the planner"):
        make_plan(job_of(), keep=["num_microbatches"])


def test_dollars_are_short() -> None:
    assert [dollars(x) for x in (1.0714e6, 250_415, 12.3, 3.2e9)] == ["$1.07M", "$250K", "$12.3", "$3.2B"]


@pytest.mark.parametrize("minimise", ["throughput", "cost"])
@pytest.mark.parametrize("kind", ["pipeline", "data"])
def test_a_search_with_a_limit_agrees_with_one_without(kind: str, minimise: str) -> None:
    compared = 0
    for seed in range(8):
        job, goal = random_job(seed), Objective(minimise)  # type: ignore[arg-type]
        try:
            found = make_plan(job, objective=goal, kind=kind, tries=0)
        except AtlasError:
            continue
        figures, batch = found.winner.figures, found.space.sequences
        best = float(goal.score(figures.iteration_s, figures.usd_per_iteration, figures.tokens))
        for factor in (0.5, 0.999, 1.001, 2.0):
            is_better = finds_better(job, factor * best, objective=goal, global_batch=batch, kind=kind)
            assert is_better == (factor > 1), (seed, factor)
            compared += 1
    assert compared >= 8
