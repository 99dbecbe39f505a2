from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from cli_runner import Atlas, Said

from atlas.cli import main

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def atlas(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Atlas:
    """Run a command in an empty folder that holds a copy of examples/tiny.yaml."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    shutil.copy(EXAMPLES / "tiny.yaml", tmp_path)

    def run(*words: str) -> Said:
        try:
            code = main(list(words))
        except SystemExit as exit_:  # argparse
            code = int(exit_.code or 0)
        captured = capsys.readouterr()
        return Said(code, captured.out, captured.err)

    return run
