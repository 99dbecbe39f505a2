"""Files that start a plan under the schedulers people have: one ordinary job per datacenter, in that datacenter's own
scheduler, joined by the rendezvous. Slurm scripts, Kubernetes manifests (JobSet, TrainJob), a SkyPilot job group,
torchrun and plain shell scripts, a Dockerfile, and a README with the commands.

Writes text. Starts nothing, and knows no cluster but what the plan says.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from atlas.errors import START_AGAIN, SpecError
from atlas.launch.hosts import NUM_HOSTS, hosts_needed, workers_per_host
from atlas.launch.job_readme import DOCKERFILE, readme
from atlas.spec import Job
from atlas.spec.document import YAML_WIDTH
from atlas.spec.recipe import NetworkRecipe

ROOT = "/atlas"
"""Where containers find the plan (config), the certificates (certs) and the disk."""
MAX_RESTARTS = 100
"""Of a Kubernetes job: hosts come and go for weeks."""
EXIT_USER = 2
"""Exit code of a mistake in a file or a flag: a restart does not correct it."""
PORTS = "7701-7740"
MARK = "Written by `atlas launch`"
"""In every file but the copies of plan and recipe."""
OWN_ADDRESS = '$(hostname -i | cut -d" " -f1)'


@dataclass(frozen=True)
class LaunchChoice:
    """What the files are made of, beside the plan."""

    job: Job
    plan: str
    """The text of the plan."""
    recipe: str
    """The text of the recipe."""
    rendezvous: str
    image: str
    ports: str | None
    """In place of the recipe's."""
    device: str
    certs: bool
    """Whether certificates are mounted; without them only loopback works."""
    in_object_store: bool = False
    """Whether the recipe has an `s3://` place for checkpoints; otherwise they are on the host's volume."""
    apart: bool = False
    """Whether `rendezvous` is the address of `atlas coordinator`, not of a host of the first datacenter."""
    network: NetworkRecipe = field(default_factory=NetworkRecipe)
    folders: tuple[str, ...] = ()
    """Files and folders beside checkpoints that every host reads, as the recipe and the job name them."""

    @property
    def name(self) -> str:
        """The job's name as schedulers allow it."""
        return label(self.job.name, 24) or "job"

    def job_name(self, dc: str) -> str:
        return f"{self.name}-{label(dc, 20)}"

    def ports_of(self, dc: str) -> str:
        return self.ports or self._recipe(dc, "ports") or PORTS

    def advertise(self, dc: str) -> str:
        """Sets the address that other datacenters dial. ATLAS_ADVERTISE replaces it on a host (NAT), also by none."""
        return f'ADVERTISE="${{ATLAS_ADVERTISE:-{self._recipe(dc, "advertise") or OWN_ADDRESS}}}"'

    def _recipe(self, dc: str, key: str) -> str | None:
        """`network.sites.DC` comes before `network`."""
        site = self.network.sites.get(dc)
        found: str | None = getattr(site, key) if site is not None else None
        return found or getattr(self.network, key)

    @property
    def hosts(self) -> dict[str, int]:
        return hosts_needed(self.job)

    def gpus(self, dc: str) -> int:
        """On each host; none where training runs on CPUs."""
        if not self.device.startswith("cuda"):
            return 0
        return self.job.cluster.dc(dc).gpus_per_node

    def line(self, dc: str, program: str, *more: str, config: str = ".", disk: str = "") -> str:
        """`atlas train ...`, the same on every host of a datacenter. Shell variables are expanded by a shell."""
        disk = disk or f"disk/{dc}"
        found = [*program.split(), "train", f"{config}/plan.yaml", "--recipe", f"{config}/recipe.yaml", "--dc", dc]
        found += ["--no-bar", "--coordinator" if self.apart else "--rendezvous", self.rendezvous]
        found += ["--listen", self._recipe(dc, "listen") or "0.0.0.0", "--advertise", "$ADVERTISE"]
        found += ["--ports", f"${{ATLAS_PORTS:-{self.ports_of(dc)}}}", "--device", self.device]
        found += [] if self.in_object_store else ["--checkpoints", f"{disk}/checkpoints"]
        found += ["--runs", f"{disk}/runs"]
        found += ["--certs", "./certs" if config == "." else f"{ROOT}/certs"] if self.certs else []
        return " ".join(f'"{word}"' if "$" in word else word for word in [*found, *more])


def label(text: str, length: int) -> str:
    """Lower-case letters, digits and `-`: a name that Slurm and Kubernetes allow."""
    return re.sub("[^a-z0-9]+", "-", text.lower()).strip("-")[:length].strip("-")


# ---- shell, torchrun, Slurm ----------------------------------------------------------------------------------------
def shell_files(choice: LaunchChoice) -> dict[str, str]:
    """A script for each host."""
    return {
        f"{dc}.{host}.sh": _script(choice.advertise(dc), choice.line(dc, "exec atlas", "--node", f"{host}/{count}"))
        for dc, count in choice.hosts.items()
        for host in range(count)
    }


def torchrun_script(choice: LaunchChoice, dc: str) -> str:
    """Started on each host of a datacenter."""
    program = (
        f"exec torchrun --nnodes {choice.hosts[dc]} --nproc-per-node {workers_per_host(choice.job, dc)} "
        f"--rdzv-backend c10d --rdzv-id {choice.name} --rdzv-endpoint $HOST0 -m atlas"
    )
    need = ': "${HOST0:?set HOST0 to HOST:PORT of the first host of this datacenter, the same on each}"'
    return _script(need, choice.advertise(dc), choice.line(dc, program))


def _script(*lines: str) -> str:
    head = ("#!/bin/bash", "# Written by `atlas launch`.", "set -eu", 'cd "$(dirname "$0")"')
    return "\n".join((*head, *lines)) + "\n"


def slurm_script(choice: LaunchChoice, dc: str) -> str:
    """A batch script for the cluster of a datacenter."""
    gpus = choice.gpus(dc)
    return SLURM.format(
        name=choice.job_name(dc),
        count=choice.hosts[dc],
        gpus=f"#SBATCH --gpus-per-node={gpus}\n" if gpus else "",
        advertise=choice.advertise(dc),
        line=choice.line(dc, "exec atlas"),
        again=START_AGAIN,
    )


SLURM = """\
#!/bin/bash
# Written by `atlas launch`. One task on each node starts its workers. Nodes beyond those that the plan uses are spares:
# a node that fails does not end the job (--no-kill).
#SBATCH --job-name={name}
#SBATCH --nodes={count}
#SBATCH --ntasks-per-node=1
{gpus}#SBATCH --requeue
#SBATCH --no-kill
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@120
set -u
cd "$SLURM_SUBMIT_DIR"
# Slurm signals this shell before the time limit and when it preempts: the tasks save and end with {again}.
trap 'kill -USR1 "$step"' USR1 TERM
srun --no-kill --kill-on-bad-exit=0 bash -c '
{advertise}
{line}
' &
step=$!
wait "$step"; code=$?
while kill -0 "$step" 2>/dev/null; do wait "$step"; code=$?; done
if [ "$code" -eq {again} ]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit "$code"
"""


# ---- Kubernetes ----------------------------------------------------------------------------------------------------
def _pod(choice: LaunchChoice, dc: str, container: str) -> dict[str, Any]:
    """The pod of one host. Certificates and disks are referred to by name."""
    volumes: list[dict[str, Any]] = [
        {"name": "config", "configMap": {"name": choice.job_name(dc)}},
        {"name": "disk", "persistentVolumeClaim": {"claimName": choice.job_name(dc)}},
        {"name": "shm", "emptyDir": {"medium": "Memory"}},
    ]
    mounts = [
        {"name": "config", "mountPath": f"{ROOT}/config", "readOnly": True},
        {"name": "disk", "mountPath": f"{ROOT}/disk"},
        {"name": "shm", "mountPath": "/dev/shm"},
    ]
    if choice.certs:
        volumes.append({"name": "certs", "secret": {"secretName": f"{choice.job_name(dc)}-certs"}})
        mounts.append({"name": "certs", "mountPath": f"{ROOT}/certs", "readOnly": True})
    line = f"{choice.advertise(dc)}; {choice.line(dc, 'exec atlas', config=f'{ROOT}/config', disk=f'{ROOT}/disk')}"
    found: dict[str, Any] = {
        "name": container,
        "image": choice.image,
        "command": ["bash", "-c", line],
        "env": [{"name": NUM_HOSTS, "value": str(choice.hosts[dc])}],
        "volumeMounts": mounts,
    }
    if choice.gpus(dc):
        found["resources"] = {"limits": {"nvidia.com/gpu": choice.gpus(dc)}}
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 120,
        "hostNetwork": True,
        "dnsPolicy": "ClusterFirstWithHostNet",
        "containers": [found],
        "volumes": volumes,
    }


def _indexed_job(choice: LaunchChoice, dc: str, pod: dict[str, Any], container: str) -> dict[str, Any]:
    """A numbered pod for each host. Exit code 75 starts a pod again, 2 ends the job."""

    def rule(action: str, code: int) -> dict[str, Any]:
        return {"action": action, "onExitCodes": {"containerName": container, "operator": "In", "values": [code]}}

    count = choice.hosts[dc]
    return {
        "parallelism": count,
        "completions": count,
        "completionMode": "Indexed",
        "backoffLimit": MAX_RESTARTS,
        "podFailurePolicy": {"rules": [rule("FailJob", EXIT_USER), rule("Ignore", START_AGAIN)]},
        "template": {"spec": pod},
    }


def _manifest(api: str, kind: str, name: str, **rest: Any) -> dict[str, Any]:
    return {"apiVersion": api, "kind": kind, "metadata": {"name": name}, **rest}


def _config_map(choice: LaunchChoice, dc: str) -> dict[str, Any]:
    data = {"plan.yaml": choice.plan, "recipe.yaml": choice.recipe}
    return _manifest("v1", "ConfigMap", choice.job_name(dc), data=data)


def jobset_manifests(choice: LaunchChoice, dc: str) -> str:
    job = _indexed_job(choice, dc, _pod(choice, dc, "atlas"), "atlas")
    policy = {
        "maxRestarts": MAX_RESTARTS,
        "rules": [{"name": "usererror", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}],
    }
    jobs = [{"name": "hosts", "replicas": 1, "template": {"spec": job}}]
    spec = {"failurePolicy": policy, "replicatedJobs": jobs}
    manifest = _manifest("jobset.x-k8s.io/v1alpha2", "JobSet", choice.job_name(dc), spec=spec)
    return _documents(_config_map(choice, dc), manifest)


def trainjob_manifests(choice: LaunchChoice, dc: str) -> str:
    """A TrainJob and the TrainingRuntime that it refers to. Kubeflow replaces the container named `node`."""
    name, count, pod = choice.job_name(dc), choice.hosts[dc], _pod(choice, dc, "node")
    container = pod["containers"][0]
    command, env = container.pop("command"), container.pop("env")
    job = _indexed_job(choice, dc, pod, "node")
    for key in ("parallelism", "completions"):
        job.pop(key)  # Kubeflow sets them by numNodes
    labels = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    template = {"metadata": {"labels": labels}, "spec": job}
    jobs = [{"name": "node", "replicas": 1, "template": template}]
    runtime = {"mlPolicy": {"numNodes": count}, "template": {"spec": {"replicatedJobs": jobs}}}
    reference = {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": name}
    trainer = {"image": choice.image, "numNodes": count, "command": command, "env": env}
    api = "trainer.kubeflow.org/v1alpha1"
    return _documents(
        _config_map(choice, dc),
        _manifest(api, "TrainingRuntime", name, spec=runtime),
        _manifest(api, "TrainJob", name, spec={"runtimeRef": reference, "trainer": trainer}),
    )


# ---- SkyPilot ------------------------------------------------------------------------------------------------------
def skypilot_files(choice: LaunchChoice) -> dict[str, str]:
    """One job group: a task for each datacenter, all at once."""
    documents: list[dict[str, Any]] = [{"name": choice.name, "execution": "parallel"}]
    for dc, count in choice.hosts.items():
        first = dc == next(iter(choice.hosts)) and not choice.apart
        ports = [choice.ports_of(dc), *([choice.rendezvous.rpartition(":")[2]] if first else [])]
        resources: dict[str, Any] = {"image_id": f"docker:{choice.image}", "ports": ports}
        if choice.gpus(dc):
            gpu = choice.job.cluster.dc(dc).gpu
            resources["accelerators"] = f"{gpu.split('-')[0].upper()}:{choice.gpus(dc)}"
        run = f"{choice.advertise(dc)}\n{choice.line(dc, 'exec atlas')}\n"
        documents.append({"name": dc, "num_nodes": count, "resources": resources, "workdir": ".", "run": run})
    return {"group.yaml": _documents(*documents)}


class _BlockDumper(yaml.SafeDumper):
    """Text of several lines as a block, no aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_BlockDumper.add_representer(str, _text)


def _documents(*documents: dict[str, Any]) -> str:
    body = yaml.dump_all(documents, Dumper=_BlockDumper, sort_keys=False, width=YAML_WIDTH, explicit_start=True)
    return f"# Written by `atlas launch`.\n{body}"


def _by_datacenter(suffix: str, text: Callable[[LaunchChoice, str], str]) -> Callable[[LaunchChoice], dict[str, str]]:
    """A file for each datacenter."""
    return lambda choice: {f"{dc}{suffix}": text(choice, dc) for dc in choice.hosts}


TARGETS: dict[str, Callable[[LaunchChoice], dict[str, str]]] = {
    "slurm": _by_datacenter(".sbatch", slurm_script),
    "jobset": _by_datacenter(".jobset.yaml", jobset_manifests),
    "trainjob": _by_datacenter(".trainjob.yaml", trainjob_manifests),
    "skypilot": skypilot_files,
    "torchrun": _by_datacenter(".sh", torchrun_script),
    "shell": shell_files,
}


def _require_own(folder: Path, files: Mapping[str, str]) -> None:
    """Raise SpecError where a file exists that would change and that `atlas launch` did not write."""
    there = {name: (folder / name).read_text(errors="replace") for name in files if (folder / name).is_file()}
    copies = ("plan.yaml", "recipe.yaml") if MARK in there.get("README.md", "") else ()  # these have no mark
    own = [name for name, text in there.items() if text == files[name] or MARK in text or name in copies]
    if foreign := sorted(name for name in files if (folder / name).exists() and name not in own):
        rule = f"`atlas launch` would overwrite {', '.join(foreign)}, which it did not write"
        remedy = "Choose another folder, or move the files"
        raise SpecError(where="--out", key="folder", value=str(folder), rule=rule, remedy=remedy)


def write_files(choice: LaunchChoice, target: str, folder: Path) -> list[Path]:
    """Write the files of a target, the plan, the recipe, a Dockerfile and a README; their paths.

    Files of an earlier `atlas launch` are overwritten. Raises SpecError where another file would be.
    """
    own = TARGETS[target](choice)
    files = {**own, "plan.yaml": choice.plan, "recipe.yaml": choice.recipe}
    files |= {
        "Dockerfile": DOCKERFILE.format(extras="runtime,wan,s3" if choice.in_object_store else "runtime,wan"),
        "README.md": readme(
            choice.name,
            target,
            sorted(own),
            {dc: (count, choice.job_name(dc)) for dc, count in choice.hosts.items()},
            certs=choice.certs,
            coordinator=choice.rendezvous if choice.apart else None,
            folders=choice.folders,
        ),
    }
    _require_own(folder, files)
    for name, text in files.items():
        (folder / name).write_text(text)
        if name.endswith((".sh", ".sbatch")):
            (folder / name).chmod(0o755)
    return [folder / name for name in files]
