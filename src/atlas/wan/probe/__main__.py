"""`python -m atlas.wan.probe`: a door to `atlas wan probe`, which is a command like any other."""

from __future__ import annotations

import argparse
import sys
from importlib import import_module

from atlas.errors import AtlasError


def main() -> int:
    command = import_module("atlas.commands.wan_probe")  # by name: this room does not depend on the commands
    about = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("atlas wan probe", description=command.__doc__, formatter_class=about)
    command.add_arguments(parser)
    try:
        return int(command.run(parser.parse_args()))
    except AtlasError as error:
        print(f"atlas: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
