"""What the panels show, as plain numbers: thinning, grouping, verdicts, the report's payload, the joined script."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from panels_run import ENCODER, EVIL, HEADER, STEPS, alerts, product, record, write_run

from flowscope.errors import FlowscopeError
from flowscope.instruments import METRICS
from flowscope.metrics import VIEWS, spec_of, told_by_0_1
from flowscope.records import Alert, FlowLayout, Record, RunHeader
from flowscope.sinks import Run, read_run
from flowscope.views import assets, overview, report, series
from flowscope.views.report import write_report
from flowscope.views.room import Room

ROOT = Path(__file__).resolve().parents[1]
NAN = float("nan")


def test_thinning_keeps_the_ends_and_the_steps_asked_for() -> None:
    steps = np.arange(0, 1000, 5)
    chosen = steps[series.thin_steps(steps, 20, keep=[333, 7])]
    assert len(chosen) == len(set(chosen)) <= 20
    assert {0, 995, 335, 5} <= set(chosen.tolist())
    assert (
        np.diff(chosen).max() <= 70
    )  # 16 even picks of 200 records: at most ceil(199 / 15) = 14 records of 5 steps apart
    assert (chosen == np.sort(chosen)).all()
    np.testing.assert_array_equal(series.thin_steps(steps[:7], 7), np.arange(7))


def test_many_steps_to_keep_leave_room_for_the_rest() -> None:
    steps = np.arange(5000)
    chosen = series.thin_steps(steps, 40, keep=list(range(100)))
    assert len(chosen) <= 40
    assert np.diff(chosen).max() < 300


def test_a_group_is_shown_by_its_most_extreme_row() -> None:
    values = np.ones((3, 12))
    values[0, 4] = 1e-6  # vanished
    values[1, 5] = 1e6  # exploded
    values[2, 3:6] = [np.nan, 0.0, 1e-3]  # zero is further than 1e-3, NaN is nothing
    cells, edges = series.group_rows(values, 4, log=True)
    assert edges.tolist() == [0, 3, 6, 9, 12]
    np.testing.assert_array_equal(cells, [[1, 1e-6, 1, 1], [1, 1e6, 1, 1], [1, 0, 1, 1]])
    # the naive way: for each record and group, the value furthest from the record's median
    random = np.random.default_rng(0).normal(size=(5, 11))
    cells, edges = series.group_rows(random, 3, log=False)
    for n in range(5):
        for g in range(3):
            group = random[n, edges[g] : edges[g + 1]]
            assert cells[n, g] == max(group, key=lambda value: abs(value - np.median(random[n])))


def test_groups_of_nothing_but_nan_stay_nan() -> None:
    values = np.full((2, 6), np.nan)
    values[1, 0] = 2.0
    cells, _ = series.group_rows(values, 3, log=True)
    np.testing.assert_array_equal(cells, [[NAN, NAN, NAN], [2.0, NAN, NAN]])


def test_a_series_is_the_last_of_each_step_and_of_the_last_shape() -> None:
    points = [(0, np.ones(3)), (2, np.full(4, 2.0)), (1, np.full(4, 9.0)), (2, np.full(4, 3.0))]
    made = series.make_series("gain", points, ("a", "b", "c", "d"))
    assert (made.steps.tolist(), made.values[:, 0].tolist(), made.dropped) == ([1, 2], [9.0, 3.0], 1)
    assert series.make_series("gain", points, ("a",)).labels == ("row 0", "row 1", "row 2", "row 3")
    with pytest.raises(ValueError, match="no record"):
        series.make_series("gain", [], ())


def test_payloads_are_strict_json_with_five_digits() -> None:
    values = np.array([[NAN, np.inf, -np.inf, 1 / 3, 12345678.0]])
    made = series.make_series("gain", [(4, values[0])], tuple("abcde"))
    payload = series.heat_payload(made, log=True)
    text = series.to_json(payload)
    assert json.loads(text)["values"] == [[None], ["inf"], ["-inf"], [0.33333], [12346000.0]]
    assert payload["rows"][3] == ["d", "d", 3, 1]
    assert series.to_json(series.strict({"p": Path("x"), "q": (1, NAN), 3: np.float64(2.5)})) == (
        '{"p":"x","q":[1,null],"3":2.5}'
    )


def test_a_deep_profile_is_thinned_and_says_what_a_row_stands_for() -> None:
    made = series.make_series("gain", [(s, np.arange(1.0, 1026.0)) for s in range(3)], [f"b{i}" for i in range(1025)])
    payload = series.heat_payload(made, log=True, rows=256)
    assert len(payload["rows"]) == len(payload["values"]) == 256
    assert sum(row[3] for row in payload["rows"]) == payload["depth"] == 1025
    assert payload["rows"][0] == ["b0", "b3", 0, 4]
    assert payload["values"][0][0] == 1  # the least of four, far below the median
    whole = series.record_payload(made, 2, log=True)
    assert len(whole["values"]) == 1025


def view(*found: Alert, **labels: tuple[str, ...]) -> overview.RunView:
    return overview.RunView("r", HEADER, dict(labels) or dict(HEADER.labels), found, last_step=20)


def test_alerts_are_spans_from_raised_to_resolved() -> None:
    spans = overview.alert_spans(view(*alerts()))
    assert [(span["kind"], span["step"], span["resolved"]) for span in spans] == [
        ("representation_collapse", 2, 10),
        ("vanishing_gradient", 2, None),
    ]
    assert [span["raised"] for span in spans] == [2, 5]
    again = Alert("representation_collapse", "warning", "enc.3", 12, 0.8, 0.7, "m", "a", flow="enc")
    spans = overview.alert_spans(view(*alerts(), again))
    assert [(span["step"], span["resolved"]) for span in spans] == [(2, 10), (2, None), (12, None)]


@pytest.mark.parametrize(
    ("kind", "where", "flow", "expected"),
    [
        ("vanishing_gradient", EVIL, "enc", ("gradient_product", 2)),
        ("vanishing_gradient", "dec.1", "dec", ("gradient_product@dec", 2)),
        ("representation_collapse", "enc.3", "enc", ("cosine", 3)),
        ("update_too_large", "enc.3.bias", None, ("update_ratio", 1)),
        ("update_too_large", "enc.3", None, ("update_ratio", 1)),  # a module: its first parameter
        ("vanishing_gradient", "enc.0.mlp.1", "enc", ("gradient_product", 1)),  # inside a block: the block
        ("vanishing_gradient", "enc", "enc", ("gradient_product", 0)),  # enc:input
        ("loss_spike", "", None, ("gradient_product", None)),  # the whole model
        ("unheard_of", "nowhere", None, ("gradient_product", None)),
    ],
)
def test_an_alert_knows_its_picture_and_row(
    kind: str, where: str, flow: str | None, expected: tuple[str, int | None]
) -> None:
    alert = Alert(kind, "warning", where, 3, 1.0, 1.0, "m", "a", flow=flow)
    assert overview.place(view(), alert) == expected


def test_an_alert_without_any_picture() -> None:
    alert = Alert("vanishing_gradient", "error", "enc.0", 3, 1.0, 1.0, "m", "a", flow="enc")
    assert overview.place(view(act_rms=ENCODER), alert) == (None, None)


def test_the_verdict_names_the_worst_that_stands() -> None:
    info = Alert("no_gradient", "info", "", 1, 0.0, 0.0, "m", "a")
    warning = Alert("token_collapse", "warning", "enc.0", 2, 1.0, 0.9, "all tokens are one", "warm up", flow="enc")
    run = view(info, warning)
    spans = overview.alert_spans(run)
    # an info is a cause too
    story = "First: no_gradient (step 1); then: token_collapse at enc.0 (step 2)."
    assert overview.verdict(run, spans) == {
        "severity": "warning",
        "text": "token_collapse at enc.0 since step 2 (+1 more)",
        "message": "all tokens are one",
        "advice": "warm up",
        "sentence": "Token collapse at enc.0 since step 2; first came no_gradient (step 1).",
        "story": story,
    }
    spike = Alert("loss_spike", "error", "", 1, 0.0, 0.0, "m", "a")
    told = overview.verdict(view(info, warning, spike), [])["story"]
    assert told == "First: no_gradient (step 1); then: loss_spike (step 1); then: token_collapse at enc.0 (step 2)."
    assert overview.verdict(run, []) == {"severity": "ok", "text": "no alert", "story": story}
    ended = [{**spans[0], "resolved": 4}]
    assert overview.verdict(run, ended) == {"severity": "ok", "text": "no alert stands", "story": story}
    assert overview.verdict(overview.RunView("r"), [])["severity"] == "none"


def test_one_sentence_says_what_is_lost_between_which_places_since_when_and_what_came_first() -> None:
    gone = Alert("vanishing_gradient", "error", "enc.2", 7, 0.0, 0.0, "m", "a", since=4, flow="enc")
    before = Alert("token_collapse", "error", "enc.1", 7, 0.0, 0.0, "m", "a", since=3, flow="enc")
    run = replace(view(gone), products={"gradient_product": np.array([np.nan, 1e-6, 1e-3, 0.7, 1.0])})
    labels = HEADER.labels["gradient_product"]
    told = overview.verdict(run, overview.alert_spans(run))["sentence"]
    assert told == f"Gradient is lost between {labels[3]} and {labels[1]} (down to 1e-06) since step 4."
    run = replace(run, alerts=[before, gone], products={})  # without the profile the alert's own place
    (_, span) = overview.alert_spans(run)
    told = overview.sentence(run, span)
    assert told == "Vanishing gradient at enc.2 since step 4; first came token_collapse at enc.1 (step 3)."
    spike = Alert("loss_spike", "error", "", 9, 0.0, 0.0, "m", "a")
    run = view(spike)
    assert overview.verdict(run, overview.alert_spans(run))["sentence"] == "Loss spike since step 9."


def test_facts_leave_out_what_was_not_seen() -> None:
    run = view()
    run.products = {"gradient_product": np.array([NAN, 0.25, 0.0, 4.0, 1.0]), "gradient_product@dec": np.full(4, NAN)}
    assert overview.facts(run) == [
        f"enc: at step 20 the gradient at enc.0 is 0.25 times that at enc.3; least 0 at {EVIL}.",
        "dec: the last record has no finite gradient.",
    ]
    # the stack's input may be data, which asks for no gradient; a gap behind it is worth a word
    run.products = {"gradient_product": np.array([NAN, NAN, 0.5, 0.75, 1.0])}
    assert overview.facts(run) == [
        f"enc: at step 20 the gradient at {EVIL} is 0.5 times that at enc.3; least 0.5 at {EVIL}. Before {EVIL} no "
        "finite gradient was seen."
    ]
    run.products = {f"gradient_product@{i}": np.ones(3) for i in range(overview.FACTS + 2)}
    assert overview.facts(run)[-1] == "and 2 more flows"


def test_every_documented_metric_has_a_spec() -> None:
    text = (ROOT / "docs" / "metrics.md").read_text()
    headings = re.findall(r"^### (.+)$", text, re.MULTILINE)
    documented = {name for heading in headings for name in re.findall(r"`(\w+)`", heading)}
    assert len(documented) > 30
    unknown = {name for name in documented if name not in METRICS}
    assert unknown == set()
    assert {metric.view for metric in METRICS.values()} <= set(VIEWS)


def test_every_kind_of_alert_has_a_picture() -> None:
    from flowscope.config import WatchConfig
    from flowscope.detectors import DetectorSet

    shown_by = DetectorSet(WatchConfig()).shown_by
    assert {kind for kind, names in shown_by.items() if not names} == {"loss_plateau", "loss_spike"}
    assert {name for names in shown_by.values() for name in names} <= set(METRICS)
    # what later versions have added stands behind what 0.1 drew
    for kind, names in told_by_0_1()["shown_by"].items():
        assert shown_by[kind][: len(names)] == tuple(names), kind


def test_which_metrics_are_logarithmic() -> None:
    logarithmic = ("gradient_product", "gain", "act_rms", "param_grad_norm", "update_ratio", "effective_rank")
    assert all(spec_of(name, {}).is_log for name in logarithmic)
    assert not any(spec_of(name, {}).is_log for name in ("cosine", "cosine_p05", "dead_fraction", "norm_gap"))
    # a metric that nobody described goes by its name
    assert [spec_of(name, {}).scale for name in ("my_norm", "my_share", "some_ratio")] == ["log", "linear", "log"]


# --- the report -----------------------------------------------------------------------------------------------------


def embedded(page: str) -> dict:
    return json.loads(re.search(r'<script type="application/json"[^>]*>(.*?)</script>', page, re.DOTALL)[1])


def test_the_report_holds_every_number_of_a_small_run(tmp_path: Path) -> None:
    write_run(tmp_path / "a")
    path = write_report({"a": read_run(tmp_path / "a")}, tmp_path / "deep" / "r.html", title="A & B <i>")
    page = path.read_text()
    assert "<title>A &amp; B &lt;i&gt;</title>" in page
    data = embedded(page)
    found = data["series"]["a"]
    assert set(found) == set(HEADER.labels)
    assert found["gradient_product"]["steps"] == list(STEPS)
    expected = np.stack([product("a", step) for step in STEPS], axis=1)
    np.testing.assert_allclose(found["gradient_product"]["values"], expected, rtol=1e-4)
    assert [r["step"] for r in found["cosine_matrix"]["records"]] == [0, 10]
    assert data["runs"][0]["loss"] == {"steps": list(STEPS), "values": [3, 2.9, 2.8, 2.5, 2, 1.5]}
    assert data["runs"][0]["environment"] == {"torch": "none", "python": "3"}
    assert data["runs"][0]["verdict"]["severity"] == "error"


def test_no_name_can_leave_the_data(tmp_path: Path) -> None:
    write_run(tmp_path / "a")
    page = write_report(read_run(tmp_path / "a"), tmp_path / "r.html").read_text()
    assert EVIL not in page
    assert page.count("<script") == page.count("</script>") == 2
    assert "head</script>.weight" in embedded(page)["series"]["run"]["update_ratio"]["rows"][2]


def test_the_report_asks_for_nothing() -> None:
    page = report._PAGE
    assert not re.search(r'\b(src|href)="(?!data:)', page)
    assert "default-src 'none'" in report._POLICY
    assert "url(" not in assets.read("style.css")


def test_runs_by_name_in_a_list_or_alone(tmp_path: Path) -> None:
    run = Run(HEADER, [record("a", 0)], [])
    for given, names in (({"x": run, "y": run}, ["x", "y"]), ([run, run], ["run 1", "run 2"]), (run, ["run"])):
        data = embedded(write_report(given, tmp_path / "r.html").read_text())
        assert [found["name"] for found in data["runs"]] == names
    with pytest.raises(FlowscopeError, match="got no run"):
        write_report({}, tmp_path / "r.html")
    (tmp_path / "file").write_text("")
    with pytest.raises(FlowscopeError, match=r"write_report\(.*file/r.html"):
        write_report(run, tmp_path / "file" / "r.html")


def test_a_run_without_header_is_reported_with_numbered_rows(tmp_path: Path) -> None:
    run = Run(None, [Record(3, None, {"gain": np.array([1.0, 2.0])})], [])
    data = embedded(write_report(run, tmp_path / "r.html").read_text())
    assert [row[0] for row in data["series"]["run"]["gain"]["rows"]] == ["row 0", "row 1"]
    assert "no header" in data["runs"][0]["notices"][0]


def test_after_a_change_of_layout_old_rows_do_not_get_new_names() -> None:
    names = [("a.0", "a.1"), ("b.0", "b.1"), ("b.0", "b.1")]
    records = [
        Record(step, 1.0, {"gain": np.array([step, step + 0.5])}, metric_labels={"gain": rows})
        for step, rows in enumerate(names)
    ]
    header = RunHeader("0.1.0", (), {"gain": names[-1]})
    series = report.report_payload({"r": Run(header, records, [])}, "t")["series"]["r"]["gain"]
    assert series["steps"] == [1, 2]
    assert series["values"] == [[1, 2], [1.5, 2.5]]
    assert [row[0] for row in series["rows"]] == ["b.0", "b.1"]
    assert series["dropped"] == 1


def test_of_very_many_alerts_the_most_serious_are_shown(tmp_path: Path) -> None:
    count = 3000

    def raised(number: int, severity: str, state: str = "raised", step: int | None = None) -> Alert:
        at = number if step is None else step
        return Alert(f"k{number}", severity, f"w{number}", at, 1.0, 2.0, "m" * 900, "a", state)  # type: ignore[arg-type]

    told = [raised(number, "info") for number in range(count)]
    told[1000] = raised(1000, "error")
    told += [raised(2000, "info", "resolved", count + 1), raised(count + 2, "warning")]
    run = Run(RunHeader("0.1", (), {"gain": ("a",)}), [Record(0, 1.0, {"gain": np.ones(1)})], told)
    page = write_report(run, tmp_path / "r.html")
    assert page.stat().st_size < report.MOST_BYTES
    (data,) = embedded(page.read_text())["runs"]
    kinds = [alert["kind"] for alert in data["alerts"]]
    assert len(kinds) == Room().alerts
    assert kinds == [*(f"k{number}" for number in range(398)), "k1000", f"k{count + 2}"]
    assert data["verdict"]["severity"] == "error"
    assert data["verdict"]["text"] == f"k1000 at w1000 since step 1000 (+{count - 1} more)"
    assert f"400 of {count + 1} alerts are shown, the first and most important." in data["notices"]


@pytest.mark.parametrize("rows", [(700, 700), (3, 900, 900)])
def test_of_a_large_matrix_some_rows_are_shown(tmp_path: Path, rows: tuple[int, ...]) -> None:
    values = np.random.default_rng(0).random(rows)
    names = tuple(f"b.{row}" for row in range(rows[0]))
    records = [Record(step, 1.0, {"own": values + step}) for step in range(3)]
    page = write_report(Run(RunHeader("0.1", (), {"own": names}), records, []), tmp_path / "r.html")
    assert page.stat().st_size < report.MOST_BYTES
    (shown,) = embedded(page.read_text())["series"]["run"]["own"]["records"]
    assert shown["step"] == 2
    matrix, whole = (shown["matrix"], values + 2) if len(rows) == 2 else (shown["stack"][1], values[1] + 2)
    side = len(matrix)
    assert 2 < side < rows[-1]
    assert len(matrix[0]) == side
    # the first, the last and each value was measured
    np.testing.assert_allclose(
        [matrix[0][0], matrix[0][-1], matrix[-1][0], matrix[-1][-1]],
        [whole[0, 0], whole[0, -1], whole[-1, 0], whole[-1, -1]],
        rtol=1e-4,
    )
    assert shown["of"] == rows[0]
    if len(rows) == 2:
        assert (shown["labels"][0], shown["labels"][-1], len(shown["labels"])) == (names[0], names[-1], side)


def test_very_many_metrics_flows_and_long_words_find_room(tmp_path: Path) -> None:
    flows = tuple(FlowLayout(f"f{n}", "blocks", ("a", "b"), ("a",)) for n in range(5000))
    labels = {f"m{n}": (f"row {n} " + "x" * 500,) for n in range(4000)}
    header = RunHeader("0.1", flows, labels, {"long": "y" * 10**7}, {"python": "z" * 10**7})
    records = [Record(0, 1.0, {key: np.ones(1) for key in labels}, notes=("n" * 10**7,))]
    told = [Alert("k", "error", "w", 0, 1.0, 2.0, "m" * 10**7, "a" * 10**7)]
    page = write_report(Run(header, records, told), tmp_path / "r.html")
    assert page.stat().st_size < report.MOST_BYTES
    (data,) = embedded(page.read_text())["runs"]
    assert data["metrics"][0]["key"] == "m0"
    assert any(notice.endswith("metrics are shown, the first and most important.") for notice in data["notices"])


def test_the_nearest_record_of_any_step() -> None:
    made = series.make_series("gain", [(0, [1.0]), (2**62, [2.0]), (2**63 - 1, [3.0])], ["a"])
    assert series.record_payload(made, -(10**30), log=False)["values"] == [1.0]
    assert series.record_payload(made, 2**62 + 5, log=False)["values"] == [2.0]
    assert series.record_payload(made, 10**30, log=False)["values"] == [3.0]


def test_a_long_and_deep_run_stays_under_five_megabytes(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    depth, count = 1025, 300
    names = tuple(f"model.layers.{i}" for i in range(depth))
    metrics = (
        "gradient_product",
        "gain",
        "grad_norm",
        "act_rms",
        "cosine",
        "token_cosine",
        "update_ratio",
        "param_norm",
    )
    header = RunHeader("0.1", (), {**dict.fromkeys(metrics, names), "cosine_matrix": names[:128]})
    records = [Record(s, 1.0, {m: generator.random(depth) for m in metrics}) for s in range(count)]
    for r in records[::10]:
        r.metrics["cosine_matrix"] = generator.random((128, 128))
    path = write_report(Run(header, records, []), tmp_path / "r.html")
    assert 1e6 < path.stat().st_size < 5e6
    found = embedded(path.read_text())["series"]["run"]
    assert found["gain"]["records"] == count
    assert len(found["gain"]["steps"]) >= 100


# --- the script -----------------------------------------------------------------------------------------------------


def test_modules_can_be_joined() -> None:
    scripts = [name for name in assets.served() if name.endswith(".js")]
    joined = assets.joined("report.js")
    assert not re.search(r"^\s*(import|export) ", joined, re.MULTILINE)
    for name in set(scripts) - {"index.js"}:
        assert joined.count(f"// {name}\n") == 1
    declared = re.compile(r"^(?:export )?(?:async )?(?:function|class|const|let) ([\w$]+|[\[{][^=]*)", re.MULTILINE)
    names = Counter(
        part
        for name in set(scripts) - {"index.js"}
        for found in declared.findall(assets.read(name))
        for part in re.findall(r"\w+", found)
    )
    assert len(names) > 40
    assert [name for name, count in names.items() if count > 1] == []


def test_text_never_becomes_markup() -> None:
    for name in assets.served():
        text = assets.read(name)
        for sink in (
            "innerHTML",
            "outerHTML",
            "insertAdjacentHTML",
            "document.write",
            "eval(",
            "new Function",
            "srcdoc",
        ):
            assert sink not in text, f"{name} uses {sink}"


def test_the_scripts_are_small() -> None:
    sizes = {name: len(assets.read(name).encode()) for name in assets.served()}
    assert sum(sizes.values()) < 100_000
    assert all(assets.read(name).count("\n") < 400 for name in sizes)
