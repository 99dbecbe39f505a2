"""`python -m atlas`, and so `torchrun -m atlas`: the command line."""

import sys

from atlas.cli import main

if __name__ == "__main__":
    sys.exit(main())
