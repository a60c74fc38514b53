"""Seeded faults for the trials, each beside its healthy twin, and the models of public libraries.

    python -m benchmarks.trials              # all: found, right trial, right place, fails on twins
    python -m benchmarks.trials NAME ...     # some, with every finding
    python -m benchmarks.trials --zoo        # false fails over transformers' architectures and image classifiers
    python -m benchmarks.trials --scripts    # public training scripts through the command

    case.py         what a case is, and the register
    language.py     transformers and recurrent models of text
    vision.py       convolutions, vision transformers, generative models of images
    training.py     optimizers, losses, targets and data
    later.py        faults of public reports, written when the others were all found
    scripts/        whole programs, judged through the command `flowscope check`
    scripted.py     their cases, and the run of one
    scoring.py      what is found, the right trial, the right place
    zoo.py          models that are healthy
    public.py       public training scripts that are healthy
    trainers/       scripts of TRL, and one for two ranks

The programs of the first three files were written from the list of what each trial is meant to prove, before its code
was read.
"""
