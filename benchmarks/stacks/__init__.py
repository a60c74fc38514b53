"""The same small training in many stacks: watched as its users would, and judged by hooks of our own.

Each stack is one function in `programs.py`; `python -m benchmarks.stacks` runs each in an environment of its own, and
writes the table of docs/integrations.md (`make stacks`).
"""
