"""`python -m atlas.sailor`: see `run`."""

import sys

from atlas.sailor.run import main

if __name__ == "__main__":
    sys.exit(main())
