"""The `bubbletea` command. Error format and exit codes are those of `atlas`."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

from atlas.cli import CommandLine

COMMANDS = {
    "simulate": "replay requests against the bubbles of a training job",
    "serve": "an OpenAI-compatible service in the bubbles of a training job",
    "bench": "load a service and measure its responses",
}
MODULES = {"simulate": "bubbletea.sim.command", "serve": "bubbletea.serve.command", "bench": "bubbletea.bench"}


def _load(name: str) -> Any:
    return import_module(MODULES[name])


BUBBLETEA = CommandLine("bubbletea", "Prefill of language models in the bubbles of training.", COMMANDS, _load)
main, top_parser, command_parser = BUBBLETEA.main, BUBBLETEA.top_parser, BUBBLETEA.command_parser

if __name__ == "__main__":
    sys.exit(main())
