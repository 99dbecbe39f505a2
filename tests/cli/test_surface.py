"""The flags of every command, so that none is added, removed or renamed by accident; and how commands end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from atlas.cli import COMMANDS, CommandParser, command_parser

ROOT = Path(__file__).parents[2]
PICTURES = {"--page", "--png", "--svg", "--trace"}
SEARCH = {"--tries", "--seed", "--set", "--tcp"}
HOW = (
    {"--recipe", "--schedule", "--tcp", "--steps", "--warmup", "--decay", "--seed", "--model", "--data", "--set"}
    | {"--learning-rate", "--clip", "--save-every", "--no-bar", "--log", "--runs", "--timeline", "--metrics-port"}
    | {"--compile", "--no-compile", "--track"}
    | {
        "--evidence",
        "--ui",
        "--ui-at",
        "--metrics-host",
        "--certs",
        "--trusted",
        "--auto-replan",
        "--without",
        "--grace",
        "--patience",
        "--gather",
    }
    | {"--max-restarts"}
)
SURFACE = {
    "init": {"--model", "--dc", "--batch", "--seq", "--out", "--force", "--list-models"},
    "regions": {"region", "--json"},
    "launch": {"plan", "--recipe", "--target", "--out", "--rendezvous", "--coordinator"}
    | {"--image", "--ports", "--device", "--no-certs"},
    "simulate": {"job", "--schedule", "--iterations", "--monte-carlo", "--json", "--out", "--save"} | PICTURES | SEARCH,
    "schedules": {"--show", "--torch", "--json"} | SEARCH,
    "view": {"files"} | PICTURES,
    "compare": {"a", "b", "--json"} | PICTURES | SEARCH,
    "card": {"source", "--out", "--job", "--schedule", "--steps", "--contributor", "--contact"}
    | {"--set", "--tries", "--seed"},
    "import": {"folder", "--out", "--gpu", "--recompute", "--no-recompute", "--salvage"},
    "ui": {"run", "--at", "--token-file"},
    "report": {"runs", "--out", "--title", "--salvage"},
    "metrics": {"folders", "--against", "--salvage", "--definitions", "--json", "--page"},
    "train": {
        "plan",
        "--emulate",
        "--slower",
        "--weather-seed",
        "--page",
        "--device",
        "--checkpoints",
        "--profile",
        "--profile-out",
        "--record-wan",
    }
    | {"--filler", "--filler-folder", "--filler-mib"}
    | {"--dc", "--rendezvous", "--coordinator", "--listen", "--advertise", "--ports", "--reach", "--node", "--spare"}
    | {"--switch"}
    | HOW,
    "coordinator": {"plan", "--listen", "--state"} | HOW,
    "profile": {"job", "--gpu", "--out", "--device", "--repeats", "--compile", "--no-compile", "--set"},
    "fabric": {"job", "--set", "--json", "--circuits", "--rehearse", "--fault", "--schedule"},
    "plan": {"job", "--json", "--out", "--page", "--set"}
    | {"--strategy", "--objective", "--budget", "--fabrics", "--min-throughput", "--tokens", "--deadline", "--keep"}
    | {
        "--global-batch",
        "--tcp",
        "--tries",
        "--seed",
        "--pareto",
        "--no-break-even",
        "--confidence",
        "--from-sailor",
        "--trace",
        "--model",
        "--gpu",
    }
    | {"--no-break-even", "--cost", "--max-usd", "--gpu-price", "--judge", "--no-simulate", "--out-sailor"},
    "whatif": {"job", "--json", "--out", "--page", "--set"}
    | {"--sweep", "--replan", "--monte-carlo", "--wan-sigma", "--seed", "--no-marginals"},
    "wan": {"action"},
    "data": {"action"},  # its actions: tests/runtime/data/test_data_command.py
    "checkpoint": {"action"},  # its actions: tests/runtime/checkpoint/test_checkpoint_command.py
}


def test_the_commands_have_exactly_these_flags() -> None:
    assert set(COMMANDS) == set(SURFACE)
    for name, wanted in SURFACE.items():
        parser, _ = command_parser(name)
        found = {option for action in parser._actions for option in action.option_strings or [action.dest]}
        assert found - {"-h", "--help"} == wanted, name


def test_every_flag_has_a_help_text() -> None:
    for name in SURFACE:
        parser, _ = command_parser(name)
        assert all(action.help for action in parser._actions), name
        assert max(map(len, parser.format_help().splitlines())) <= 120


def test_the_help_of_a_flag_ends_with_its_default_and_says_that_it_may_be_repeated() -> None:
    parser = CommandParser(prog="atlas")
    for flag, value, text in (("--a", 4.0, "so many"), ("--b", 0, "so few"), ("--c", 0, "a port (default: any)")):
        parser.add_argument(flag, default=value, metavar="N", help=text)
    parser.add_argument("--d", action="store_true", help="no default to name")
    parser.add_argument("--e", action="append", default=[], metavar="N", help="a name")
    shown = [line.split("  ")[-1].strip() for line in parser.format_help().splitlines()[-5:]]
    assert shown[:3] == ["so many (default 4)", "so few (default 0)", "a port (default: any)"]
    assert shown[3:] == ["no default to name", "a name; may be repeated"]


def started(*words: str, **options: object) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "atlas.cli", *words]
    return subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, **options)  # type: ignore[call-overload,no-any-return]


AFTER_THE_FIRST_RUN = """
import os, sys
from atlas import cli, evaluate

def simulate(*words, first=evaluate.simulate, **options):
    timeline = first(*words, **options)
    os.write(1, b"ready\\n")  # one system call: print may make two, and the interrupt come between them
    return timeline

evaluate.simulate = simulate
sys.exit(cli.main(["simulate", "examples/paper-5-dcs.yaml"]))
"""


def test_an_interrupt_exits_with_130_and_prints_nothing() -> None:
    """Sent when the first of several schedules has been simulated: everything is imported and compiled by then."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", AFTER_THE_FIRST_RUN], cwd=ROOT, **pipes) as job:  # type: ignore[call-overload]
        assert job.stdout.readline() == b"ready\n"
        job.send_signal(signal.SIGINT)
        out, err = job.communicate(timeout=60)
    assert (job.returncode, out.replace(b"ready\n", b""), err) == (130, b"", b"")


def test_a_closed_pipe_is_not_an_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    job = started("schedules", "--show", "gpipe", "examples/three-dcs.yaml", stdout=writer)
    os.close(writer)
    _, err = job.communicate(timeout=120)
    assert (job.returncode, err) == (141, b"")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_reported_in_one_message() -> None:
    with Path("/dev/full").open("wb") as full:
        job = started("schedules", stdout=full)
        _, err = job.communicate(timeout=120)
    assert job.returncode == 2
    assert b"No space left" in err
    assert b"Traceback" not in err
