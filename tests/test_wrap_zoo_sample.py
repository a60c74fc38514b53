"""A sample of the zoo (`benchmarks/zoo.py`): pre-norm, post-norm, parallel, mixtures, state-space, cross-attention."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def zoo() -> ModuleType:
    """The benchmark as a module."""
    path = Path(__file__).parent.parent / "benchmarks" / "zoo.py"
    spec = importlib.util.spec_from_file_location("zoo", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["zoo"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


SAMPLE = [
    ("gpt2", "causal", 4),
    ("opt", "causal", 4),
    ("bloom", "causal", 4),
    ("gptj", "causal", 2),
    ("phi", "causal", 2),
    ("gemma2", "causal", 4),
    ("qwen2_moe", "causal", 4),
    ("olmo2", "causal", 4),
    ("cohere", "causal", 4),
    ("bert", "masked", 4),
    ("deberta-v2", "masked", 4),
    ("modernbert", "masked", 4),
    ("t5", "seq2seq", 10),
    ("bart", "masked", 10),
    ("pegasus", "seq2seq", 10),
]


@pytest.mark.parametrize(("name", "task", "sites"), SAMPLE)
@pytest.mark.filterwarnings("ignore")
def test_architecture(zoo: ModuleType, name: str, task: str, sites: int) -> None:
    found = [a for a in zoo.architectures([name]) if a[1] == task]
    assert len(found) == 1
    row = zoo.try_one(*found[0])
    assert row.sites == sites
    assert row.passes, row
