"""An environment that is a directory: forked by `cp`, which shares blocks where the file system can (reflinks).

Directories have names of their own under `parent`; a task's name never becomes a path. Shell commands run in the
directory with a time limit. Where an output names the directory, `/workspace` stands for it: a copy lies elsewhere, and
outputs have to be the same.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tvcache.environments import require_tool
from tvcache.errors import TvcacheError

ALIAS = "/workspace"
Function = Callable[..., Any]
"""`tools[name](directory, **arguments)`."""


class DirectoryEnvironment:
    """Owns `path`: closing it removes the directory."""

    def __init__(self, path: Path, tools: Mapping[str, Function] | None = None) -> None:
        self.path, self.tools = path, tools if tools is not None else SHELL

    @classmethod
    def copy_of(
        cls, source: Path, parent: Path | None = None, tools: Mapping[str, Function] | None = None
    ) -> DirectoryEnvironment:
        """A rollout's first environment: a copy of a directory, which is not changed."""
        return cls(_copied(source, parent or Path(tempfile.gettempdir())), tools)

    def fork(self) -> DirectoryEnvironment:
        return DirectoryEnvironment(_copied(self.path, self.path.parent), self.tools)

    def execute(self, name: str, arguments: Any) -> Any:
        require_tool(name, self.tools)
        return _renamed(self.tools[name](self.path, **arguments), str(self.path))

    def close(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)

    def size_bytes(self) -> int:
        return sum(4096 + found.lstat().st_blocks * 512 for found in self.path.rglob("*"))

    def fingerprint(self) -> str:
        """Hash of names, modes, links and contents, without times."""
        digest = hashlib.sha256()
        for found in sorted(self.path.rglob("*")):
            status = found.lstat()
            digest.update(f"{found.relative_to(self.path)}\0{status.st_mode}\0".encode(errors="surrogateescape"))
            if found.is_symlink():
                digest.update(os.fsencode(found.readlink()))
            elif found.is_file():
                digest.update(str(status.st_size).encode() + b"\0" + hashlib.sha256(found.read_bytes()).digest())
        return digest.hexdigest()


def shell(directory: Path, command: str, timeout_s: float = 600.0) -> dict[str, Any]:
    """Run a command with `bash`; what it printed, both streams in order, and its exit code. It sees no variables of
    this process: outputs must not depend on them, and secrets are not an agent's."""
    process = subprocess.Popen(
        ["bash", "-c", command],
        cwd=directory,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        env={"PATH": os.environ.get("PATH", os.defpath), "HOME": str(directory), "LANG": "C.UTF-8"},
    )
    try:
        printed, _ = process.communicate(timeout=timeout_s)
    except BaseException as error:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        if isinstance(error, subprocess.TimeoutExpired):
            raise TimeoutError(f"{command!r} took more than {timeout_s:g} s") from None
        raise
    return {"output": printed.decode(errors="replace"), "code": process.returncode}


def write_file(directory: Path, name: str, text: str) -> int:
    """Write a file below the directory; how many bytes."""
    path = inside(directory, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.write_bytes(text.encode())


def read_file(directory: Path, name: str) -> str:
    return inside(directory, name).read_bytes().decode(errors="replace")


SHELL: dict[str, Function] = {"shell": shell, "write_file": write_file, "read_file": read_file}
"""The default tools of a directory. Only `read_file` may be declared `reads`."""


def inside(directory: Path, name: str) -> Path:
    """The path of a file below the directory; raises if it is outside."""
    found = (directory / name).resolve()
    if not found.is_relative_to(directory.resolve()):
        raise TvcacheError(f"{name!r} is outside the environment: give a path below it")
    return found


def _copied(source: Path, parent: Path) -> Path:
    """Copy completely or not at all. File times are kept: `make` needs them."""
    target = Path(tempfile.mkdtemp(prefix="tvcache-", dir=parent))
    done = subprocess.run(
        ["cp", "-a", "--reflink=auto", f"{source}/.", str(target)], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        shutil.rmtree(target, ignore_errors=True)
        raise OSError(f"copying {source} failed: {done.stderr.strip()[:500]}")
    return target


def _renamed(output: Any, path: str) -> Any:
    """The output with the directory's own name replaced."""
    if isinstance(output, str):
        return output.replace(path, ALIAS)
    if isinstance(output, list):
        return [_renamed(item, path) for item in output]
    if isinstance(output, dict):
        return {name: _renamed(item, path) for name, item in output.items()}
    return output
