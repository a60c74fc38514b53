"""Training loops as they are found in the wild, on two ranks, bare and watched (benchmarks/rank_stacks.py)."""

from __future__ import annotations

from two_ranks import program


def test_nanogpts_loop_is_that_of_the_bare_run() -> None:
    out = program("../benchmarks/rank_stacks.py", "nanoGPT", limit=170)
    assert out.splitlines() == ["| nanoGPT's loop, DDP | yes | yes | yes | yes |"]
