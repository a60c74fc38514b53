"""Settings every test shares."""

from __future__ import annotations

import os

# Before torch is imported: a bare run equals itself bitwise only with one thread, and test workers share two cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest


@pytest.fixture
def strict(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault inside flowscope raises instead of switching it off; the same weights whatever ran before."""
    import torch  # here: not every test needs it

    monkeypatch.setenv("FLOWSCOPE_STRICT", "1")
    torch.manual_seed(0)
