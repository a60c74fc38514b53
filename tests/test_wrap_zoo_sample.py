"""A sample of the zoo (`benchmarks/zoo`): pre-norm, post-norm, parallel, mixtures, state-space, cross-attention."""

from __future__ import annotations

import pytest

from benchmarks.zoo import text

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
def test_architecture(name: str, task: str, sites: int) -> None:
    found = [(row, judged) for row, judged in text.rows([name]) if row.group == task]
    assert len(found) == 1
    row, judged = found[0]
    judged()
    assert row.sites == dict.fromkeys(("dhc", "keel", "mhc"), sites)
    assert not row.broken
    assert not row.faults
