"""The `bubbletea` command. Error format and exit codes are those of `atlas`."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

from atlas.cli import CommandLine

COMMANDS = {
    "simulate": "simulate prefill in the bubbles of a training job",
    "serve": "run an OpenAI-compatible service in the bubbles of a training run",
    "bench": "send load to a service and measure its responses",
}
MODULES = {"simulate": "bubbletea.sim.command", "serve": "bubbletea.serve.command", "bench": "bubbletea.bench"}


def _load(name: str) -> Any:
    return import_module(MODULES[name])


BUBBLETEA = CommandLine("bubbletea", "Run LLM prefill in the bubbles (idle GPU time) of training.", COMMANDS, _load)
main, top_parser, command_parser = BUBBLETEA.main, BUBBLETEA.top_parser, BUBBLETEA.command_parser

if __name__ == "__main__":
    sys.exit(main())
