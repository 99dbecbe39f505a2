"""Step records of a launcher's workers travel as one message, and lose nothing that the coordinator uses."""

from __future__ import annotations

from typing import Any

from atlas.launch.site_records import MOMENTS, SiteRecords, unpacked


def record(step: int, **more: Any) -> dict[str, Any]:
    moments: dict[str, Any] = {key: [1, 2] for key in MOMENTS}
    return {"step": step, "loss": None, "losses": [], "norms": [0.5], "tokens": 0, "compiled": "", **moments, **more}


def sent(records: SiteRecords, name: str, body: dict[str, Any] | None) -> dict[str, Any] | None:
    return records.joined({"epoch": 1, "from": name, "message": records.reduced(name, body)})


def test_records_wait_for_the_last_worker_of_the_step() -> None:
    records = SiteRecords(["p0.s0", "p1.s0", "p2.s0"], ["p0.s0"])
    assert sent(records, "p0.s0", record(0)) is None
    assert sent(records, "p0.s0", record(1)) is None, "a worker that is ahead"
    assert sent(records, "p2.s0", record(0, tokens=96, losses=[5.0])) is None
    together = sent(records, "p1.s0", record(0))
    assert together is not None
    found = dict(unpacked(together["records"]))
    assert found["p0.s0"] == record(0), "a sampled worker's record is whole"
    assert found["p1.s0"] == {"step": 0, "loss": None, "losses": [], "norms": [0.5], "tokens": 0, "compiled": ""}
    assert (found["p2.s0"]["tokens"], found["p2.s0"]["losses"]) == (96, [5.0])


def test_other_messages_are_sent_at_once() -> None:
    records = SiteRecords(["p0.s0", "p1.s0"], ["p0.s0"])
    assert sent(records, "p0.s0", {"ready": True}) == {"epoch": 1, "from": "p0.s0", "message": {"ready": True}}
    assert sent(records, "p0.s0", None) == {"epoch": 1, "from": "p0.s0", "message": None}
