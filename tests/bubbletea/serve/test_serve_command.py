"""`bubbletea serve` refuses what it cannot do before it starts anything."""

from __future__ import annotations

import pytest

from bubbletea.cli import main


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ([], "give a plan whose training has bubbles"),
        (["--alone", "0"], "give at least one worker"),
        (["--alone", "1", "--device", "paced"], "workers without training keep no pace"),
        (["--alone", "1", "--device", "tpu"], "must be paced, cpu or cuda:N"),
        (["--alone", "1", "--device", "cuda:99"], "device 'cuda:99': there are"),
    ],
)
def test_flags_that_cannot_be_served(flags: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", *flags]) == 2
    assert says in " ".join(capsys.readouterr().err.split())


def test_more_than_all_cannot_be_late(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["serve", "--alone", "1", "--late", "1.5"])
    assert ended.value.code == 2
    assert "'1.5' is no share" in capsys.readouterr().err
