"""The frame of the second corpus: labels, scoring, and runs in processes of their own."""

import math

import pytest
import torch
from torch import nn

from benchmarks.faults.second.program import Program
from benchmarks.faults.second.running import Row, import_from, programs, run_all
from benchmarks.faults.second.score import judge, table


def regression(seed, faulty, watch):
    """A line through noise; the fault is a head whose input is detached."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(64, 8, generator=generator)
    y = x @ torch.randn(8, 1, generator=generator)
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    with watch(model, optimizer) as scope:
        for _ in range(40):
            hidden = model[1](model[0](x))
            loss = (model[2](hidden.detach() if faulty else hidden) - y).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scope.step(loss=loss)
    return -loss.item()


def broken(seed, faulty, watch):
    raise RuntimeError("no data")


CUT = Program("cut", "", regression, -4.0, -0.0, "detached", frozenset({"no_gradient"}), r"^0$", starts=10)
ALONE = Program("alone", "", regression, -4.0)


def alert(kind, where, step):
    return {"kind": kind, "severity": "warning", "where": where, "step": step, "message": ""}


def test_a_label_holds_on_its_side_of_the_bar_and_nan_is_the_lowest_figure():
    assert CUT.holds(False, -4.0)
    assert not CUT.holds(False, -4.1)
    assert not CUT.holds(False, math.nan)
    assert CUT.holds(True, math.nan)
    assert not CUT.holds(True, 0.1)


@pytest.mark.parametrize(
    "wrong", [{"kinds": frozenset({"bad_mood"})}, {"low": None}, {"fault": ""}, {"kinds": frozenset()}]
)
def test_a_program_whose_label_says_too_little_is_refused(wrong):
    fields = {"fault": "x", "kinds": frozenset({"no_gradient"}), "low": 0.0, **wrong}
    with pytest.raises(ValueError, match="p:"):
        Program("p", "", regression, 1.0, **fields)


def test_answers_nest_and_early_alerts_do_not_count():
    early, other, kind_only, right = (
        Row("cut", True, seed, -9.0, alerts=[alert(*told)])
        for seed, told in enumerate(
            [("no_gradient", "0", 9), ("saturation", "0", 10), ("no_gradient", "10", 10), ("no_gradient", "0", 10)]
        )
    )
    judged = judge({"cut": CUT}, [early, other, kind_only, right])
    assert [j.found for j in judged] == [False, True, True, True]
    assert [j.right_kind for j in judged] == [False, False, True, True]
    assert [j.right_place for j in judged] == [False, False, False, True]


def test_the_table_parts_healthy_programs_from_twins_and_counts_per_step():
    rows = [
        Row("alone", False, 0, -1.0, steps=300, alerts=[alert("saturation", "1", 5), alert("dead_units", "1", 5)]),
        Row("alone", False, 1, -1.0, steps=300),
        Row("cut", False, 0, -9.0, steps=400),
        Row("cut", True, 0, error="boom"),
    ]
    lines = "\n".join(table(judge({"cut": CUT, "alone": ALONE}, rows)))
    for part in (
        "healthy programs   1 of 2",
        "healthy twins      0 of 1",
        "healthy steps 2.00 (2 in 1000)",
        "did not hold         1 of 3",
        "crashed                1 of 4",
    ):
        assert part in lines


def test_runs_have_processes_of_their_own_and_a_crash_is_a_row(tmp_path):
    import_from(None)
    crash = Program("crash", "", broken, 0.0)
    wanted = [(CUT, True, 0), (CUT, False, 0), (crash, False, 0)]
    watched = {(row.program, row.faulty): row for row in run_all(wanted, tmp_path, workers=1, bare=False, limit_s=60)}
    (bare,) = run_all(wanted[:1], tmp_path, workers=1, bare=True, limit_s=60)
    assert "no data" in watched["crash", False].error
    assert watched["cut", True].error == watched["cut", False].error == bare.error == ""
    assert watched["cut", True].figure == bare.figure
    assert watched["cut", True].steps == 31  # the last of 40 steps that is sampled is step 30
    assert "no_gradient" in {alert["kind"] for alert in watched["cut", True].alerts}
    assert watched["cut", False].figure > watched["cut", True].figure
    assert (tmp_path / "cut-healthy-0" / "watch0" / "flowscope.jsonl").exists()


def test_every_program_of_the_corpus_says_where_it_is_from():
    assert all(program.source for program in programs().values())
