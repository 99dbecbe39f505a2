"""Photonic rails on the page and in the trace: a track for each hop and ring, with its changes."""

from __future__ import annotations

import json
from dataclasses import replace

from atlas.cost.table import Circuits, kind_costs, uniform_costs
from atlas.ir.assemble import repeated, with_optimizer
from atlas.ir.program import Layout
from atlas.ir.timeline import Timeline
from atlas.schedules.classic import one_f_one_b
from atlas.sim import simulate
from atlas.view.page import page_data
from atlas.view.perfetto import trace_bytes
from atlas.view.rails import rail_tracks
from atlas.view.svg import Figure


def timeline(*, photonic: bool = True) -> Timeline:
    program = repeated(with_optimizer(one_f_one_b(Layout.even(2, 3, 3, 1))), 2)
    costs = uniform_costs(
        2, 3, kind_costs(forward_ns=8000, backward_ns=16000, sync_ns=20000, step_ns=4000), lan_ns=2000
    )
    circuits = Circuits((True,) * 3, (5000,) * 3, (True,) * 3)
    return simulate(program, replace(costs, circuits=circuits if photonic else None))


def test_every_hop_and_ring_has_a_track() -> None:
    tracks = rail_tracks(timeline())["dc0"]
    assert [track.name for track in tracks] == [
        "hop s0-s1 p0", "hop s0-s1 p1", "hop s1-s2 p0", "hop s1-s2 p1", "ring s0", "ring s1", "ring s2",
    ]  # fmt: skip
    assert all(len(track.spans_ns) == 2 for track in tracks)
    assert rail_tracks(timeline(photonic=False)) == {}


def test_tracks_are_on_the_page_and_in_the_trace() -> None:
    header, _ = page_data([timeline()])
    groups = header["schedules"][0]["groups"]
    assert groups[1]["name"] == "rails of dc0"
    assert len(groups[1]["rows"]) == 7
    assert [group["what"] for group in groups][:2] == ["workers", "circuits: changes"]
    events = json.loads(trace_bytes(timeline()))["traceEvents"]
    changes = [event for event in events if event.get("cat") == "fabric"]
    assert len(changes) == 14
    assert {event["dur"] for event in changes} <= {5.0, 1.0}  # the first hops began before the run
    assert "rails of" not in Figure(timeline()).svg
