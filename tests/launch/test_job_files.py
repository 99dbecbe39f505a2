"""Launch files: one job per datacenter with the plan's hosts, and launchers that find their host from schedulers."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import yaml
from multi_dc_runs import write_job

from atlas.cli import main
from atlas.errors import AtlasError
from atlas.launch.hosts import hosts_needed, scheduled_place
from atlas.launch.job_files import TARGETS

TWO = ("east", "west")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_job(tmp_path, *TWO, pp=4)
    (tmp_path / "recipe.yaml").write_text("steps: 20\n")
    return tmp_path


def launch(folder: Path, target: str, *flags: str, where: str = "--rendezvous") -> int:
    words = ["launch", str(folder / "job.yaml"), "--recipe", str(folder / "recipe.yaml"), "--target", target]
    return main([*words, "--out", str(folder / target), where, "203.0.113.1:7700", *flags])


@pytest.mark.parametrize("target", TARGETS)
def test_every_target_writes_its_files(target: str, folder: Path) -> None:
    assert launch(folder, target) == 0
    out = folder / target
    text = (out / "README.md").read_text()
    assert "2 in east, 2 in west" in text
    common = {"plan.yaml", "recipe.yaml", "Dockerfile", "README.md"}
    own = [file for file in out.iterdir() if file.name not in common]
    assert own
    assert all((out / name).exists() for name in common)
    for file in own:
        assert file.name in text
        if file.suffix == ".yaml":
            assert list(yaml.safe_load_all(file.read_text()))
        else:
            assert subprocess.run(["bash", "-n", str(file)], check=False).returncode == 0


@pytest.mark.parametrize("target", TARGETS)
def test_files_for_a_coordinator_on_a_machine_of_its_own(target: str, folder: Path) -> None:
    """Its command is in the README, and its certificate is made with the others."""
    assert launch(folder, target, where="--coordinator") == 0
    text = (folder / target / "README.md").read_text()
    assert "atlas coordinator plan.yaml --listen 203.0.113.1:7700 --state state --recipe recipe.yaml --certs" in text
    assert "atlas wan certs coordinator east west --out certs" in text
    for file in (folder / target).glob("*.*"):
        if file.name.startswith(("east", "west", "group")):
            assert "--coordinator 203.0.113.1:7700 " in file.read_text()
            assert "--rendezvous" not in file.read_text()


def test_a_job_group_opens_the_port_of_the_rendezvous_where_it_is(folder: Path) -> None:
    def opened() -> dict[str, list[str]]:
        _, *tasks = yaml.safe_load_all((folder / "skypilot" / "group.yaml").read_text())
        return {task["name"]: task["resources"]["ports"] for task in tasks}

    assert launch(folder, "skypilot") == 0
    assert opened() == {"east": ["7701-7740", "7700"], "west": ["7701-7740"]}
    assert launch(folder, "skypilot", where="--coordinator") == 0
    assert opened() == {"east": ["7701-7740"], "west": ["7701-7740"]}


def test_a_jobset_has_a_pod_for_each_host_and_ends_on_a_users_error(folder: Path) -> None:
    assert launch(folder, "jobset") == 0
    config, jobset = yaml.safe_load_all((folder / "jobset" / "east.jobset.yaml").read_text())
    assert config["data"]["recipe.yaml"] == "steps: 20\n"
    job = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert (job["completions"], job["parallelism"], job["completionMode"]) == (2, 2, "Indexed")
    rules = {rule["onExitCodes"]["values"][0]: rule["action"] for rule in job["podFailurePolicy"]["rules"]}
    assert rules == {2: "FailJob", 75: "Ignore"}
    container = job["template"]["spec"]["containers"][0]
    assert container["resources"] == {"limits": {"nvidia.com/gpu": 1}}
    secrets = [volume["secret"] for volume in job["template"]["spec"]["volumes"] if "secret" in volume]
    assert secrets == [{"secretName": "small-east-certs"}]


@pytest.mark.parametrize(
    ("variables", "place"),
    [
        ({"SLURM_NODEID": "1", "SLURM_NNODES": "2"}, (1, 2)),
        ({"SLURM_NODEID": "2", "SLURM_NNODES": "3"}, (2, 2)),
        ({"SKYPILOT_NODE_RANK": "0", "SKYPILOT_NUM_NODES": "2"}, (0, 2)),
        ({"JOB_COMPLETION_INDEX": "1", "ATLAS_NUM_HOSTS": "2"}, (1, 2)),
        ({"SLURM_NODEID": "1"}, None),
        ({}, None),
    ],
)
def test_a_launcher_finds_its_host_from_the_scheduler(
    variables: dict[str, str], place: tuple[int, int] | None, folder: Path
) -> None:
    job = write_job(folder, *TWO, pp=4)
    assert hosts_needed(job) == {"east": 2, "west": 2}
    assert scheduled_place(job, "west", variables) == place


def test_too_few_hosts_are_refused_with_the_number(folder: Path) -> None:
    job = write_job(folder, *TWO, pp=4)
    with pytest.raises(AtlasError, match="SLURM_NNODES=1: the plan uses 2 hosts in west"):
        scheduled_place(job, "west", {"SLURM_NODEID": "0", "SLURM_NNODES": "1"})
    with pytest.raises(AtlasError, match="first must be below"):
        scheduled_place(job, "west", {"SLURM_NODEID": "3", "SLURM_NNODES": "2"})


def test_bad_flags_are_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert launch(folder, "slurm", "--ports", "9-3") == 2
    (folder / "recipe.yaml").write_text("setps: 20\n")
    assert launch(folder, "slurm") == 2
    assert "Did you mean 'steps'?" in capsys.readouterr().err
