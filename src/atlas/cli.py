"""The `atlas` command: picks the command to run and prints errors. A command's code is in `atlas.commands` and is
loaded only when it runs, so that `atlas --help` is instant.

Exit codes: 0 done; 1 a bug in Atlas, with its traceback; 2 a mistake in the input, in one message; 75 start it again
(a scheduler stopped it, or another datacenter was out of reach); 130 interrupted.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module
from keyword import iskeyword
from typing import Any, NoReturn

from atlas import __version__
from atlas.errors import START_AGAIN, AtlasError, MissingExtraError, StopSignal

COMMANDS = {
    "init": "write a job file from a model and cloud regions",
    "regions": "show GPU prices of cloud regions, and latency, throughput and egress prices between them",
    "plan": "find the best datacenters, parallelism and schedule for a job",
    "simulate": "simulate a job under one or more schedules",
    "whatif": "change a job or a plan and simulate again: sweeps, bottleneck, random networks",
    "schedules": "list the schedules, or print the Program of one",
    "compare": "compare two timelines op by op",
    "view": "draw timeline files as a page, a trace or a figure",
    "train": "train a plan across datacenters, or emulated on this machine",
    "coordinator": "coordinate the launchers of `atlas train` from a separate host",
    "launch": "write the files that start a plan under Slurm, Kubernetes, SkyPilot, torchrun or a shell",
    "ui": "open the live page of a run: map, timelines, figures, events, what-if",
    "report": "write a report of a run, or of several side by side",
    "profile": "measure a job's model on this machine's accelerator",
    "fabric": "compare the networks a datacenter could be built with: ports, watts, dollars",
    "wan": "emulate, measure and secure the network between datacenters",
    "data": "tokenize text into shards, and check shards",
    "checkpoint": "list, verify, export and import checkpoints",
    "card": "write a run for others to check: workload card, traces, launch files",
    "metrics": "compute metrics of runs from their traces: those of CCL-Bench, and our own",
    "import": "make a job file and a profile from a card and its traces",
}
INTERRUPTED, PIPE_CLOSED = 130, 141
"""Exit codes of a process that SIGINT or SIGPIPE ends, as shells count: 128 and the signal's number."""
PLUGINS = "atlas.commands"
"""Entry-point group in which other packages offer commands: modules with `configure(parser)` and `run(args)`."""


class CommandHelp(argparse.RawDescriptionHelpFormatter):
    """Adds to the help of a flag that it may be repeated, and its default, unless the help says so in other words."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        text, value = action.help, action.default
        if text and isinstance(action, argparse._AppendAction) and "repeated" not in text:
            text += "; may be repeated"
        if not text or "default" in text or value is None or value is False or value in ("", [], argparse.SUPPRESS):
            return text
        return f"{text} (default {f'{value:g}' if isinstance(value, float) else value})"


class CommandParser(argparse.ArgumentParser):
    """Reports an error in one line and suggests the nearest option that exists."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=CommandHelp, **options)

    def error(self, message: str) -> NoReturn:
        given = message.removeprefix("unrecognized arguments: ").split("=")[0].split(" ")[0]
        known = [option for option in self._option_string_actions if option.startswith("--")]
        near = get_close_matches(given, known, n=1) if given.startswith("--") else []
        hint = f". Did you mean {near[0]}?" if near else f". See {self.prog} --help"
        self.exit(2, f"{self.prog}: {message}{hint}\n")

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        found, rest = self.parse_known_args(args, namespace)
        if rest:
            self.error(f"unrecognized arguments: {' '.join(rest)}")
        return found


@dataclass(frozen=True)
class CommandLine:
    """A program with commands; each is a module with `configure(parser)` and `run(args)`, loaded when it runs."""

    prog: str
    description: str
    commands: Mapping[str, str]
    """What each command does, in a line."""
    load: Callable[[str], Any]
    """A command's module."""
    plugins: Callable[[], Mapping[str, str]] = dict
    """The commands of other packages."""

    def main(self, argv: Sequence[str] | None = None) -> int:
        """Run one command; the process's exit code."""
        return guarded(self._run, self.prog, argv)

    def top_parser(self) -> CommandParser:
        """What `--help` shows."""
        commands = {**self.commands, **self.plugins()}
        width = max(map(len, commands))
        lines = [f"  {name:{width}}  {summary}" for name, summary in commands.items()]
        parser = CommandParser(
            prog=self.prog,
            usage=f"{self.prog} COMMAND [...]",
            description=self.description,
            epilog="commands:\n" + "\n".join(lines) + f"\n\n`{self.prog} COMMAND --help` explains a command.",
        )
        parser.add_argument("--version", action="version", version=f"{self.prog} {__version__}")
        parser.add_argument("command", metavar="COMMAND", help=argparse.SUPPRESS)
        return parser

    def command_parser(self, name: str) -> tuple[CommandParser, Any]:
        """A command's parser and its module."""
        module = self.load(name)
        parser = CommandParser(prog=f"{self.prog} {name}", description=module.__doc__)
        module.configure(parser)
        return parser, module

    def _run(self, words: list[str]) -> int:
        if not words:
            self.top_parser().print_help()
            return 0
        if words[0].startswith("-"):
            self.top_parser().parse_args(words)
        if words[0] not in self.commands and words[0] not in self.plugins():
            commands = {**self.commands, **self.plugins()}
            near = get_close_matches(words[0], commands, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(commands)}"
            raise AtlasError(f"no command {words[0]!r}: {hint}")
        parser, module = self.command_parser(words[0])
        return int(module.run(parser.parse_args(words[1:])))


def guarded(run: Callable[[list[str]], int], name: str, argv: Sequence[str] | None = None) -> int:
    """Call `run` with the arguments and print its errors; the process's exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # or the command fails on a terminal that cannot show µ
    try:
        code = run(words)
        sys.stdout.flush()
        return code
    except AtlasError as error:
        _print_error(name, error)
        return error.exit_code
    except ModuleNotFoundError as error:
        missing = MissingExtraError.of(error, f"{name} {words[0]}" if words else name)
        if missing is None:
            raise
        return _print_error(name, missing)
    except StopSignal:
        return START_AGAIN
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader closed the pipe (`atlas ... | head`). Redirect stdout, or the interpreter prints an error at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED
    except OSError as error:
        return _print_error(
            name, f"{error.filename or 'output'}: {error.strerror or error}. Free some space or choose another place"
        )


def _origins() -> dict[str, str]:
    return {name: f"from {entry.value.partition('.')[0]}" for name, entry in sorted(_plugins().items())}


def _load(name: str) -> Any:
    # A module cannot be named like a keyword: the command `import` is in `import_`.
    file = f"{name}_" if iskeyword(name) else name
    return import_module(f"atlas.commands.{file}") if name in COMMANDS else _plugins()[name].load()


def _plugins() -> dict[str, Any]:
    from importlib.metadata import entry_points  # 40 ms, which most commands do not need

    return {entry.name: entry for entry in entry_points(group=PLUGINS)}


def _print_error(name: str, error: object) -> int:
    print(f"{name}: {error}", file=sys.stderr)
    return 2


ATLAS = CommandLine(
    "atlas", "Plan, simulate and run language-model training across datacenters.", COMMANDS, _load, _origins
)
main, top_parser, command_parser = ATLAS.main, ATLAS.top_parser, ATLAS.command_parser

if __name__ == "__main__":
    sys.exit(main())
