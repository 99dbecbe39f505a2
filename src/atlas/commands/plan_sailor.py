"""The part of `atlas plan` that reads Sailor's files. The work is done in `atlas.sailor`."""

from atlas.sailor.run import add_arguments, run_sailor

__all__ = ["add_arguments", "run_sailor"]
