"""`python -m flowscope` is the command `flowscope`."""

from __future__ import annotations

import sys

from flowscope.cli import main

if __name__ == "__main__":
    sys.exit(main())
