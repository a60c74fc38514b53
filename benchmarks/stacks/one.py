"""`python -m stacks.one NAME`: one stack's training in this process; prints its row as JSON.

Run with the folder above on the path, since some packages bring a `benchmarks` of their own.
"""

from __future__ import annotations

import json
import logging
import sys

from .case import Seen, counted, judge
from .programs import STACKS


def main() -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    seen = Seen()
    with counted(seen):
        scope = STACKS[sys.argv[1]].train(seen)
    print("\nSTACK " + json.dumps(judge(scope, seen)), flush=True)


if __name__ == "__main__":
    main()
