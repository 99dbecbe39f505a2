"""An environment that is a container of Docker or Podman: forked by `commit` and `run`, executed by `exec`.

A fork copies the file system, not running processes: tools have to be commands that end. The image's digest belongs
into the task (`image_digest`). It uses the command line, so it needs no package; the user needs permission to run it.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import uuid
from collections.abc import Sequence
from typing import Any

from tvcache.environments import require_tool
from tvcache.errors import TvcacheError

TIMEOUT_S = 120.0
"""Of one command of the container runtime, beside the time limit of what runs inside."""
LABEL = "tvcache"
"""Label of every container and image made here, to find and remove leftovers of a killed process."""


class ContainerEnvironment:
    """One tool: `shell`, with a command. Owns its container, and the image it was forked from where there is one."""

    def __init__(
        self, image: str, *, runtime: str = "docker", options: Sequence[str] = ("--network=none",), owned: bool = False
    ) -> None:
        """`options` are passed to `run`; without a network a command cannot depend on the outside."""
        self.image, self.runtime, self.options, self._owned = image, runtime, tuple(options), owned
        self.name = f"tvcache-{uuid.uuid4().hex}"
        self._open = True
        try:
            self._do(
                "run", "--detach", "--label", LABEL, "--name", self.name, *self.options, image, "sleep", "infinity"
            )
        except BaseException:
            self.close()
            raise

    def fork(self) -> ContainerEnvironment:
        copy = f"tvcache/{uuid.uuid4().hex}"
        self._do("commit", "--change", f"LABEL {LABEL}=fork", self.name, copy)
        try:
            return ContainerEnvironment(copy, runtime=self.runtime, options=self.options, owned=True)
        except BaseException:
            self._do("rmi", "--force", copy, check=False)
            raise

    def execute(self, name: str, arguments: Any) -> Any:
        require_tool(name, ["shell"])
        limit_s = float(arguments.get("timeout_s", 600.0))
        # The time limit applies inside: a command abandoned from outside would continue to change the state.
        inner = ["timeout", "--signal=KILL", f"{limit_s:g}", "sh", "-c", arguments["command"]]
        done = self._do("exec", self.name, *inner, check=False, timeout_s=limit_s + TIMEOUT_S)
        if done.returncode == 137:
            raise TimeoutError(f"{arguments['command']!r} took more than {limit_s:g} s, or ran out of memory")
        return {"output": done.stdout, "code": done.returncode}

    def close(self) -> None:
        if self._open:
            self._open = False
            self._do("rm", "--force", "--volumes", self.name, check=False)
            if self._owned:
                self._do("rmi", "--force", self.image, check=False)

    def size_bytes(self) -> int:
        """Bytes written by the container; the image's layers are shared."""
        found = json.loads(self._do("inspect", "--size", self.name).stdout)
        return int(found[0].get("SizeRw") or 0)

    def _do(self, *words: str, check: bool = True, timeout_s: float = TIMEOUT_S) -> subprocess.CompletedProcess[str]:
        try:
            done = subprocess.run(
                [self.runtime, *words],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE if words[0] != "exec" else subprocess.STDOUT,
                text=True,
                errors="replace",
                timeout=timeout_s,
                check=False,
            )
        except FileNotFoundError:
            raise TvcacheError(
                f"no command {self.runtime!r}: install Docker or Podman, or name another runtime"
            ) from None
        if check and done.returncode != 0:
            raise OSError(f"{shlex.join([self.runtime, *words])}: {(done.stderr or '').strip()[:500]}")
        return done


def image_digest(image: str, runtime: str = "docker") -> str:
    """The value for `Task.image`: a tag may move, a digest does not."""
    done = subprocess.run(
        [runtime, "image", "inspect", "--format", "{{.Id}}", image], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise TvcacheError(f"image {image!r}: {done.stderr.strip() or 'not found'}. Pull it first")
    return done.stdout.strip()
