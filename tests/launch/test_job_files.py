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
from atlas.spec import load_job

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


def test_names_are_valid_for_schedulers(folder: Path) -> None:
    text = (folder / "job.yaml").read_text().replace("name: small", "name: Llama 3.1, 8B (first try)")
    (folder / "job.yaml").write_text(text.replace("name: west", "name: West_2"))
    for target in ("slurm", "jobset", "trainjob"):
        assert launch(folder, target) == 0
    assert "--job-name=llama-3-1-8b-first-try-west-2\n" in (folder / "slurm" / "West_2.sbatch").read_text()
    for file in (folder / "jobset" / "West_2.jobset.yaml", folder / "trainjob" / "West_2.trainjob.yaml"):
        names = {found["metadata"]["name"] for found in yaml.safe_load_all(file.read_text())}
        assert names == {"llama-3-1-8b-first-try-west-2"}
    readme = (folder / "jobset" / "README.md").read_text()
    assert "--context West_2 create secret generic llama-3-1-8b-first-try-west-2-certs" in readme


def test_addresses_and_ports_of_the_recipe_are_used(folder: Path) -> None:
    network = "network: {ports: 7800-7809, sites: {west: {advertise: none, listen: 10.0.0.5, ports: 7900-7909}}}"
    (folder / "recipe.yaml").write_text(f"steps: 20\n{network}\n")
    assert launch(folder, "shell") == 0
    east, west = ((folder / "shell" / f"{dc}.0.sh").read_text() for dc in TWO)
    assert 'ADVERTISE="${ATLAS_ADVERTISE:-$(hostname -i' in east
    assert '--listen 0.0.0.0 --advertise "$ADVERTISE" --ports "${ATLAS_PORTS:-7800-7809}"' in east
    assert 'ADVERTISE="${ATLAS_ADVERTISE:-none}"' in west
    assert '--listen 10.0.0.5 --advertise "$ADVERTISE" --ports "${ATLAS_PORTS:-7900-7909}"' in west
    assert launch(folder, "shell", "--ports", "7710-7719") == 0
    assert "${ATLAS_PORTS:-7710-7719}" in (folder / "shell" / "west.0.sh").read_text()


def test_a_job_of_several_files_is_written_as_one(folder: Path) -> None:
    (folder / "job.yaml").rename(folder / "base.yaml")
    (folder / "job.yaml").write_text("base: base.yaml\nname: small\n")
    wanted = load_job(folder / "job.yaml")
    assert launch(folder, "shell") == 0
    (folder / "base.yaml").unlink()
    assert load_job(folder / "shell" / "plan.yaml").model_dump() == wanted.model_dump()


def test_the_readme_names_the_data_and_the_image_has_what_the_recipe_needs(folder: Path) -> None:
    (folder / "recipe.yaml").write_text("data: {shards: shards}\ncheckpoints: {folder: s3://bucket/run}\n")
    assert launch(folder, "shell") == 0
    assert "Every host reads `shards`. Relative paths are relative to this folder." in (
        (folder / "shell" / "README.md").read_text()
    )
    assert "[runtime,wan,s3]" in (folder / "shell" / "Dockerfile").read_text()
    assert launch(folder, "jobset") == 0
    assert "give paths on the volume, below `/atlas/disk`" in (folder / "jobset" / "README.md").read_text()


def test_bad_flags_are_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert launch(folder, "slurm", "--ports", "9-3") == 2
    (folder / "recipe.yaml").write_text("setps: 20\n")
    assert launch(folder, "slurm") == 2
    assert "Did you mean 'steps'?" in capsys.readouterr().err


def test_files_of_the_user_are_not_overwritten(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = folder / "slurm"
    out.mkdir()
    (out / "README.md").write_text("# My project\n")
    (out / "east.sbatch").write_text("#!/bin/bash\n")
    (out / "notes.txt").write_text("mine\n")
    assert launch(folder, "slurm") == 2
    error = capsys.readouterr().err
    assert "would overwrite README.md, east.sbatch, which it did not write" in error
    assert "Choose another folder" in error
    assert {file.name: file.read_text() for file in out.iterdir()} == {
        "README.md": "# My project\n",
        "east.sbatch": "#!/bin/bash\n",
        "notes.txt": "mine\n",
    }


def test_its_own_earlier_files_are_overwritten(folder: Path) -> None:
    """Also beside certificates and notes, with a changed plan and recipe, and for another target."""
    assert launch(folder, "slurm") == 0
    out = folder / "slurm"
    (out / "certs").mkdir()
    (out / "notes.txt").write_text("mine\n")
    (folder / "recipe.yaml").write_text("steps: 30\n")
    write_job(folder, *TWO, pp=2)
    assert launch(folder, "slurm", "--ports", "7801-7840") == 0
    assert (out / "recipe.yaml").read_text() == "steps: 30\n"
    assert "pp: 2" in (out / "plan.yaml").read_text()
    assert "7801-7840" in (out / "east.sbatch").read_text()
    assert launch(folder, "shell", "--out", str(out)) == 0
    assert "./east.0.sh" in (out / "README.md").read_text()
    assert (out / "notes.txt").read_text() == "mine\n"


def test_equal_copies_of_plan_and_recipe_may_be_there(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--out .` beside the plan and the recipe."""
    (folder / "plan.yaml").write_text((folder / "job.yaml").read_text())
    assert launch(folder, "slurm", "--out", str(folder)) == 0
    (folder / "README.md").unlink()
    (folder / "plan.yaml").write_text("another plan\n")
    assert launch(folder, "slurm", "--out", str(folder)) == 2
    assert "would overwrite plan.yaml, which it did not write" in capsys.readouterr().err
    assert (folder / "plan.yaml").read_text() == "another plan\n"
