"""Attacks on what flowscope promises a run: that it changes nothing, stops nothing and can be read whatever happens.

    python -m benchmarks.harm                      all families, an hour on one core; the seed is printed
    python -m benchmarks.harm --only disk webhook  these families
    python -m benchmarks.harm --seed 7 --share .1  the tenth part, as it was drawn before
    python -m benchmarks.harm --write              also the table of docs/promises.md

A family is a file of `families/`: its first line is the promise, `attacks(plan)` yields an `Outcome` a case, and
`FIRST` has what held when the rows were tried for the first time. `tests/test_harm.py` tries a few of each.
"""
