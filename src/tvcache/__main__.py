"""`python -m tvcache`."""

from __future__ import annotations

import sys

from tvcache.cli import main

sys.exit(main())
