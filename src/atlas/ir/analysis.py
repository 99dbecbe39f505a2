"""The figures of a Timeline: how busy workers and links are, bubbles by cause, the critical path by category.

`difference` compares two Timelines.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from atlas.ir.bubbles import bubbles, running_end
from atlas.ir.critical_path import critical_path, path_totals_ns
from atlas.ir.program import Ints
from atlas.ir.timeline import Timeline, computed_once


def wan_links(timeline: Timeline) -> Ints:
    """The links that carry at least one transfer between datacenters."""
    return np.unique(timeline.transfer_link[timeline.program.transfer_crosses]).astype(np.int64)


@computed_once
def link_utilization(timeline: Timeline) -> dict[str, float]:
    """By WAN link: the share of the run in which it sends."""
    links, makespan = wan_links(timeline), timeline.makespan_ns
    of = np.flatnonzero(np.isin(timeline.transfer_link, links))
    of = of[np.lexsort((timeline.transfer_start_ns[of], timeline.transfer_link[of]))]
    link, start, sent = timeline.transfer_link[of], timeline.transfer_start_ns[of], timeline.transfer_sent_ns[of]
    free = running_end(link.astype(np.int64), sent, int(start.min()) if len(start) else 0)
    served = np.zeros(len(timeline.links), np.int64)
    np.add.at(served, link, np.maximum(sent, free) - np.maximum(start, free))
    return {timeline.links[i]: float(served[i] / makespan) if makespan else 0.0 for i in links}


@computed_once
def summary(timeline: Timeline) -> dict[str, Any]:
    """The figures of a Timeline, as JSON values."""
    found, path = bubbles(timeline), path_totals_ns(critical_path(timeline))
    return {
        "schedule": timeline.program.name,
        "source": timeline.source,
        "sharing": timeline.program.sharing,
        "iteration_s": timeline.iteration_ns / 1e9,
        "utilization": timeline.utilization,
        "num_workers": timeline.program.num_workers,
        "num_events": timeline.program.num_events,
        "peak_in_flight": timeline.program.peak_in_flight,
        "bubbles_s": {cause: ns / 1e9 for cause, ns in found.total_ns.items()},
        "critical_path_s": {category: ns / 1e9 for category, ns in path.items()},
        "links": link_utilization(timeline),
    }
