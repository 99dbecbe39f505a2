"""`python -m atlas.plan.sailor`: see `run`."""

import sys

from atlas.plan.sailor.run import main

if __name__ == "__main__":
    sys.exit(main())
