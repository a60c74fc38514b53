"""A sample of the trials' corpus, and the way it is scored."""

from __future__ import annotations

import pytest

from benchmarks.trials import language, later, scripted, training, vision
from benchmarks.trials.case import CASES, SCRIPTS, Case
from benchmarks.trials.public import SCRIPTS as PUBLIC
from benchmarks.trials.public import check_script
from benchmarks.trials.scoring import Verdict, judge, table
from flowscope.trials.built_in import NAMES

REGISTERED = (language, later, scripted, training, vision)


def finding(trial: str, status: str, where: str = "", message: str = "") -> dict[str, str]:
    return {"trial": trial, "status": status, "where": where, "message": message}


def test_every_trial_has_a_seeded_fault() -> None:
    first_choice = {case.trials[0] for case in CASES.values()}
    assert first_choice == set(NAMES)
    assert len(CASES) >= 40
    scripts = {case.script for case in CASES.values() if case.script}
    assert scripts == {path.name for path in SCRIPTS.glob("*.py")}
    assert len(scripts) >= 10


def test_a_fault_is_placed_only_by_its_own_trial_in_its_own_module() -> None:
    case = Case("one", ("padding",), where=r"lstm")
    right, elsewhere = finding("padding", "fail", "lstm"), finding("padding", "fail", "fc")
    other, note = finding("samples", "fail", "lstm"), finding("padding", "note", "lstm")
    verdict = Verdict(case, True, [right, elsewhere, other, note, finding("data", "note", "lstm")])
    assert verdict.counting() == [right, elsewhere, other]
    assert verdict.by_trial() == [right, elsewhere]
    assert verdict.at_place() == [right]


def test_a_note_counts_where_a_note_is_all_that_can_be_said() -> None:
    case = Case("one", ("data",), says="same batch", least="note")
    told, other = finding("data", "note", message="the Same batch as step 0"), finding("targets", "note")
    faulty, healthy = Verdict(case, True, [told, other]), Verdict(case, False, [told, other])
    assert faulty.counting() == faulty.at_place() == [told]
    assert healthy.fails() == []
    assert healthy.same_note()
    head = table([(faulty, healthy)]).splitlines()[0]
    assert "found 1, by the right trial 1, at the right place 1; twins with a fail 0, with the same note 1" in head


def test_errors_and_fails_on_twins_are_counted() -> None:
    case = Case("one", ("data",))
    faulty, healthy = Verdict(case, True, wrong=["status 2"]), Verdict(case, False, [finding("saving", "fail")])
    head, *_, row = table([(faulty, healthy)]).splitlines()
    assert "found 0" in head
    assert "twins with a fail 1" in head
    assert "programs with an error 1" in head
    assert row.split(" | ")[2:] == ["no", "-", "-", "saving |"]


@pytest.mark.parametrize(
    "name",
    [
        "window_open_on_both_sides",
        "sequence_not_packed",
        "norm_backward_without_projection",
        "checkpoint_without_random_state",
        "groups_leave_parameters_out",
        "softmax_before_cross_entropy",
        "heads_viewed_not_transposed",
        "encoding_added_along_the_batch",
        "padding_counts_in_the_loss",
        "log_softmax_over_time",
        "targets_flattened_in_another_order",
        "observation_statistics_not_saved",
        "cache_kept_between_batches",
        "batch_counted_twice_by_a_checkpoint",
        "checkpoint_without_a_graph",
    ],
)
def test_a_sample_is_told_and_its_twins_are_not(name: str) -> None:
    faulty, healthy = judge(CASES[name], True), judge(CASES[name], False)
    assert faulty.at_place()
    assert not healthy.fails()
    assert not healthy.same_note()
    assert not faulty.wrong + healthy.wrong


@pytest.mark.parametrize("name", ["spectrogram", "ema_copied_back", "clipped_every_micro_batch", "left_in_evaluation"])
def test_a_script_is_judged_by_the_command_and_saves_nothing(name: str) -> None:
    faulty, healthy = judge(CASES[name], True), judge(CASES[name], False)
    assert faulty.at_place()
    assert not healthy.fails()
    assert not faulty.wrong + healthy.wrong


@pytest.mark.parametrize("name", ["dcgan", "ppo", "time_sequence_prediction"])
def test_public_scripts_have_no_fail(name: str) -> None:
    one = check_script(PUBLIC / f"{name}.py")
    assert one.right, str(one)
    assert len(one.having("pass")) >= 9
