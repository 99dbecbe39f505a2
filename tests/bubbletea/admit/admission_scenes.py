"""Small random worlds for admission: a few workers with random windows, cheap costs."""

from __future__ import annotations

from hypothesis import strategies as st

from atlas.spec.job import Model
from bubbletea.admit.aims import Aims
from bubbletea.admit.lanes import build_lanes
from bubbletea.admit.records import PrefillRequest
from bubbletea.admit.state import AdmissionState
from bubbletea.costs import LayerTime, PrefillCosts
from bubbletea.windows.bubbles import Forecast, Pattern
from bubbletea.windows.free_network import Residual

MS = 1_000_000
MODEL = Model(family="llama", layers=6, hidden=64, heads=4, kv_heads=2, ffn=128, vocab=256, seq_len=4096)
COSTS = PrefillCosts(MODEL, LayerTime(50_000, 100_000, 2_000, 0.01), 200_000, 24e9, 12.5e9, 20_000)


def pattern(windows: list[list[tuple[int, int]]], period_ns: int, memory_bytes: int = 2**40, dcs: int = 1) -> Pattern:
    """From each worker's (start, end) within the period."""
    names = [f"dc{w * dcs // len(windows)}" for w in range(len(windows))]
    return Pattern.of_windows(windows, period_ns, names, memory_bytes)


def state_of(
    made: Pattern,
    split: int,
    *,
    chunks: tuple[int, ...] = (256,),
    residual: Residual | None = None,
    kept: float = 0.0,
    aims: Aims | None = None,
) -> AdmissionState:
    lanes = build_lanes(made, COSTS, split=split, num_ranks=1, chunk=max(chunks))
    return AdmissionState(Forecast(made), COSTS, lanes, residual=residual, chunks=chunks, kept=kept, aims=aims)


@st.composite
def patterns(draw: st.DrawFn) -> Pattern:
    period = draw(st.integers(20, 60)) * MS
    windows = []
    for _ in range(draw(st.sampled_from([2, 4]))):
        cuts = sorted(draw(st.sets(st.integers(0, period // MS), min_size=4, max_size=8)))
        pairs = [(a * MS, b * MS) for a, b in zip(cuts[::2], cuts[1::2], strict=False)]
        windows.append([*pairs, (period, period + 4 * MS)] if draw(st.booleans()) else pairs)
    for own in windows:  # one that takes a layer of anything, and none past the period's end
        own[:] = [(a, min(b, period)) for a, b in own if a < period]
        if max((b - a for a, b in own), default=0) < 3 * MS:
            own[:] = [(0, 5 * MS)]
    return pattern(windows, period)


def requests(max_tokens: int = 1500) -> st.SearchStrategy[list[PrefillRequest]]:
    """Arrivals in order, some with deadlines, some offline."""
    one = st.tuples(
        st.integers(0, 30),
        st.integers(1, max_tokens),
        st.sampled_from([None, 50, 300, 2000]),
        st.sampled_from(["online", "online", "offline"]),
        st.sampled_from(["a", "b"]),
    )

    def arrive(rows: list[tuple[int, int, int | None, str, str]]) -> list[PrefillRequest]:
        now, found = 0, []
        for k, (gap, tokens, patience, kind, tenant) in enumerate(rows):
            now += gap * MS
            deadline = None if patience is None else now + patience * MS
            hashes = tuple((tenant, tokens % 3, block) for block in range(tokens // 512))
            found.append(PrefillRequest(f"r{k}", tenant, tokens, now, deadline, kind, hashes))  # type: ignore[arg-type]
        return found

    return st.lists(one, min_size=1, max_size=12).map(arrive)
