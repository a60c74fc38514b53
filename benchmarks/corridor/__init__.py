"""How often a group of good runs calls a good run bad, and how many harmful changes it tells.

    make corridor                        train (once, kept in runs/corridor), judge, write docs/corridor.md
    python -m benchmarks.corridor        the same without writing

Groups are seeds of one program. Rules were chosen on the programs of `DEVELOPED` alone; the table is of the others.
"""
