"""docs/tutorial.ipynb, executed cell by cell as a notebook would: what each cell shows says what it should."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

import flowscope

TUTORIAL = Path(__file__).resolve().parents[1] / "docs/tutorial.ipynb"


def cells(kind: str) -> list[str]:
    notebook = json.loads(TUTORIAL.read_text(encoding="utf-8"))
    return ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == kind]


def execute(source: str, space: dict[str, Any]) -> Any:
    """Run a cell; its value is that of its last expression, as in a notebook."""
    tree = ast.parse(source)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, str(TUTORIAL), "exec"), space)
    return eval(compile(ast.Expression(last.value), str(TUTORIAL), "eval"), space) if last is not None else None


@pytest.fixture(scope="module")
def shown() -> list[tuple[str, Any]]:
    pytest.importorskip("matplotlib")
    pytest.importorskip("pandas")
    space: dict[str, Any] = {}
    return [(source, execute(source, space)) for source in cells("code")]


def value(shown: list[tuple[str, Any]], last: str) -> Any:
    """The value of the one cell whose last line begins so."""
    (found,) = (value for source, value in shown if source.strip().splitlines()[-1].startswith(last))
    return found


def test_every_cell_that_shows_something_has_a_picture_or_a_table(shown: list[tuple[str, Any]]) -> None:
    values = [value for _, value in shown if value is not None]
    assert len(values) == 7
    for one in values:
        rich = getattr(one, "_repr_png_", None) or one._repr_html_
        assert len(rich()) > 200


def test_what_it_tells_is_so(shown: list[tuple[str, Any]]) -> None:
    after, alerts = value(shown, "after"), value(shown, "scope.alerts")
    assert "token_collapse" in {alert.kind for alert in alerts if alert.state == "raised"}
    assert "token_collapse" not in {alert.kind for alert in after.alerts}
    (before,) = (value for _, value in shown if isinstance(value, flowscope.Scope) and value is not after)
    assert after.records[-1].loss < before.records[-1].loss
    frame = value(shown, 'scope.run.to_pandas("gradient_product")')
    assert frame.iloc[-1].tolist() == before.records[-1]["gradient_product"].tolist()


def test_no_output_is_kept_in_it() -> None:
    notebook = json.loads(TUTORIAL.read_text(encoding="utf-8"))
    assert all(not cell.get("outputs") for cell in notebook["cells"])
    assert notebook["nbformat"] == 4
    assert len(cells("markdown")) >= 6
