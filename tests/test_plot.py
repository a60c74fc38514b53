"""Figures: what is drawn is what the records say."""

from __future__ import annotations

import builtins
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from flowscope import plot
from flowscope.errors import FlowscopeError
from flowscope.records import Record
from flowscope.sinks import Run

pytest.importorskip("matplotlib", reason="pip install matplotlib (extra 'plot'): the figures are untested without it")

POINTS = ("enc.0:input", "enc.0", "enc.1", "enc.2", "enc.3")
HOSTILE = "<img src=x onerror=alert(1)> $\\frac{$ _a"


def profile(step: int) -> np.ndarray:
    """[5], four decades, different at each step."""
    return 10.0 ** -np.arange(5.0)[::-1] * (step + 1)


def make_records(steps: list[int], **more: Any) -> list[Record]:
    labels = {"gradient_product": POINTS, "cosine": POINTS[1:], "gate_mean": POINTS[2:]}
    records = []
    for step in steps:
        metrics = {"gradient_product": profile(step), "cosine": np.array([0.1, 0.4, 0.3, 0.2]) + step / 1000}
        metrics.update({k: np.asarray(v(step)) for k, v in more.items()})
        records.append(Record(step, 3.0 - step / 10, metrics, flow_names=("enc", "dec"), metric_labels=labels))
    return records


def drawn(figure: Any) -> None:
    """Draw it for real: wrong text or scales only fail then."""
    figure.canvas.draw()


def line_of(axes: Any, name: str) -> Any:
    legend = axes.get_legend()
    handles = dict(zip([t.get_text() for t in legend.get_texts()], legend.legend_handles, strict=True))
    colour = handles[name].get_color()
    return next(line for line in axes.get_lines() if line.get_color() == colour and line.get_linestyle() == "-")


def test_depth_profile_draws_the_records() -> None:
    records = make_records([0, 1, 2, 7, 10, 20, 30, 40])
    figure = plot.depth_profile(records)
    drawn(figure)
    (axes,) = figure.axes
    # six of eight records, evenly spaced: indices 0, 1.4, 2.8, 4.2, 5.6, 7
    assert [t.get_text() for t in axes.get_legend().get_texts()] == [f"step {s}" for s in (0, 1, 7, 10, 30, 40)]
    for step in (0, 1, 7, 10, 30, 40):
        line = line_of(axes, f"step {step}")
        np.testing.assert_array_equal(line.get_xdata(), [0, 1, 2, 3, 4])
        np.testing.assert_array_equal(line.get_ydata(), profile(step))
    assert axes.get_yscale() == "log"
    assert axes.get_ylabel() == "gradient_product"
    assert axes.get_xlabel() == "depth (0: enc.0:input, 4: enc.3)"


@pytest.mark.parametrize("source", ["list", "run", "record", "scope"])
def test_every_kind_of_source(source: str) -> None:
    records = make_records([3, 5])

    class Scope:
        def __init__(self) -> None:
            self.records = records

    given = {"list": records, "run": Run(None, records), "record": records[1], "scope": Scope()}[source]
    axes = plot.depth_profile(given, "cosine").axes[0]
    np.testing.assert_array_equal(line_of(axes, "step 5").get_ydata(), records[1]["cosine"])
    assert len(axes.get_lines()) == (1 if source == "record" else 2)
    assert axes.get_yscale() == "linear"


def test_chosen_steps_other_flow_and_band() -> None:
    others = {"cosine@dec": lambda s: [0.9, s / 10], "cosine_p05@dec": lambda s: [0.8, s / 20]}
    records = make_records([0, 1, 2], **others, **{"cosine_p95@dec": lambda s: [1.0, s / 5]})
    axes = plot.depth_profile(records, "cosine", flow="dec", steps=[2, 1]).axes[0]
    np.testing.assert_array_equal(line_of(axes, "step 2").get_ydata(), [0.9, 0.2])
    np.testing.assert_array_equal(line_of(axes, "step 1").get_ydata(), [0.9, 0.1])
    assert axes.get_title() == "cosine of dec"
    (band,) = axes.collections
    corners = {(x, round(y, 9)) for x, y in band.get_paths()[0].vertices}
    assert corners == {(0, 0.8), (1, 0.1), (0, 1.0), (1, 0.4)}


def test_zero_infinite_and_unseen_are_told_apart() -> None:
    values = np.array([0.0, 1e-3, np.nan, 1e-1, np.inf])
    axes = plot.depth_profile(make_records([4], gradient_product=lambda _: values)).axes[0]
    drawn(axes.figure)
    line, zero, infinite = axes.get_lines()
    np.testing.assert_array_equal(line.get_ydata(), values)
    assert (zero.get_marker(), list(zero.get_xdata()), list(zero.get_ydata())) == ("v", [0], [0.0])
    assert (infinite.get_marker(), list(infinite.get_xdata()), list(infinite.get_ydata())) == ("^", [4], [1.0])


@pytest.mark.parametrize("value", [0.0, np.nan, np.inf])
@pytest.mark.parametrize("metric", ["gradient_product", "cosine"])
def test_nothing_but_one_strange_value(value: float, metric: str) -> None:
    record = make_records([4], **{metric: lambda _: [value] * 3})
    drawn(plot.depth_profile(record, metric))
    drawn(plot.heat_map(record, metric))
    drawn(plot.compare({"a": record}, metric))


def test_less_than_a_decade_is_drawn_on_one() -> None:
    axes = plot.depth_profile(make_records([4], gradient_product=lambda _: [1.0, 2.0, 1.0])).axes[0]
    low, high = axes.get_ylim()
    assert high / low == pytest.approx(10)
    assert low < 1 < 2 < high


def test_heat_map_cells() -> None:
    steps = [0, 1, 2, 10, 30]
    figure = plot.heat_map(make_records(steps))
    drawn(figure)
    axes, colour_bar = figure.axes
    (mesh,) = axes.collections
    want = np.stack([profile(step) for step in steps], axis=1)
    np.testing.assert_array_equal(np.asarray(mesh.get_array()).reshape(5, 5), want)
    # columns reach half-way to their neighbours
    np.testing.assert_array_equal(mesh.get_coordinates()[0, :, 0], [-0.5, 0.5, 1.5, 6, 20, 40])
    assert axes.get_ylim() == (4.5, -0.5), "the input is at the top"
    # values reach from 1e-4 to 31: whole decades
    assert (mesh.norm.vmin, mesh.norm.vmax) == (1e-4, 1e2)
    assert colour_bar.get_ylabel() == "gradient_product"


def test_the_rows_of_parameters_are_called_so() -> None:
    names = ("head.weight", "a.long.way.down.to.the.last.bias", "$x$")
    records = [
        Record(step, 1.0, {"update_ratio": np.ones(3)}, metric_labels={"update_ratio": names}) for step in (0, 1)
    ]
    figure = plot.heat_map(records, "update_ratio")
    drawn(figure)
    axes = figure.axes[0]
    assert axes.get_ylabel() == "parameter, input first"
    assert [text.get_text() for text in axes.get_yticklabels()] == ["head.weight", "…y.down.to.the.last.bias", "$x$"]
    assert plot.depth_profile(records, "update_ratio").axes[0].get_xlabel().startswith("parameter (0: head.weight, 2: ")


def test_a_share_that_is_the_same_everywhere_is_drawn_between_its_bounds() -> None:
    figure = plot.heat_map(make_records([0, 1], gate_mean=lambda _: [1.0, 1.0, 1.0]), "gate_mean")
    (mesh,) = figure.axes[0].collections
    assert (mesh.norm.vmin, mesh.norm.vmax) == (0.0, 1.0)


def test_heat_map_shows_zero_as_bad_and_nan_as_unseen() -> None:
    values = np.array([0.0, np.nan, np.inf, 0.5])
    (mesh,) = plot.heat_map(make_records([1, 2], gradient_product=lambda _: values)).axes[0].collections
    mesh.update_scalarmappable()
    zero, unseen, infinite, half = (tuple(mesh.to_rgba(mesh.get_array()).reshape(4, 2, 4)[i, 0]) for i in range(4))
    assert zero == tuple(mesh.cmap.get_under())
    assert unseen == tuple(mesh.cmap.get_bad())
    assert infinite == tuple(mesh.cmap.get_over())
    assert len({zero, unseen, infinite, half}) == 4


def test_heat_map_of_a_long_and_deep_run_is_thinned_and_keeps_both_ends() -> None:
    steps = list(range(0, 5000, 2))
    (mesh,) = plot.heat_map(make_records(steps, gradient_product=lambda s: np.full(3, s + 1.0))).axes[0].collections
    grid = np.asarray(mesh.get_array()).reshape(3, -1)
    assert grid.shape == (3, plot.COLUMNS)
    assert (grid[0, 0], grid[0, -1]) == (1.0, 4999.0)


def test_a_flow_that_grew_keeps_its_columns() -> None:
    records = make_records([0, 1], gradient_product=lambda s: np.full(2 + s, 0.5))
    (mesh,) = plot.heat_map(records).axes[0].collections
    grid = np.ma.filled(np.ma.masked_invalid(np.asarray(mesh.get_array()).reshape(3, 2)), -1)
    np.testing.assert_array_equal(grid, [[0.5, 0.5], [0.5, 0.5], [-1, 0.5]])


@pytest.mark.parametrize(("least", "limit"), [(0.2, 0.0), (-0.1, -1.0)])
def test_cosine_matrix_is_the_last_there_is(least: float, limit: float) -> None:
    first, last = np.eye(3), np.array([[1, 0.5, least], [0.5, 1, 0.7], [least, 0.7, 1]])
    records = make_records([0, 1, 2])
    records[0].metrics["cosine_matrix"], records[1].metrics["cosine_matrix"] = first, last
    figure = plot.cosine_matrix(records)
    drawn(figure)
    (mesh,) = figure.axes[0].collections
    np.testing.assert_array_equal(np.asarray(mesh.get_array()).reshape(3, 3), last)
    assert (mesh.norm.vmin, mesh.norm.vmax) == (limit, 1.0)
    assert figure.axes[0].get_title() == "cosine_matrix, step 1"


def test_gates() -> None:
    shares = {"gate_mean": lambda s: [0.2, 0.4, 0.9 - s / 100], "gate_p05": lambda s: [0.1, 0.3, 0.7]}
    figure = plot.gates(make_records([0, 10], **shares, gate_p95=lambda s: [0.3, 0.5, 1.0]))
    drawn(figure)
    left, right = figure.axes[:2]
    (mesh,) = left.collections
    np.testing.assert_array_equal(np.asarray(mesh.get_array()).reshape(3, 2), [[0.2, 0.2], [0.4, 0.4], [0.9, 0.8]])
    assert (mesh.norm.vmin, mesh.norm.vmax) == (0.2, 0.9)
    assert right.get_xlim() == (0, 1)
    np.testing.assert_array_equal(right.get_lines()[0].get_xdata(), [0.2, 0.4, 0.8])
    assert {(round(x, 9), y) for x, y in right.collections[0].get_paths()[0].vertices} >= {(0.1, 0), (1.0, 2)}
    assert left.get_ylabel() == "depth, input first"
    assert [text.get_text() for text in left.get_yticklabels()] == ["enc.1", "enc.2", "enc.3"]
    with pytest.raises(FlowscopeError, match=r"no metric 'gate_mean'.*flowscope.wrap"):
        plot.gates(make_records([0]))


def test_mixing_squares_are_the_last_matrices_in_order_of_depth() -> None:
    sites = np.arange(20 * 4 * 4.0).reshape(20, 4, 4) / 100 - 0.5
    records = make_records([0, 10, 20])
    for record in records[:2]:
        record.metrics["mix_matrix"] = sites * (record.step + 1)
        record.metric_labels = {"mix_matrix": tuple(f"b.{i}#0" for i in range(20))}
    figure = plot.mixing(records)
    drawn(figure)
    squares = [axes for axes in figure.axes if axes.images]
    # 16 of 20, evenly spaced: index 1 is 19 / 15, rounded; index 2 is 38 / 15, rounded
    assert [axes.get_title() for axes in squares][:3] == ["b.0#0", "b.1#0", "b.3#0"]
    assert len(squares) == 16
    assert squares[-1].get_title() == "b.19#0"
    np.testing.assert_array_equal(squares[2].images[0].get_array(), sites[3] * 11)
    (limits,) = {axes.images[0].get_clim() for axes in squares}
    assert limits == pytest.approx((-0.5 * 11, (319 / 100 - 0.5) * 11))
    assert figure.get_suptitle() == "mix_matrix, step 10"
    with pytest.raises(FlowscopeError, match=r"plot\.mixing: .*mode='shc', 'dhc' or 'mhc'"):
        plot.mixing(make_records([3]))


def test_compare_runs_of_equal_and_of_other_depth() -> None:
    a, b = make_records([0, 5]), make_records([0, 9], gradient_product=lambda s: np.array([1.0, 2.0, 1.0 + s]))
    figure = plot.compare({"_plain": a, "keel": Run(None, b)})
    drawn(figure)
    left, right = figure.axes
    np.testing.assert_array_equal(line_of(left, "_plain, step 5").get_ydata(), profile(5))
    np.testing.assert_array_equal(line_of(left, "keel, step 9").get_ydata(), [1.0, 2.0, 10.0])
    np.testing.assert_array_equal(line_of(left, "keel, step 9").get_xdata(), [0, 0.5, 1])
    dashed = [line.get_ydata() for line in left.get_lines() if line.get_linestyle() == "--"]
    np.testing.assert_array_equal(dashed[0], profile(0))
    np.testing.assert_array_equal(dashed[1], [1.0, 2.0, 1.0])
    np.testing.assert_allclose(line_of(right, "_plain").get_ydata(), [3.0, 2.5])
    np.testing.assert_array_equal(line_of(right, "keel").get_xdata(), [0, 9])
    for record in a:
        record.loss = None
    assert len(plot.compare({"a": a}).axes) == 1
    (axes,) = plot.compare({"a": a, "b": a}).axes
    np.testing.assert_array_equal(axes.get_lines()[0].get_xdata(), [0, 1, 2, 3, 4])


def test_hostile_names_are_text(tmp_path: Any) -> None:
    records = make_records([0, 1])
    for record in records:
        record.flow_names = (HOSTILE,)
        record.metric_labels = {"gradient_product": (HOSTILE, "b", "c", "d", HOSTILE)}
    figures = [
        plot.depth_profile(records, flow=HOSTILE),
        plot.heat_map(records, flow=HOSTILE),
        plot.compare({HOSTILE: records}),
    ]
    for number, figure in enumerate(figures):
        drawn(figure)
        figure.savefig(tmp_path / f"{number}.svg")
    assert figures[0].axes[0].get_xlabel() == f"depth (0: {HOSTILE}, 4: {HOSTILE})"
    assert figures[2].axes[0].get_legend().get_texts()[0].get_text() == f"{HOSTILE}, step 1"
    assert "<img" not in (tmp_path / "2.svg").read_text()


def test_what_cannot_be_drawn_is_said() -> None:
    records = make_records([0, 5, 10], cosine_matrix=lambda _: np.eye(3))
    cases: list[tuple[Any, str]] = [
        (lambda: plot.heat_map([]), "without a record"),
        (lambda: plot.heat_map("runs/a"), r"got str.*read_run"),
        (lambda: plot.heat_map(7), "got int"),
        (lambda: plot.heat_map(records, "gian"), r"no metric 'gian'. It has: cosine"),
        (lambda: plot.depth_profile(records, "cosine_matrix"), r"shape \(3, 3\).*plot.cosine_matrix"),
        (lambda: plot.depth_profile(records, steps=[5, 6]), r"got \[6\].*nearest: \[0, 5, 10\]"),
        (lambda: plot.depth_profile(records, steps=[]), "got no step"),
        (lambda: plot.depth_profile(records, flow="ecn"), "no flow 'ecn'"),
        (lambda: plot.compare({}), "got {}"),
        (lambda: plot.compare(records), r"expected \{'plain'"),
        (lambda: plot.cosine_matrix(make_records([0])), "no metric 'cosine_matrix'"),
    ]
    for call, message in cases:
        with pytest.raises(FlowscopeError, match=message):
            call()


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def no_matplotlib(name: str, *args: Any) -> Any:
        if name.split(".")[0] == "matplotlib":
            raise ModuleNotFoundError("No module named 'matplotlib'")
        return real(name, *args)

    monkeypatch.setattr(builtins, "__import__", no_matplotlib)
    with pytest.raises(FlowscopeError, match=r"pip install flowscope\[plot\]"):
        plot.depth_profile(make_records([0]))


def test_importing_and_drawing_leaves_pyplot_alone() -> None:
    code = """
import sys
from flowscope import plot
from flowscope.records import Record
assert "matplotlib" not in sys.modules
import numpy as np
figure = plot.heat_map([Record(0, None, {"gain": np.ones(3)})], "gain")
assert type(figure).__name__ == "Figure"
assert "matplotlib.pyplot" not in sys.modules and "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
