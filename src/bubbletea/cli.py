"""The `bubbletea` command. Knows the names of its commands; each is a module with `configure(parser)` and `run(args)`,
imported only when it runs. Error format and exit codes are those of `atlas`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module
from typing import Any

from atlas import __version__
from atlas.cli import CommandParser, guarded
from atlas.errors import AtlasError

COMMANDS = {
    "simulate": ("bubbletea.sim.command", "replay requests against the bubbles of a training job"),
    "serve": ("bubbletea.serve.command", "an OpenAI-compatible service in the bubbles of a training job"),
    "bench": ("bubbletea.bench", "load a service and measure its responses"),
}


def top_parser() -> CommandParser:
    """The parser of `bubbletea --help`."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}  {summary}" for name, (_, summary) in COMMANDS.items()]
    parser = CommandParser(
        prog="bubbletea",
        usage="bubbletea COMMAND [...]",
        description="Prefill of language models in the bubbles of training.",
        epilog="commands:\n" + "\n".join(lines) + "\n\n`bubbletea COMMAND --help` explains a command.",
    )
    parser.add_argument("--version", action="version", version=f"bubbletea {__version__}")
    parser.add_argument("command", metavar="COMMAND", help=argparse.SUPPRESS)
    return parser


def command_parser(name: str) -> tuple[CommandParser, Any]:
    """A command's parser and its module."""
    module: Any = import_module(COMMANDS[name][0])
    parser = CommandParser(prog=f"bubbletea {name}", description=module.__doc__)
    module.configure(parser)
    return parser, module


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the process's exit code."""
    return guarded(_run, "bubbletea", argv)


def _run(words: list[str]) -> int:
    if not words:
        top_parser().print_help()
        return 0
    if words[0].startswith("-"):
        top_parser().parse_args(words)
    if words[0] not in COMMANDS:
        near = get_close_matches(words[0], COMMANDS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(COMMANDS)}"
        raise AtlasError(f"no command {words[0]!r}: {hint}")
    parser, module = command_parser(words[0])
    return int(module.run(parser.parse_args(words[1:])))


if __name__ == "__main__":
    sys.exit(main())
