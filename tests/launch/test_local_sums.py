"""How gradients are summed in each datacenter: torch.distributed only where nobody else can listen or connect."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest

from atlas.errors import AtlasError
from atlas.launch.local_sums import LocalSums, sums_by_datacenter
from atlas.launch.prepared_job import PreparedJob
from atlas.runtime.assignment import stand_in

HOSTS = {"east/site0": {"trusted": False}, "west/site0": {"trusted": True}, "west/site1": {"trusted": False}}


def prepared(tp: int = 1, **changes: object) -> PreparedJob:
    """As far as it matters here."""
    training = replace(stand_in(), **changes)  # type: ignore[arg-type]
    return cast(PreparedJob, SimpleNamespace(training=training, job=SimpleNamespace(tp=tp)))


def test_hosts_outside_trusted_networks_sum_over_the_encrypted_transport() -> None:
    said: list[str] = []
    found = sums_by_datacenter(prepared(), HOSTS, said.append)
    assert found == {"east": LocalSums("ordered", True), "west": LocalSums("transport", False)}
    assert "west: gradients are summed over the encrypted transport" in said[0]
    trusted = {host: {"trusted": True} for host in HOSTS}
    assert sums_by_datacenter(prepared(), trusted, said.append)["west"] == LocalSums("ordered", False)
    assert len(said) == 1


@pytest.mark.parametrize(("changes", "tp"), [({"sums": "fast"}, 1), ({"zero": 1}, 2)])
def test_what_only_torch_can_do_is_refused_there(changes: dict[str, object], tp: int) -> None:
    with pytest.raises(AtlasError, match="hosts of west are not in a trusted network"):
        sums_by_datacenter(prepared(tp, **changes), HOSTS, print)
