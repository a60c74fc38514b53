"""A second labelled corpus: whole training programs, written without looking at the detectors that judge them.

`python -m benchmarks.faults.second` runs them and prints what was told, missed and said falsely. Each file holds
programs of one kind in a list `PROGRAMS`; `program.py` says what a program is.
"""
