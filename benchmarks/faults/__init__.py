"""Labelled training runs, and what flowscope and the rules of other tools say about them.

    python -m benchmarks.faults                       # everything, 3 seeds; prints the table
    python -m benchmarks.faults --write docs/detection.md
    python -m benchmarks.faults --cases F01 T --seeds 1 --quick

One module a kind of thing: `case` (what a labelled run is), `data`, `models`, the programs (`gradients`, `units`,
`collapse`, `numbers`, `updates`, `wiring`, `transformers`, `connections`, `flows`, `ranks`, `controls`), `trace` (a
published one, replayed), `numbers_seen` and `rules` (what the peers look at, and their rules), `runner`, `scoring`,
`table`.
"""
