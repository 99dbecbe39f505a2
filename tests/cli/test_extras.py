"""A package that was installed without an extra says which one a command needs; nothing else needs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from atlas.errors import EXTRAS, PACKAGES

ROOT = Path(__file__).parents[2]
TINY = str(ROOT / "examples" / "tiny.yaml")
SCRIPT = """
import contextlib, io, json, os, sys

class Absent:
    def __init__(self, blocked):
        self.blocked = blocked

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.blocked:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

def run(blocked, commands):
    sys.meta_path.insert(0, Absent(blocked))
    from atlas.cli import main as atlas
    from bubbletea.cli import main as bubbletea
    for words in commands:
        said = io.StringIO()
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
            try:
                code = {"atlas": atlas, "bubbletea": bubbletea}[words[0]](words[1:])
            except SystemExit as exit:
                code = exit.code
            except BaseException as error:
                code = repr(error)
        yield code, said.getvalue()

for folder, blocked, commands in sorted(json.loads(sys.argv[1]), key=lambda case: "torch" not in case[1]):
    if "torch" not in blocked:
        import torch  # seconds: once, before the forks that may have it
    if os.fork() == 0:
        os.chdir(folder)
        with open("found.json", "w") as file:
            json.dump(list(run(blocked, commands)), file)
        os._exit(0)
    os.wait()
"""
NEEDS = {
    "torch": [
        ["atlas", "train", TINY, "--emulate", "--steps", "1"],
        ["atlas", "train", TINY, "--dc", "east", "--device", "cpu"],
        ["atlas", "profile", TINY, "--gpu", "H200", "--device", "cpu", "--out", "profile.yaml"],
        ["atlas", "checkpoint", "verify", "."],
        ["bubbletea", "serve", TINY],
        ["bubbletea", "serve", "--alone", "1"],
    ],
    "safetensors": [
        ["atlas", "train", TINY, "--emulate", "--steps", "1"],
        ["atlas", "train", TINY, "--dc", "east", "--device", "cpu"],
        ["atlas", "checkpoint", "verify", "."],
    ],
    "tokenizers": [["atlas", "data", "tokenize", "text", "--out", "shards", "--tokenizer", "tokenizer.json"]],
    "resvg_py": [["atlas", "simulate", TINY, "--schedule", "1f1b", "--png", "figure.png"]],
    "cryptography": [["atlas", "wan", "certs", "east", "west"]],
    "obstore": [
        ["atlas", "train", TINY, "--emulate", "--checkpoints", "s3://bucket/run"],
        ["atlas", "train", TINY, "--dc", "east", "--device", "cpu", "--checkpoints", "s3://bucket/run"],
        ["atlas", "checkpoint", "list", "s3://bucket/run"],
    ],
    "starlette": [["bubbletea", "serve", "--alone", "1"]],
    "uvicorn": [["bubbletea", "serve", "--alone", "1"]],
    "prometheus_client": [["bubbletea", "serve", "--alone", "1"]],
    "jinja2": [["bubbletea", "serve", "--alone", "1", "--port", "0"]],
}
"""By module that is absent: commands that need it."""
ALL = "all"
NEED_NONE = [
    ["atlas", "simulate", TINY, "--schedule", "1f1b"],
    ["atlas", "plan", TINY, "--tries", "0"],
    ["atlas", "whatif", TINY, "--set", "num_microbatches=4"],
    ["atlas", "schedules", "--show", "gpipe", TINY],
    ["atlas", "data", "tokenize", "text", "--out", "shards"],
    ["atlas", "data", "check", "shards"],
    ["atlas", "checkpoint", "list", "."],
    *([name, *words] for name, words in (("atlas", ["train", "--help"]), ("bubbletea", ["serve", "--help"]))),
    ["bubbletea", "simulate", "--help"],
    ["bubbletea", "bench", "--help"],
]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[tuple[int | str, str]]]:
    """By absent module, and for all of them: each command's exit code (or what it raised) and its messages."""
    cases = {name: ([name], commands) for name, commands in NEEDS.items()} | {ALL: (list(EXTRAS), NEED_NONE)}
    folders = {name: tmp_path_factory.mktemp(name) for name in cases}
    for folder in folders.values():
        (folder / "text").write_text("a text of a few words\n" * 50)
        (folder / "tokenizer.json").write_text("{}")
        (folder / "step-00000001-a0").mkdir()
        (folder / "step-00000001-a0" / "begun").touch()
    words = [sys.executable, "-c", SCRIPT, json.dumps([(str(folders[name]), *case) for name, case in cases.items()])]
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    subprocess.run(words, env=env, capture_output=True, text=True, timeout=240, check=True)
    return {name: json.loads((folder / "found.json").read_text()) for name, folder in folders.items()}


def test_every_extra_of_the_package_is_known() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    declared = {
        requirement.partition(">")[0].partition("=")[0]: extra
        for extra, requirements in project.items()
        if extra not in ("dev", "docs", "tvcache")  # tvcache names its own
        for requirement in requirements
    }
    assert {PACKAGES.get(module, module): extra for module, extra in EXTRAS.items()} == declared


@pytest.mark.parametrize("module", NEEDS)
def test_a_command_names_the_extra_that_it_needs(module: str, found: dict[str, list[tuple[int | str, str]]]) -> None:
    for words, (code, said) in zip(NEEDS[module], found[module], strict=True):
        assert code == 2, (words, code, said)
        assert f"pip install 'atlas-bubbletea[{EXTRAS[module]}]'" in said, (words, said)
        assert repr(PACKAGES.get(module, module)) in said, (words, said)
        assert "Traceback" not in said


def test_without_any_extra_the_other_commands_work(found: dict[str, list[tuple[int | str, str]]]) -> None:
    for words, (code, said) in zip(NEED_NONE, found[ALL], strict=True):
        assert code == 0, (words, code, said)
