"""Pairs of runs: a good one and one with a single fault of known step, phase and place; and pairs that are equal.

`python -m benchmarks.parting [NAME ...]` records them and asks `flowscope.bisect` where they part. The programs were
written, with what is to be said of each, before bisect had judged any.
"""
