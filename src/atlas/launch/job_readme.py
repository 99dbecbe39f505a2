"""The README and the Dockerfile beside launch files (`job_files`): the commands that start, watch and stop the jobs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

DOCKERFILE = """\
# Written by `atlas launch`, which builds nothing: build it, and try `atlas --version` in it first.
FROM python:3.11-slim
RUN apt-get update && apt-get install -y --no-install-recommends bash && rm -rf /var/lib/apt/lists/*
RUN pip install --no-cache-dir 'atlas-bubbletea[{extras}]'
ENTRYPOINT []
"""

START = {
    "slurm": "sbatch {file}    # in {dc}'s cluster; --nodes with one more than the script says adds a spare",
    "jobset": "kubectl --context {dc} apply -f {file}",
    "trainjob": "kubectl --context {dc} apply -f {file}",
    "skypilot": "sky jobs launch {file}",
    "torchrun": "HOST0=FIRST_HOST_OF_{dc}:29500 ./{file}    # on each host of {dc}",
    "shell": "./{file}    # on that host of {dc}",
}
STOP = {
    "slurm": "scancel --signal=TERM JOBID    # saves; the job is queued again. `scancel JOBID` ends it for good",
    "jobset": "kubectl --context DC delete -f DC.jobset.yaml",
    "trainjob": "kubectl --context DC delete -f DC.trainjob.yaml",
    "skypilot": "sky jobs cancel ID",
    "torchrun": "kill -TERM the launchers",
    "shell": "kill -TERM the launchers",
}


def readme(
    name: str,
    target: str,
    files: Sequence[str],
    hosts: Mapping[str, tuple[int, str]],
    *,
    certs: bool,
    coordinator: str | None,
    folders: Sequence[str],
) -> str:
    """`hosts`: by datacenter, how many, and the name of its job. `coordinator`: the address of `atlas coordinator`;
    None: a host of the first datacenter coordinates. `folders`: what every host reads."""
    lines = [START[target].format(file=file, dc=file.partition(".")[0]) for file in files]
    counted = ", ".join(f"{count} in {dc}" for dc, (count, _) in hosts.items())
    parts = [
        f"# {name} under {target}",
        f"Written by `atlas launch`. The plan uses these hosts: {counted}. Each datacenter has an ordinary job of its "
        "own; the jobs find each other at the rendezvous. Start them in any order:",
        "```sh\n" + "\n".join(lines) + "\n```",
        _coordinator(coordinator, next(iter(hosts)), certs=certs),
        "Stop, with a checkpoint that the same job resumes from:",
        f"```sh\n{STOP[target]}\n```",
        "Exit codes: 0 done; 75 start it again (these files do that); 2 fix what the message says. `docs/operating.md` "
        "explains ports, addresses behind NAT (`ATLAS_ADVERTISE`, `ATLAS_PORTS`) and failures.",
    ]
    if certs:
        parts.append(_certs(target, [*(["coordinator"] if coordinator else []), *hosts], hosts))
    in_pods = target in ("jobset", "trainjob")
    if in_pods:
        claims = ", ".join(f"`{job}`" for _, job in hosts.values())
        parts.append(f"Each datacenter needs a PersistentVolumeClaim for checkpoints and logs: {claims}.")
    if folders:
        read = ", ".join(f"`{folder}`" for folder in folders)
        where = "`/atlas/config`: give paths on the volume, below `/atlas/disk`" if in_pods else "this folder"
        parts.append(f"Every host reads {read}. Relative paths are relative to {where}.")
    parts.append("The Dockerfile was not built here; the image's name is a parameter of `atlas launch`.")
    return "\n\n".join(parts) + "\n"


def _coordinator(address: str | None, first: str, *, certs: bool) -> str:
    if address is None:
        return (
            f"The first host of {first} must have the rendezvous' address. Where a scheduler chooses the host, write "
            "the files with `--coordinator` instead, for a machine whose address is known."
        )
    command = f"atlas coordinator plan.yaml --listen {address} --state state --recipe recipe.yaml"
    command += " --certs certs" if certs else ""
    return (
        f"Start the coordinator too, on the machine with the address {address}. If it ends, start it again:\n\n"
        f"```sh\n{command}\n```"
    )


def _certs(target: str, names: Sequence[str], hosts: Mapping[str, tuple[int, str]]) -> str:
    make = f"atlas wan certs {' '.join(names)} --out certs"
    if target not in ("jobset", "trainjob"):
        return f"Certificates are read from `certs/` beside this file: `{make}`, and copy to each site its own pair."
    secrets = "\n".join(
        f"kubectl --context {dc} create secret generic {job}-certs --from-file=certs/ca.pem "
        f"--from-file=certs/{dc}.pem --from-file=certs/{dc}.key"
        for dc, (_, job) in hosts.items()
    )
    return f"Certificates are secrets, one for each datacenter:\n\n```sh\n{make}\n{secrets}\n```"
