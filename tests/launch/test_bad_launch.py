"""What a person got wrong is told in one message that names it and the remedy; no worker starts, nothing is changed."""

from __future__ import annotations

import socket
import threading
import time
from pathlib import Path

import pytest
from free_ports import free_port, free_ports
from multi_dc_runs import Run, job_text, run_datacenters, train_options, write_job

from atlas.cli import main
from atlas.errors import AtlasError
from atlas.launch.preflight import WORKER_BYTES
from atlas.launch.rendezvous import AgentName, Rendezvous, RendezvousClient
from atlas.launch.site_network import PortRange, SiteNetwork
from atlas.spec.recipe import OptimizerRecipe
from atlas.wan.security.certs import make_ca, make_node
from atlas.wan.security.credentials import Credentials, Security

TWO = ("east", "west")


def told(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["train", *words]) == 2
    said = capsys.readouterr().err.strip()
    assert said.startswith("atlas: ")
    assert "Traceback" not in said
    return said


@pytest.fixture
def job_file(tmp_path: Path) -> str:
    file = tmp_path / "job.yaml"
    file.write_text(job_text(*TWO))
    return str(file)


def test_a_plan_for_other_hardware_is_an_error(job_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = told(capsys, job_file, "--dc", "east", "--device", "cuda", "--set=pipelines_per_cell=2")
    assert "puts 2 worker(s) on this host of east" in said
    assert "--device cpu" in said


def test_a_datacenter_that_the_plan_does_not_have(job_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "--dc north: the plan has no worker there; it has them in east, west" in told(
        capsys, job_file, "--dc", "north", "--device", "cpu"
    )
    said = told(capsys, job_file, "--dc", "east", "--device", "cpu", "--without", "moon")
    assert "--without moon: the plan has no such datacenter" in said


def test_a_model_that_does_not_fit(job_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    large = ["--set=memory_gib=100000", "--set=model.hidden=65536", "--set=model.heads=512", "--set=model.layers=96"]
    said = told(capsys, job_file, "--dc", "east", "--device", "cpu", "--rendezvous", "127.0.0.1:0", *large)
    assert "the model does not fit" in said
    assert "more stages" in said


def test_a_port_in_use(job_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        said = told(capsys, job_file, "--dc", "east", "--device", "cpu", "--rendezvous", f"127.0.0.1:{port}")
    assert f"127.0.0.1:{port}: the coordinator cannot listen there: Address already in use" in said
    assert "Choose a port that is free" in said


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--rendezvous", "nowhere"], "must be HOST:PORT"),
        (["--node", "2/2"], "must be two whole numbers, I below N"),
        (["--certs", "/no/such/folder"], "Make certificates with `atlas wan certs`"),
        (["--emulate"], "--dc NAME"),
    ],
)
def test_flags_that_make_no_sense(
    job_file: str, flags: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert says in told(capsys, job_file, "--dc", "east", "--device", "cpu", *flags)


def test_a_trusted_network_that_is_none_or_without_certificates(
    job_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_ca(tmp_path / "certs")
    make_node(tmp_path / "certs", "east")
    here = [job_file, "--dc", "east", "--device", "cpu", "--trusted"]
    said = told(capsys, *here, "10.0.0.0/33", "--certs", str(tmp_path / "certs"))
    assert "--trusted 10.0.0.0/33: not a network" in said
    assert "Give --certs too, or leave out --trusted" in told(capsys, *here, "10.0.0.0/8")
    assert main(["wan", "check", job_file, "--dc", "east", "--trusted", "10.0.0.0/8", "--gather", "0.1"]) == 2
    assert "Give --certs too, or leave out --trusted" in capsys.readouterr().err


def test_a_certificate_of_another_datacenter_is_refused_at_once(
    job_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_ca(tmp_path)
    make_node(tmp_path, "west")
    for kind in ("pem", "key"):
        (tmp_path / f"west.{kind}").rename(tmp_path / f"east.{kind}")
    for flags in ([], ["--spare"]):
        said = told(capsys, job_file, "--dc", "east", "--device", "cpu", "--certs", str(tmp_path), *flags)
        assert "east.pem is for west/*, not for east. Make one with `atlas wan certs east`" in said


def test_a_wrong_certificate(tmp_path: Path) -> None:
    for folder in ("ours", "foreign"):
        make_ca(tmp_path / folder)
        for dc in TWO:
            make_node(tmp_path / folder, dc)
    ours = Security(Credentials.of_folder(tmp_path / "ours", "east/site0"))
    rendezvous = Rendezvous(("127.0.0.1", 0), ours, lambda agent, plan: None)

    def call(folder: str, credentials: str, name: str) -> None:
        security = Security(Credentials.of_folder(tmp_path / folder, credentials))
        caller = RendezvousClient(
            rendezvous.address, AgentName("east"), AgentName(name), "plan", security, grace_s=0.5, patience_s=0.5
        )
        caller.close()

    call("ours", "west/site0", "west")
    with pytest.raises(AtlasError, match=r"rendezvous .* in east: TLS refused: .*`atlas wan certs`"):
        call("foreign", "west/site0", "west")
    with pytest.raises(AtlasError, match="the other side closed the connection"):
        call("ours", "west/site0", "south")  # a certificate of west is not valid for another
    assert list(rendezvous.agents) == [("west", 0)]
    rendezvous.close()


def test_launchers_of_one_datacenter_must_agree_on_their_number() -> None:
    rendezvous = Rendezvous(("127.0.0.1", 0), Security(), lambda agent, plan: None)

    def call(*part: int) -> RendezvousClient:
        mine = AgentName("west", *part)
        return RendezvousClient(
            rendezvous.address, AgentName("east"), mine, "plan", Security(), grace_s=0.5, patience_s=0.5
        )

    first = call(0, 2)
    with pytest.raises(AtlasError, match=r"refused west/1: .* as one of 2: give --node I/N with the same N"):
        call(1, 3)
    first.close()
    deadline = time.monotonic() + 60
    while rendezvous.agents["west", 0].channel.is_connected:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    call(1, 3).close()
    assert list(rendezvous.agents) == [("west", 1)], "a launcher that is gone does not count"
    rendezvous.close()


def test_data_shorter_than_one_batch(tmp_path: Path) -> None:
    text, shards = tmp_path / "text.txt", tmp_path / "shards"
    text.write_text("too short")
    assert main(["data", "tokenize", str(text), "--out", str(shards)]) == 0
    job = write_job(tmp_path, *TWO)
    options = train_options(2, data=str(shards))
    settings = {dc: {"data": str(shards)} for dc in TWO}
    run = run_datacenters(job, {dc: tmp_path / dc for dc in TWO}, options, settings=settings)
    assert "tokens, but one sequence takes 33" in str(run.errors["east"])
    assert run.codes == {"west": 2}
    assert run.starts <= 1, "starting again would not help"
    assert not list(tmp_path.glob("*/own/step-*"))


def test_a_damaged_shard_is_named_and_nothing_is_overwritten(tmp_path: Path) -> None:
    job, folders = write_job(tmp_path, *TWO), {dc: tmp_path / dc for dc in TWO}
    assert run_datacenters(job, folders, train_options(2)).codes == dict.fromkeys(TWO, 0)
    (damaged,) = (tmp_path / "east" / "own").glob("step-00000002-a0/*embedding.weights.safetensors")
    data = bytearray(damaged.read_bytes())
    data[-1] ^= 1
    damaged.write_bytes(data)
    before = {path: path.read_bytes() for path in tmp_path.rglob("step-*/*")}
    run = run_datacenters(job, folders, train_options(4))
    error = run.errors["east"]
    assert isinstance(error, AtlasError)
    assert f"{damaged}: damaged" in str(error)
    assert "Copy the file back from a replica" in str(error)
    assert run.codes == {"west": 2}
    assert {path: path.read_bytes() for path in tmp_path.rglob("step-*/*")} == before


def test_a_launcher_with_another_plan_is_refused_with_the_reason(tmp_path: Path) -> None:
    job, other = write_job(tmp_path, *TWO), write_job(tmp_path / "west", *TWO, num_microbatches=8)
    port = free_port()
    runs: dict[str, Run] = {}

    def coordinate() -> None:
        options = train_options(2, gather_s=6.0)
        runs["east"] = run_datacenters(job, {"east": tmp_path / "east"}, options, port=port)

    coordinator = threading.Thread(target=coordinate)
    coordinator.start()
    run = run_datacenters(other, {"west": tmp_path / "west"}, train_options(2, gather_s=120.0), port=port)
    coordinator.join()
    assert "refused west: its plan differs from the plan" in str(run.errors["west"])
    assert "west did not connect to" in str(runs["east"].errors["east"])


def test_a_divergence_is_the_users_error_and_the_last_good_checkpoint_is_named(tmp_path: Path) -> None:
    job, folders = write_job(tmp_path, *TWO), {dc: tmp_path / dc for dc in TWO}
    sgd = OptimizerRecipe(name="sgd")
    assert run_datacenters(job, folders, train_options(2, optimizer=sgd)).codes == dict.fromkeys(TWO, 0)
    run = run_datacenters(job, folders, train_options(100, optimizer=sgd, learning_rate=1e6, save_every=50))
    assert run.starts == 1, "no restart helps"
    assert run.codes == {"west": 2}
    assert max(run.losses) < 50
    said = str(run.errors["east"])
    assert "the training has diverged at step" in said
    assert "The last good checkpoint is of step 2. Lower learning_rate.peak" in said


def test_launchers_on_one_machine_that_do_not_fit_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them does."""
    monkeypatch.setattr("atlas.launch.agent.free_bytes", lambda: WORKER_BYTES * 3 // 2)
    run = run_datacenters(write_job(tmp_path, *TWO), {dc: tmp_path / dc for dc in TWO}, train_options(2))
    assert "does not fit" in str(run.errors["east"])
    assert "free on the host of east, west, for 2 workers" in str(run.errors["east"])
    assert run.codes == {"west": 2}
    assert not run.starts


def test_overlapping_ports_on_one_machine(tmp_path: Path) -> None:
    (first,) = free_ports(8, 1)
    networks = {"east": PortRange(first, first + 4), "west": PortRange(first + 3, first + 7)}
    settings = {dc: {"network": SiteNetwork(ports=ports)} for dc, ports in networks.items()}
    run = run_datacenters(
        write_job(tmp_path, *TWO), {dc: tmp_path / dc for dc in TWO}, train_options(2), settings=settings
    )
    assert "are on one host, and their --ports" in str(run.errors["east"])
    assert run.codes == {"west": 2}
    assert not run.starts
