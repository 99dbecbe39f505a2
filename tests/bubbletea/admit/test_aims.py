"""What an operator wants of many requests together: quick lanes for those who reach the goal, some late rather than
refused."""

from __future__ import annotations

from admission_scenes import COSTS, MS, pattern, state_of

from bubbletea.admit import decide
from bubbletea.admit.aims import LATEST_NS, RETRY_NS, Aims
from bubbletea.admit.decide import admit, advance, cancel
from bubbletea.admit.records import AdmissionRefusal, Placement, PrefillRequest
from bubbletea.admit.state import AdmissionState

PERIOD = 100 * MS
SLOW = decide.LOOKED + 6
"""Workers, each a lane of its own kind."""


def quick_and_slow(goal_s: float | None) -> AdmissionState:
    """One worker that is always idle; more that are idle for a third of every ten milliseconds."""
    third = [[(at * MS, at * MS + 10 * MS // 3 + k * 1000) for at in range(0, 100, 10)] for k in range(SLOW)]
    return state_of(pattern([[(0, PERIOD)], *third], PERIOD), 1, aims=Aims(goal_s))


def scarce(late: float) -> AdmissionState:
    """One worker: hardly idle for half of the time, idle for the other half."""
    drops = [(k * MS, (k + 1) * MS) for k in range(0, 500, 20)]
    return state_of(pattern([[*drops, (500 * MS, 1000 * MS)]], 1000 * MS), 1, aims=Aims(late=late))


def ask(name: str, tokens: int, now: int = 0, patience: int = 150 * MS) -> PrefillRequest:
    return PrefillRequest(name, "t", tokens, now, now + patience)


def placed(found: Placement | AdmissionRefusal | None) -> Placement:
    assert isinstance(found, Placement)
    return found


def test_requests_that_miss_the_goal_leave_the_fast_lane_free() -> None:
    work_s = COSTS.prompt_ns(1000) / 1e9
    reached = placed(admit(quick_and_slow(1.2 * work_s), ask("a", 1000), 0))
    missed = placed(admit(quick_and_slow(0.8 * work_s), ask("a", 1000), 0))
    none = placed(admit(quick_and_slow(None), ask("a", 1000), 0))
    assert reached.lane.workers == none.lane.workers == (0,)
    assert missed.lane.workers != (0,)
    assert none.delivered_ns < missed.delivered_ns <= missed.request.arrival_ns + 150 * MS


def test_a_request_that_needs_the_fast_lane_takes_it() -> None:
    work = COSTS.prompt_ns(1000)
    found = placed(admit(quick_and_slow(0.5 * work / 1e9), ask("a", 1000, patience=round(1.2 * work)), 0))
    assert found.lane.workers == (0,)


def test_no_more_requests_are_late_than_allowed_and_others_are_refused() -> None:
    state = scarce(late=0.25)
    for k in range(3):
        placed(admit(state, ask(f"short{k}", 10), k * MS))
    found = [admit(state, ask(f"long{k}", 4000, now=10 * MS), 10 * MS) for k in range(3)]
    assert found[0] is None
    assert all(isinstance(one, AdmissionRefusal) for one in found[1:])
    assert len(state.lane_of) + len(state.postponed) + len(state.backlog) == 4


def test_late_requests_wait_for_ample_windows_and_give_way() -> None:
    state = scarce(late=0.9)
    placed(admit(state, ask("first", 10), 0))
    for k in range(10):
        if admit(state, ask("long", 4000), 0) is None:
            break
        placed(admit(state, ask(f"more{k}", 10), 0))
    assert advance(state, 200 * MS) == ()
    taken = advance(state, 500 * MS + RETRY_NS)
    assert [one.request.id for one in taken] == ["long"]
    work = COSTS.prompt_ns(4000)
    assert taken[0].delivered_ns < 500 * MS + RETRY_NS + 2 * work
    hurried = placed(admit(state, ask("hurried", 100, now=525 * MS), 525 * MS))
    assert hurried.delivered_ns < taken[0].delivered_ns < state.placement("long").delivered_ns


def test_requests_postponed_too_long_are_placed_at_once() -> None:
    state = scarce(late=1.0 - 1e-9)
    for k in range(5):
        placed(admit(state, ask(f"short{k}", 10), 0))
    assert admit(state, ask("long", 4000), 0) is None
    assert advance(state, 200 * MS) == ()
    later = LATEST_NS + 100 * MS  # as scarce as at 100 ms
    assert [one.request.id for one in advance(state, later)] == ["long"]


def test_a_cancelled_late_request_is_removed() -> None:
    state = scarce(late=0.5)
    placed(admit(state, ask("short", 10), 0))
    assert admit(state, ask("long", 4000), 0) is None
    assert cancel(state, "long", 0) == ()
    assert advance(state, 600 * MS) == ()
    assert len(state.lane_of) + len(state.postponed) + len(state.backlog) == 1
