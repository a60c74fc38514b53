"""Settings every test shares."""

from __future__ import annotations

import os

# Before torch is imported: a bare run equals itself bitwise only with one thread, and test workers share two cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
