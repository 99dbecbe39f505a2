from __future__ import annotations

import numpy as np
from view_samples import job

from atlas.view.page import groups


def test_each_worker_has_one_row_under_its_datacenter() -> None:
    timeline = job(3, 4, 4, 2)
    found = groups(timeline)
    assert [g.name for g in found] == ["dc0", "WAN dc0 ↔ dc1", "dc1"]
    assert sorted(w for g in found for w in g.workers) == list(range(timeline.program.num_workers))
    for group in found:
        assert all(timeline.program.worker_dc(w) == group.name for w in group.workers)


def test_every_wan_transfer_is_on_one_row_without_overlap() -> None:
    timeline = job(4, trunk_pairs=1.0)  # the trunk serves all four at once
    rows = [row for group in groups(timeline) for row in group.link_rows]
    drawn = np.concatenate([row.transfers for row in rows])
    assert sorted(drawn.tolist()) == np.flatnonzero(timeline.program.transfer_crosses).tolist()
    assert max(row.number for row in rows) == 3
    for row in rows:
        start, sent = timeline.transfer_start_ns[row.transfers], timeline.transfer_sent_ns[row.transfers]
        assert (start[1:] >= sent[:-1]).all()


def test_one_datacenter_has_no_links() -> None:
    assert [(g.name, len(g.link_rows)) for g in groups(job(2, 4, 4, 1))] == [("dc0", 0)]
