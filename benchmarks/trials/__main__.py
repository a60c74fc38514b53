"""`python -m benchmarks.trials [--zoo | --scripts] [NAME ...]`: see the package."""

from __future__ import annotations

import sys

import torch

from benchmarks.trials import language, later, public, scripted, training, vision, zoo  # each registers its cases
from benchmarks.trials.case import CASES
from benchmarks.trials.scoring import Verdict, judge, table

REGISTERED = (language, vision, training, scripted, later)


def told(verdict: Verdict) -> str:
    """Return what was said of one program."""
    lines = [f"  {'faulty ' if verdict.faulty else 'healthy'} {verdict.seconds:.1f} s"]
    lines += [f"    WRONG {one}" for one in verdict.wrong]
    lines += [
        f"    {one['status']:7s} {one['trial']:13s} {one['where'] or '-'}: {one['message']}"
        for one in verdict.findings
        if one["status"] != "pass"
    ]
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    """Judge the programs named, or all; the status says whether the marks are met."""
    torch.set_num_threads(1)
    if "--zoo" in arguments:
        return zoo.main([one for one in arguments if one != "--zoo"])
    if "--scripts" in arguments:
        return public.main([one for one in arguments if one != "--scripts"])
    quiet = "--quiet" in arguments
    names = [one for one in arguments if not one.startswith("--")] or list(CASES)
    pairs = []
    for name in names:
        pair = (judge(CASES[name], True), judge(CASES[name], False))
        pairs.append(pair)
        print(name, flush=True)
        if not quiet:
            print(*map(told, pair), sep="\n", flush=True)
    print(table(pairs))
    found, placed = (sum(bool(which(one)) for one, _ in pairs) for which in (Verdict.counting, Verdict.at_place))
    clean = not any(healthy.fails() or healthy.wrong or faulty.wrong for faulty, healthy in pairs)
    return 0 if found >= 0.95 * len(pairs) and placed >= 0.9 * len(pairs) and clean else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
