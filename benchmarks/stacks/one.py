"""`python -m stacks.one NAME`: one stack's training in this process; prints its row as JSON.

Run with the folder above on the path, since some packages bring a `benchmarks` of their own.
"""

from __future__ import annotations

import json
import logging
import sys

from .case import COLUMNS, Seen, counted, judge
from .programs import STACKS


def main() -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    seen = Seen()
    with counted(seen):
        scope = STACKS[sys.argv[1]].train(seen)
    row = scope if isinstance(scope, dict) else judge(scope, seen)  # a worker elsewhere has judged already
    print("\nSTACK " + json.dumps({name: row[name] for name in COLUMNS}), flush=True)


if __name__ == "__main__":
    main()
