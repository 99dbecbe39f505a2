"""The `tvcache` command. It lists the commands; each is a module with `configure(parser)` and `run(args)`,
imported only when it runs.

Exit codes: 0 done; 1 a bug of ours, with its traceback; 2 something the user can fix, in one message; 130 interrupted.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NoReturn

from tvcache.errors import TvcacheError

COMMANDS = {
    "serve": "run a cache server that rollouts of many processes and sites share",
    "show": "write a page with the tree of calls, hits and seconds saved",
    "replay": "show what a cache would have saved on recorded trajectories",
}


class TvcacheParser(argparse.ArgumentParser):
    """Reports an error in one message, with the nearest valid name."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **options)

    def error(self, message: str) -> NoReturn:
        given = message.removeprefix("unrecognized arguments: ").split("=")[0].split(" ")[0]
        known = [option for option in self._option_string_actions if option.startswith("--")]
        near = get_close_matches(given, known, n=1) if given.startswith("--") else []
        hint = f". Did you mean {near[0]}?" if near else f". See {self.prog} --help"
        self.exit(2, f"{self.prog}: {message}{hint}\n")


def top_parser() -> TvcacheParser:
    """The parser of `tvcache --help`."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}  {summary}" for name, summary in COMMANDS.items()]
    parser = TvcacheParser(
        prog="tvcache",
        usage="tvcache COMMAND [...]",
        description="A cache of tool calls for agents in post-training.",
        epilog="commands:\n" + "\n".join(lines) + "\n\n`tvcache COMMAND --help` explains a command.",
    )
    parser.add_argument("--version", action="version", version=f"tvcache {_version()}")
    parser.add_argument("command", metavar="COMMAND", help=argparse.SUPPRESS)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the process's exit code."""
    try:
        code = _run(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
        return code
    except TvcacheError as error:
        return _tell(error)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:
        return _tell(
            f"{error.filename or 'output'}: {error.strerror or error}. Free some space or choose another place"
        )


def _run(words: list[str]) -> int:
    if not words:
        top_parser().print_help()
        return 0
    if words[0].startswith("-"):
        top_parser().parse_args(words)
    if words[0] not in COMMANDS:
        near = get_close_matches(words[0], COMMANDS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(COMMANDS)}"
        raise TvcacheError(f"no command {words[0]!r}: {hint}")
    module: Any = import_module(f"tvcache.commands.{words[0]}")
    parser = TvcacheParser(prog=f"tvcache {words[0]}", description=module.__doc__)
    module.configure(parser)
    return int(module.run(parser.parse_args(words[1:])))


def _version() -> str:
    try:
        return version("atlas-bubbletea")
    except PackageNotFoundError:
        return "unknown"


def _tell(error: object) -> int:
    print(f"tvcache: {error}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
