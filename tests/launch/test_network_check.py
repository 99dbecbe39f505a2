"""`atlas wan check`: what works is shown, what does not is named with its remedy, and nothing is started."""

from __future__ import annotations

import datetime as dt
import json
import socket
import threading
from dataclasses import asdict
from pathlib import Path

import pytest
from free_ports import free_port, free_ports
from multi_dc_runs import job_text

from atlas.cli import main
from atlas.launch.check_report import compiled, matrix, spans
from atlas.launch.network_check import CheckSettings, check_network, nodes_of
from atlas.launch.rendezvous import AgentName, Refusal
from atlas.launch.site_network import PortRange, SiteFacts, SiteNetwork
from atlas.spec import Job, load_job
from atlas.wan.probe import port_check
from atlas.wan.probe.port_check import check_port, reason
from atlas.wan.security.certs import make_ca, make_node, require_own_name
from atlas.wan.security.credentials import Security
from atlas.wan.transport.endpoint import Endpoint
from atlas.wan.transport.wire import Greeting

TWO = ("east", "west")


@pytest.fixture
def job(tmp_path: Path) -> Job:
    (tmp_path / "job.yaml").write_text(job_text(*TWO))
    return load_job(tmp_path / "job.yaml")


def facts(host: str, advertise: str | None = "192.0.2.1", until: str = "2999-01-01") -> dict[str, object]:
    dc, _, part = host.partition("/")
    certificates = {f"{dc}.pem": {"names": [f"{dc}/*"], "until": f"{until}T00:00:00+00:00"}}
    site = asdict(SiteFacts(dc, int(part), "10.0.0.1", advertise))
    return {"site": site, "ports": {f"{dc}/site0": 7710}, "certificates": certificates}


def test_a_worker_has_the_name_and_the_order_that_the_run_gives_it(tmp_path: Path) -> None:
    text = job_text(*TWO, pp=4).replace("nodes: 2", "nodes: 4")
    (tmp_path / "job.yaml").write_text(text.replace("pipelines_per_cell: 1", "pipelines_per_cell: 2"))
    job = load_job(tmp_path / "job.yaml")
    assert nodes_of(job, AgentName("west")) == ["west/site0", *(f"west/p{p}.s{r}" for p in (0, 1) for r in (2, 3))]
    assert nodes_of(job, AgentName("west", 1, 2)) == ["west/site1", "west/p1.s2", "west/p1.s3"]


@pytest.mark.parametrize("apart", [False, True], ids=["first launcher", "coordinator"])
def test_two_sites_check_each_other_and_one_cannot_be_dialled(
    job: Job, apart: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(port_check, "BURST_S", 0.1)
    rendezvous = ("127.0.0.1", free_port())
    (first,) = free_ports(2, 1)
    networks = {"east": SiteNetwork(ports=PortRange(first, first + 1)), "west": SiteNetwork(advertise="none")}
    if apart:
        networks["coordinator"] = SiteNetwork()
    reports: dict[str, dict[str, object]] = {}

    def check(dc: str) -> None:
        settings = CheckSettings(AgentName(dc), networks[dc], rendezvous, rendezvous, gather_s=120.0, apart=apart)
        reports[dc] = check_network(job, settings, lambda line: None)

    threads = [threading.Thread(target=check, args=(dc,)) for dc in networks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert all(report == reports["east"] for report in reports.values())
    assert set(reports) == set(networks)
    report = reports["east"]
    assert report["faults"] == []
    to_west, to_east = matrix(report)[1:]
    assert to_west[:3] == ["east/0", "west/0", "none: the other side dials"]
    assert to_east[:4] == ["west/0", "east/0", "127.0.0.1", f"{first}-{first + 1} ok"]
    assert "Gbit/s" in to_east[-1]


def test_every_fault_is_named_once_with_those_who_saw_it() -> None:
    rows = [
        {
            "from": "east/0",
            "to": "west/0",
            "host": "192.0.2.1",
            "ports": {"7710": "refused: x?", "7711": "refused: x?"},
        },
        {"from": "south/0", "to": "west/0", "host": "192.0.2.1", "ports": {"7710": "refused: x?", "7711": ""}},
        {"from": "west/0", "to": "south/0", "host": None, "ports": {}},
    ]
    soon = (dt.datetime.now(dt.UTC) + dt.timedelta(days=3)).date().isoformat()
    joined = {"east/0": facts("east/0"), "west/0": facts("west/0", until=soon), "south/0": facts("south/0", None)}
    refused = [Refusal("198.51.100.9", "certificate verify failed", 0.0)] * 2
    clocks = {"east/0": 0.0, "west/0": 400.0, "south/0": -2.0}
    report = compiled(joined, rows, clocks, ["north"], refused, ("203.0.113.1", 7700))
    refusal, north, west, clock = report["faults"]
    assert (
        "refused a connection from 198.51.100.9: certificate verify failed. Give that host a valid certificate"
        in refusal
    )
    assert "north did not join at 203.0.113.1:7700: its certificate was refused" in north
    assert "west/0 is not reached at 192.0.2.1, port 7710-7711, from east/0, south/0: refused: x. Correct" in west
    assert "west/0: its clock differs by +400 s" in clock
    assert any("west.pem expires on" in line for line in report["warnings"])
    assert any("south/0: its clock differs by -2.0 s" in line for line in report["warnings"])
    assert "7710 FAULT" in " ".join(matrix(report)[2])
    hidden = {host: facts(host, None) for host in ("east/0", "west/0")}
    (apart,) = compiled(hidden, [], {}, [], [], ("x", 1))["faults"]
    assert "east/0 and west/0: neither can dial the other" in apart


def test_spans_of_ports() -> None:
    assert spans([7712, 7710, 7711, 7715]) == "7710-7712, 7715"


def test_the_error_names_what_stops_a_dial(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = Greeting("east/site0", "west/site0", 0, 0, 1)
    with Endpoint("west/p0.s1") as other:
        found = check_port(other.address, mine, Security())
        assert "another node" in found.error
    assert "refused: nothing listens" in check_port(other.address, mine, Security()).error
    with socket.create_server(("127.0.0.1", 0)) as silent:
        found = check_port(silent.getsockname()[:2], mine, Security(), timeout_s=0.2)
        assert "no answer within 0.2 s: a firewall" in found.error
    assert "does not resolve" in reason(socket.gaierror(), 1)


def test_the_command_ends_with_2_and_names_what_is_missing(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    rendezvous = f"127.0.0.1:{free_port()}"
    command = ["wan", "check", str(job.files[0]), "--dc", "east", "--rendezvous", rendezvous, "--gather", "0.2"]
    assert main(command) == 2
    assert "FAULT: west did not join at" in capsys.readouterr().out
    assert main([*command, "--json"]) == 2
    assert len(json.loads(capsys.readouterr().out)["faults"]) == 1
    assert main(["wan", "check", str(job.files[0]), "--dc", "moon"]) == 2
    assert "the plan has no worker there" in capsys.readouterr().err


def test_a_certificate_of_another_datacenter(tmp_path: Path) -> None:
    make_ca(tmp_path)
    make_node(tmp_path, "east")
    (tmp_path / "east.pem").rename(tmp_path / "west.pem")
    with pytest.raises(Exception, match=r"west.pem is for east/\*, not for west"):
        require_own_name(tmp_path, "west")
