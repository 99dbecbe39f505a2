"""`atlas train --dc --ui`: the launcher that coordinates serves the page of the whole run; others say so."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from free_ports import free_port
from multi_dc_runs import write_job

from atlas.cli import main
from atlas.launch import multi_dc

FLAGS = ("--device", "cpu", "--model", "job", "--data", "shipped", "--schedule", "1f1b", "--no-bar", "--ui")


@pytest.mark.parametrize(("datacenter", "pages"), [("east", 1), ("west", 0)])
def test_only_the_launcher_that_coordinates_serves_the_page(
    datacenter: str, pages: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_job(tmp_path, "east", "west")
    monkeypatch.setattr(multi_dc, "train_here", lambda *_: 0)
    runs = ["--runs", str(tmp_path / "runs")]
    assert main(["train", str(tmp_path / "job.yaml"), "--dc", datacenter, "--steps", "2", *FLAGS, *runs]) == 0
    said = capsys.readouterr().err
    assert said.count("the page is at http://127.0.0.1:") == pages
    assert said.count("--ui: only the launcher or `atlas coordinator`") == 1 - pages


@contextmanager
def launcher(folder: Path, datacenter: str, port: int) -> Iterator[Path]:
    """Yields the file of what it says."""
    said = folder / f"{datacenter}.log"
    words = ["train", str(folder / "job.yaml"), "--dc", datacenter, "--steps", "200", *FLAGS]
    words += ["--rendezvous", f"127.0.0.1:{port}", "--runs", str(folder / datacenter)]
    with (
        said.open("w") as file,
        subprocess.Popen([sys.executable, "-m", "atlas", *words], stdout=file, stderr=file) as process,
    ):
        try:
            yield said
        finally:
            process.terminate()


def state_of(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(f"{url}api/state", timeout=60) as reply:
        return dict(json.load(reply))


@pytest.mark.slow
def test_the_page_of_a_run_over_two_datacenters_shows_both(tmp_path: Path) -> None:
    write_job(tmp_path, "east", "west")
    port, deadline, state = free_port(), time.monotonic() + 300, dict[str, Any]()
    with launcher(tmp_path, "east", port) as said, launcher(tmp_path, "west", port):
        while not state.get("last") and time.monotonic() < deadline:
            found = re.search(r"http://[\d.:]+/", said.read_text())
            with suppress(OSError):
                state = state_of(found[0]) if found else {}
            time.sleep(0.2)
        assert state["last"]["step"] >= 1, said.read_text()
        assert (state["links"][0]["a"], state["links"][0]["b"]) == ("east", "west")
        assert state["run"]["source"] in ("measured", "emulated")
        assert state["predicted"]["num_workers"] == 2
