"""Tracks of photonic rails: when which circuits are being changed, from the reconfigurations in a Timeline's `meta`."""

from __future__ import annotations

from dataclasses import dataclass

from atlas.ir.timeline import Timeline


@dataclass(frozen=True)
class RailTrack:
    """The changes of one hop or ring of a datacenter, by start; they do not overlap."""

    name: str
    spans_ns: tuple[tuple[int, int], ...]


def rail_tracks(timeline: Timeline) -> dict[str, tuple[RailTrack, ...]]:
    """By datacenter."""
    found: dict[str, dict[str, list[tuple[int, int]]]] = {}
    zero = timeline.start_ns
    for row in timeline.meta.get("fabric") or ():
        ranks = "-".join(f"s{rank}" for rank in row["ranks"])
        name = f"ring {ranks}" if row["to"] == "ring" else f"hop {ranks} p{row['pipeline']}"
        span = (max(zero, row["start_ns"]), max(zero, row["end_ns"]))
        found.setdefault(row["dc"], {}).setdefault(name, []).append(span)
    return {
        dc: tuple(RailTrack(name, tuple(sorted(spans))) for name, spans in sorted(tracks.items()))
        for dc, tracks in found.items()
    }
