"""A benchmark that others set the questions of: `python -m benchmarks.rivals` (docs/rivals.md, `make rivals`).

    text.py         the standard library as bytes
    students.py     a small BERT and a small GPT-2, pretrained here once, and their two tasks
    mutants.py      the mutation operators of DEForm, unchanged (package `defaultplusplus`, development only)
    tuning.py       one tuning run, watched at the defaults, kept with its records
    harm.py         which mutants count: a changed result, and worse than the clean twin on five seeds of five
    components.py   from a place to the component it belongs to, and what an operator in fact changes
    answers.py      what flowscope says of a run: limits, check, paired, corridor
    published.py    AUTOTRAINER, DeepDiagnosis, DeepFD on the same runs
    diagnoser.py    the diagnoser that comes with the operators
    columns.py      all of these as the columns of one table;  score.py counts,  table.py writes
    loops.py        what a program of a published report is
    traincheck.py   TrainCheck's twenty silent errors;  reports.py  public reports of 2024 to 2026
    programs.py     the ways of asking about those

Everything trained is kept under `runs/rivals`, and judged again without training.
"""
