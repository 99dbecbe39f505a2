"""Every command in the files that `atlas launch` writes, run as processes: 20 steps in two datacenters of two hosts, to
the same bits as the shell scripts. Kubernetes pods run their command and environment in a mount namespace with their
volumes at /atlas (needs root); validators run where their environments are given:

    python bench/launch_files.py [--k8s-python PYTHON] [--sky-python PYTHON]

PYTHON of an environment with kubernetes-validate and kubeflow-trainer-api, or with skypilot.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from common.report import Report

from atlas.cli import main as atlas
from atlas.runtime.checkpoint.load import choose, load_layers
from atlas.runtime.checkpoint.store import LocalStore

TARGETS = ("shell", "torchrun", "jobset", "trainjob", "skypilot")
DATACENTERS, HOSTS, STEPS = ("east", "west"), 2, 20
LIMIT_S = 150.0
JOB = {
    "name": "small",
    "model": {"layers": 4, "hidden": 32, "heads": 2, "vocab": 300, "seq_len": 32},
    "cluster": {
        "wan": {"latency_ms": 5, "pair_gbps": 1},
        "datacenters": [{"name": dc, "nodes": HOSTS, "gpus_per_node": 1} for dc in DATACENTERS],
    },
    "precision": "fp32",
    "microbatch": 2,
    "num_microbatches": 4,
    "pp": len(DATACENTERS) * HOSTS,
    "pipelines_per_cell": 1,
}
RECIPE = {
    "steps": STEPS,
    "data": {"shards": "shipped"},
    "learning_rate": {"peak": 3e-3, "warmup": 4, "decay": "cosine"},
    "checkpoints": {"every": 10},
}
ROUND_TRIP = """
import sys, yaml, kubernetes_validate
from kubeflow_trainer_api import models
kinds = {"JobSet": models.JobsetV1alpha2JobSet, "TrainJob": models.TrainerV1alpha1TrainJob,
         "TrainingRuntime": models.TrainerV1alpha1TrainingRuntime}
def lost(a, b, at=""):
    if isinstance(a, dict):
        return [f"{at}.{k}" for k in a if k not in (b or {})] + [x for k in a if k in (b or {})
                for x in lost(a[k], b[k], f"{at}.{k}")]
    if isinstance(a, list):
        return ([at] if len(a) != len(b) else []) + [x for p, q in zip(a, b) for x in lost(p, q, at)]
    return [] if a == b else [at]
for file in sys.argv[1:]:
    for found in yaml.safe_load_all(open(file)):
        if found["kind"] not in kinds:
            kubernetes_validate.validate(found, "1.34", strict=True)
            continue
        dropped = lost(found, kinds[found["kind"]].from_dict(found).to_dict())
        assert not dropped, dropped
        spec = found["spec"].get("template", {}).get("spec", found["spec"])
        for job in spec.get("replicatedJobs", []):
            whole = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}}
            kubernetes_validate.validate({**whole, "spec": job["template"]["spec"]}, "1.34", strict=True)
"""
GROUP = """
import sys
from sky.utils import dag_utils
dag = dag_utils.load_dag_from_yaml(sys.argv[1])
assert dag.is_job_group() and [(task.name, task.num_nodes) for task in dag.tasks] == [("east", 2), ("west", 2)]
"""


@dataclass
class Command:
    """What one host runs."""

    words: list[str]
    folder: Path
    env: dict[str, str] = field(default_factory=dict)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def rendered(target: str, root: Path) -> Path:
    (root / "job.yaml").write_text(yaml.dump(JOB))
    (root / "recipe.yaml").write_text(yaml.dump(RECIPE))
    out = root / target
    words = ["launch", str(root / "job.yaml"), "--recipe", str(root / "recipe.yaml"), "--target", target]
    words += ["--out", str(out), "--rendezvous", f"127.0.0.1:{free_port()}", "--device", "cpu"]
    assert atlas(words) == 0
    assert atlas(["wan", "certs", *DATACENTERS, "--out", str(out / "certs")]) == 0
    return out


def commands(target: str, folder: Path) -> list[Command]:
    if target == "shell":
        return [Command([f"./{file.name}"], folder) for file in sorted(folder.glob("*.sh"))]
    if target == "torchrun":
        found = []
        for dc in DATACENTERS:
            env = {"HOST0": f"127.0.0.1:{free_port()}"}
            found += [Command([f"./{dc}.sh"], folder, env) for _ in range(HOSTS)]
        return found
    if target == "skypilot":
        _, *tasks = yaml.safe_load_all((folder / "group.yaml").read_text())
        return [
            Command(["bash", "-c", task["run"]], folder, {"SKYPILOT_NODE_RANK": str(k), "SKYPILOT_NUM_NODES": "2"})
            for task in tasks
            for k in range(task["num_nodes"])
        ]
    return [pod for dc in DATACENTERS for pod in pods(folder, dc, target)]


def pods(folder: Path, dc: str, target: str) -> list[Command]:
    """Each pod's command and environment, with its volumes at their mount paths."""
    documents = {d["kind"]: d for d in yaml.safe_load_all((folder / f"{dc}.{target}.yaml").read_text())}
    holder = documents["JobSet"]["spec"] if target == "jobset" else documents["TrainingRuntime"]["spec"]
    jobs = holder.get("replicatedJobs") or holder["template"]["spec"]["replicatedJobs"]
    job = jobs[0]["template"]["spec"]
    container = dict(job["template"]["spec"]["containers"][0])
    count = job.get("completions")
    if target == "trainjob":
        trainer = documents["TrainJob"]["spec"]["trainer"]
        container |= {"command": trainer["command"], "env": trainer["env"]}
        count = trainer["numNodes"]
    mounted = folder / f"mount-{dc}"
    for name, text in documents["ConfigMap"]["data"].items():
        (mounted / "config").mkdir(parents=True, exist_ok=True)
        (mounted / "config" / name).write_text(text)
    (mounted / "disk").mkdir(exist_ok=True)
    shutil.copytree(folder / "certs", mounted / "certs")
    paths = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert {"/atlas/config", "/atlas/disk", "/atlas/certs"} <= paths, paths
    env = {variable["name"]: variable["value"] for variable in container["env"]}
    enter = ["unshare", "-m", "sh", "-c", 'mount --bind "$0" /atlas && exec "$@"', str(mounted)]
    return [
        Command([*enter, *container["command"]], folder, {**env, "JOB_COMPLETION_INDEX": str(k)}) for k in range(count)
    ]


def disks(target: str, folder: Path) -> dict[str, Path]:
    if target in ("jobset", "trainjob"):
        return {dc: folder / f"mount-{dc}" / "disk" for dc in DATACENTERS}
    return {dc: folder / "disk" / dc for dc in DATACENTERS}


def bits(target: str, folder: Path, step: int = STEPS) -> str:
    """SHA-256 of all weights and optimizer state of the last checkpoint."""
    stores = [LocalStore(disk / "checkpoints" / "own") for disk in disks(target, folder).values()]
    found = choose(stores, step=step)
    assert found is not None
    digest = hashlib.sha256()
    for layer, state in sorted(load_layers(found, found.layers).items()):
        for name, tensor in sorted(state.parameters.items()):
            digest.update(f"{layer} {name}".encode() + tensor.numpy().tobytes())
        for name, slots in sorted(state.optimizer.items()):
            for slot, tensor in sorted(slots.items()):
                digest.update(f"{layer} {name} {slot}".encode() + tensor.numpy().tobytes())
    return digest.hexdigest()


def run_all(target: str, folder: Path) -> list[int | None]:
    """Exit codes of all hosts' commands, started together."""
    base = free_port() % 10_000 + 20_000
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    running: list[subprocess.Popen[Any]] = []
    for number, command in enumerate(commands(target, folder)):
        ports = f"{base + 40 * number}-{base + 40 * number + 39}"
        env = {**os.environ, **command.env, "PATH": path, "ATLAS_ADVERTISE": "127.0.0.1", "ATLAS_PORTS": ports}
        with (folder / f"host{number}.log").open("w") as log:
            running.append(
                subprocess.Popen(command.words, cwd=command.folder, env=env, stdout=log, stderr=subprocess.STDOUT)
            )
    deadline = time.monotonic() + LIMIT_S
    try:
        return [process.wait(max(0.1, deadline - time.monotonic())) for process in running]
    except subprocess.TimeoutExpired:
        return [process.poll() for process in running]
    finally:
        for process in running:
            process.kill()


def validated(report: Report, name: str, python: str | None, code: str, files: list[Path]) -> None:
    if python is None:
        report.void(name, "no environment given")
        return
    done = subprocess.run(
        [python, "-c", code, *map(str, files)],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=files[0].parent,
        check=False,
    )
    if done.returncode:
        print(done.stderr[-2000:], file=sys.stderr)
    report.figure(name, float(done.returncode == 0), "accepted", at_least=1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--k8s-python")
    parser.add_argument("--sky-python")
    parser.add_argument("--only", choices=TARGETS, nargs="*", default=list(TARGETS))
    args = parser.parse_args()
    report = Report("Launch files: validated, and every command run as a process", "the shell scripts' bits")
    root = Path(tempfile.mkdtemp(prefix="atlas-launch-"))
    made = not Path("/atlas").exists() and os.geteuid() == 0
    if made:
        Path("/atlas").mkdir()
    wanted = ""
    try:
        for target in args.only:
            folder = rendered(target, root)
            if target in ("jobset", "trainjob"):
                files = sorted(folder.glob(f"*.{target}.yaml"))
                validated(report, f"launch_files/{target}/valid", args.k8s_python, ROUND_TRIP, files)
                if os.geteuid() != 0:
                    report.void(f"launch_files/{target}/same_bits", "needs root")
                    continue
            if target == "skypilot":
                validated(report, "launch_files/skypilot/valid", args.sky_python, GROUP, [folder / "group.yaml"])
            codes = run_all(target, folder)
            same = False
            if codes == [0] * len(codes):
                found = bits(target, folder)
                wanted = wanted or found
                same = found == wanted
            else:
                logs = {file.name: file.read_text()[-800:] for file in sorted(folder.glob("host*.log"))}
                print(json.dumps({"target": target, "codes": codes, **logs}, indent=1), file=sys.stderr)
            report.figure(f"launch_files/{target}/same_bits", float(same), "equal", at_least=1)
    finally:
        shutil.rmtree(root, ignore_errors=True)
        if made:
            Path("/atlas").rmdir()
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
