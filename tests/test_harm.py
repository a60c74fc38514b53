"""A few attacks of each family of `benchmarks/harm`, drawn with one seed; `make harm` tries all of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from benchmarks.harm import attack
from benchmarks.harm.__main__ import BEGIN, END, scored, table, written
from benchmarks.harm.attack import Family, Outcome, Plan, found_families

SEED = 16
SHARE = 0.01


@pytest.mark.filterwarnings("ignore")  # of torch, on what the attacks do on purpose
@pytest.mark.parametrize("family", found_families(), ids=lambda family: family.name)
def test_what_is_promised_holds(family: Family) -> None:
    outcomes = list(family.tried(SEED, SHARE))
    assert outcomes
    assert not [outcome for outcome in outcomes if not outcome.held]


@pytest.mark.parametrize("family", found_families(), ids=lambda family: family.name)
def test_a_family_says_what_it_promises(family: Family) -> None:
    assert family.promise.endswith(".")
    assert all(held <= tried for tried, held in family.first.values())


def test_a_family_that_breaks_is_a_promise_broken() -> None:
    def attacks(plan: Plan) -> Iterator[Outcome]:
        yield Outcome("row", str(plan.random.random()), True)
        raise RuntimeError("broken")

    family = Family("own", "It holds.", attacks, {"row": (7, 5)})
    first, last = family.tried(3, 1.0)
    assert first == next(iter(family.tried(3, 1.0)))  # the same seed draws the same case
    assert first.case != next(iter(family.tried(4, 1.0))).case
    assert not last.held
    assert last.note == "RuntimeError: broken"
    scores = scored([first, first, last])
    assert scores == {"row": (2, 2), last.row: (1, 0)}
    rows = table(family, "seed 3", scores)
    assert rows.startswith("### own\n\nIt holds. (seed 3)\n")
    assert "| row | 2 | 2 | 7 | 5 |" in rows
    assert f"| {last.row} | 1 | 0 | - | - |" in rows


def test_the_page_keeps_the_tables_of_other_families() -> None:
    page = written(f"above\n{BEGIN}{END}below\n", {"b": "### b\n\nold\n", "c": "### c\n\nstays\n"})
    page = written(page, {"b": "### b\n\nnew\n", "a": "### a\n\nfirst\n"})
    assert page == f"above\n{BEGIN}\n### a\n\nfirst\n\n### b\n\nnew\n\n### c\n\nstays\n\n{END}below\n"


def test_a_share_is_drawn_evenly_and_is_never_empty() -> None:
    names = [f"case {number}" for number in range(10)]
    assert Plan(1, 1.0).some(names) == names
    drawn = {name for seed in range(200) for name in Plan(seed, 0.01).some(names)}
    assert drawn == set(names)
    assert len(Plan(5, 0.3).some(names)) == 3
    assert attack.Plan(5, 0.3).count(10) == 3
