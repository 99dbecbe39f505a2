"""`bubbletea serve` refuses what it cannot do before it starts anything."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bubbletea.cli import main
from bubbletea.prefill.service_files import ServicePlace, announced
from bubbletea.serve.folder import private_folder

KEEPER = """
import sys
from pathlib import Path
from bubbletea.prefill.service_files import ServicePlace, announced
from bubbletea.serve.folder import private_folder

with private_folder() as folder, announced(Path(sys.argv[1]), "east", ServicePlace("127.0.0.1:1", "secret")):
    (folder / "token").write_text("secret")
    print(folder, flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ([], "give either the PLAN of a run"),
        (["--alone", "0"], "give at least one worker"),
        (["--alone", "1", "--host", "0.0.0.0"], "Give --keys FILE, or --without-keys"),
        (["--alone", "1", "--host", "::"], "Give --keys FILE, or --without-keys"),
        (["examples/tiny.yaml", "--certs", "nowhere"], "Give --dc NAME too"),
        (["examples/tiny.yaml", "--dc", "north"], "it has them in east, west"),
        (["--alone", "1", "--handoff-anywhere"], "need certificates. Give --certs and --dc too"),
        (["--alone", "1", "--token-file", "nowhere"], "--token-file nowhere: cannot be read"),
        (["--alone", "1", "--arena-mib", "1"], "GiB on each worker"),
        (["--alone", "1", "--device", "paced"], "only training workers can be paced"),
        (["--alone", "1", "--device", "tpu"], "must be paced, cpu, cuda or cuda:N"),
        (["--alone", "1", "--device", "cuda:99"], "device 'cuda:99': there are"),
    ],
)
def test_flags_that_cannot_be_served(flags: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", *flags]) == 2
    assert says in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("flag", ["--port", "--workers-port", "--handoff-port"])
@pytest.mark.parametrize("port", ["65536", "-1", "http"])
def test_a_port_outside_the_range_is_refused(flag: str, port: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["serve", "--alone", "1", flag, port])
    assert ended.value.code == 2
    assert f"{flag}: '{port}' is not a whole number from 0 to 65535" in capsys.readouterr().err


def test_the_late_share_is_at_most_one(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["serve", "--alone", "1", "--late", "1.5"])
    assert ended.value.code == 2
    assert "'1.5' must be between 0 and 1" in capsys.readouterr().err


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, None], ids=str)
def test_files_with_a_token_are_removed_when_the_service_ends(how: signal.Signals | None, tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", KEEPER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        folder = Path(process.stdout.readline().strip())
        assert (folder / "token").is_file()
        assert (tmp_path / "east.json").is_file()
        if how is None:
            process.stdin.close()
        else:
            process.send_signal(how)
        process.wait(120)
    deadline = time.monotonic() + 120
    while folder.exists() or (tmp_path / "east.json").exists():
        assert time.monotonic() < deadline, "a token is still there"
        time.sleep(0.01)


def test_a_service_does_not_remove_the_file_of_the_next_one(tmp_path: Path) -> None:
    with announced(tmp_path, None, ServicePlace("127.0.0.1:1", "old")) as file:
        file.write_text("another's")
    assert file.read_text() == "another's"


def test_the_folder_is_private_to_the_user() -> None:
    with private_folder() as folder:
        assert folder.stat().st_mode & 0o777 == 0o700
    assert not folder.exists()


def test_serve_says_when_it_is_ready_and_when_no_lane_is_left() -> None:
    command = [sys.executable, "-m", "bubbletea.cli", "serve", "--alone", "1", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as service:
        assert service.stdout is not None
        said = iter(service.stdout.readline, "")
        try:
            assert "1 copy of the model in localhost, on 1 worker" in next(said)
            assert next(said) == "ready: 1 of 1 copies of the model\n"
            [worker] = Path(f"/proc/{service.pid}/task/{service.pid}/children").read_text(encoding="ascii").split()[-1:]
            os.kill(int(worker), signal.SIGKILL)
            assert next(said) == "no copy of the model is left: requests are refused until workers return\n"
            assert next(said) == "ready: 1 of 1 copies of the model\n"
        finally:
            service.terminate()
            service.wait(60)
