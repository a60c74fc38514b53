"""Records and scopes in a notebook: true numbers, well-formed, and nothing in them runs."""

from __future__ import annotations

import io
import subprocess
import sys
from html.parser import HTMLParser

import numpy as np
import pytest
from PIL import Image
from watch_models import Stack

import flowscope
from flowscope.notebook import ALERTS, FLOWS, HEIGHT, LEFT, TOP, WIDTH, profile_svg, record_html, scope_html
from flowscope.records import Alert, Alerts, FlowLayout, Record, Run, RunHeader

HOSTILE = "<img src=x onerror=alert(1)>\"'&"
VOID = {"meta", "br"}


class Page(HTMLParser):
    """Tags must nest; what is found is kept."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append((self.open[-1] if self.open else "", data))

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]

    def text(self, tag: str | None = None) -> str:
        return "".join(words for where, words in self.texts if tag in (None, where))


def alert(kind: str, step: int, state: str = "raised", severity: str = "error", **more: str) -> Alert:
    words = {"where": "blocks.3", "message": "the gradient is lost", "advice": "lower the learning rate", **more}
    return Alert(kind, severity, step=step, value=0.0, limit=1.0, state=state, **words)


def record(**metrics: object) -> Record:
    values = {"gradient_product": [1e-4, 1e-2, np.nan, 1.0], "cosine": [0.5, 0.75, 0.5], **metrics}
    labels = {"gradient_product": ("b.0:input", "b.0", "b.1", "b.2")}
    return Record(12, 2.34567, {k: np.asarray(v, float) for k, v in values.items()}, (), (), ("b", "dec"), labels)


def test_points_lie_where_the_values_say() -> None:
    page = Page(profile_svg(np.array([1e-4, 1e-2, np.nan, 1.0]), ["w", "x", "y", "z"], "gradient_product"))
    width, height, foot = WIDTH - LEFT - 8, 120 - TOP - 18, 120 - 18
    assert HEIGHT == 120
    # four decades from foot to head, and three equal steps to the right; NaN has no point
    want = [(LEFT, foot), (LEFT + width / 3, foot - height / 2), (LEFT + width, TOP)]
    got = [(float(c["cx"] or 0), float(c["cy"] or 0)) for c in page.all("circle")]
    np.testing.assert_allclose(got, want, atol=0.06)
    assert [w for tag, w in page.texts if tag == "title"] == ["gradient_product", "w: 0.0001", "x: 0.01", "z: 1"]
    assert [w for tag, w in page.texts if tag == "text"] == ["1e0", "1e-4", "w", "z"]
    # the line is broken at what was not seen
    assert [len((line["points"] or "").split()) for line in page.all("polyline")] == [2, 1]
    assert page.text("figcaption") + page.text("code") == "gradient_product: least 0.0001 at w"


def test_linear_metrics_zero_and_infinity() -> None:
    page = Page(profile_svg(np.array([-0.5, 0.5, 0.0]), [], "cosine@dec"))
    ys = [float(c["cy"] or 0) for c in page.all("circle")]
    np.testing.assert_allclose(ys, [120 - 18, TOP, (120 - 18 + TOP) / 2], atol=0.06)
    assert [w for tag, w in page.texts if tag == "text"] == ["0.5", "-0.5", "0", "2"]
    page = Page(profile_svg(np.array([0.0, 1e-3, 1.0, np.inf]), [], "gain"))
    ys = [float(c["cy"] or 0) for c in page.all("circle")]
    np.testing.assert_allclose(ys, [120 - 18, 120 - 18, TOP, TOP], atol=0.06)


@pytest.mark.parametrize("values", [[np.nan] * 3, [0.0] * 3, [np.inf] * 3, [2.5], [1.0, 1.0]])
@pytest.mark.parametrize("key", ["gradient_product", "cosine"])
def test_strange_profiles(values: list[float], key: str) -> None:
    text = profile_svg(np.array(values), ["a"] * len(values), key)
    page = Page(text)
    assert len(page.all("circle")) == (0 if np.isnan(values[0]) else len(values))
    assert "nan" not in text.replace("not seen", "")


def test_deep_profiles_are_thinned_and_keep_the_least() -> None:
    values = np.ones(1025)
    values[611] = 1e-9
    text = profile_svg(values, [f"b.{i}" for i in range(1025)], "gradient_product")
    titles = [w for tag, w in Page(text).texts if tag == "title"]
    assert {"b.0: 1", "b.1024: 1", "b.611: 1e-09"} <= set(titles)
    assert len(titles) <= 258
    assert len(text) < 40_000


def test_a_record() -> None:
    page = Page(record_html(record(**{"gradient_product@dec": [1.0, 0.5]})))
    text = page.text()
    assert "step 12, loss 2.346" in text
    assert len(page.all("svg")) == 2
    assert "dec: gradient_product@dec: least 0.5 at 1" in text
    rows = [line.split("|") for line in "|".join(w for tag, w in page.texts if tag in ("td", "th")).split("metric|")]
    assert "|".join(rows[1]).endswith(
        "gradient_product|4|0.0001|1|1|cosine|3|0.5|0.75|0|gradient_product@dec|2|0.5|1|0"
    )


def test_a_record_of_nothing() -> None:
    text = Page(record_html(Record(3, None, {}, ("skipped",), ("no gradient came",)))).text()
    assert text == "flowscope record of step 3 skippedno gradient product in this recordno gradient came"


def test_a_scope() -> None:
    header = RunHeader("1.2.3", (FlowLayout("b", "blocks", ("a",), ()),), {})
    alerts = [
        alert("dead_units", 1, severity="warning"),
        alert("vanishing_gradient", 4),
        alert("dead_units", 8, "resolved", severity="warning"),
    ]
    page = Page(scope_html(header, [record(), record()], alerts))
    text = page.text()
    assert "flowscope 1.2.3: 2 records, last of step 12, loss 2.346" in text
    assert "error since step 4: vanishing_gradient at blocks.3: the gradient is lost" in text
    assert "lower the learning rate" in text
    assert len(page.all("li")) == 1
    assert "1 resolved" in text
    assert "no alert stands" in Page(scope_html(header, [record()], [])).text()
    assert "no alert stands, 1 resolved" in Page(scope_html(header, [record()], [alerts[0], alerts[2]])).text()
    assert "no record yet" in Page(scope_html(None, [], [])).text()


def test_many_alerts_and_flows_stay_small() -> None:
    names = tuple(f"f{i}" for i in range(9))
    metrics = {f"gradient_product@{name}": np.ones(3) for name in names[1:]}
    many = Record(1, None, {"gradient_product": np.ones(3), **metrics}, flow_names=names)
    page = Page(scope_html(None, [many], [alert(f"kind{i}", i) for i in range(25)]))
    assert len(page.all("svg")) == FLOWS
    assert "and 5 more flows" in page.text()
    assert len(page.all("li")) == ALERTS
    assert "kind24" in page.text()
    assert "15 earlier ones stand too" in page.text()


def test_nothing_from_a_run_becomes_markup() -> None:
    hostile = Record(
        1,
        1.0,
        {"gradient_product": np.array([1.0, 0.1]), f"x{HOSTILE}": np.ones(2)},
        (HOSTILE,),
        (HOSTILE,),
        (HOSTILE,),
        {"gradient_product": (HOSTILE, HOSTILE)},
    )
    words = dict.fromkeys(("where", "message", "advice"), HOSTILE)
    header = RunHeader(HOSTILE, (FlowLayout(HOSTILE, HOSTILE, (HOSTILE,), ()),), {})
    for text in (record_html(hostile), scope_html(header, [hostile], [alert(HOSTILE, 1, severity=HOSTILE, **words)])):
        page = Page(text)
        allowed = (
            "div b svg title path text circle polyline figure figcaption code i details summary table tr th td ul li"
        )
        assert {tag for tag, _ in page.tags} <= set(allowed.split())
        assert not any(name.startswith("on") or name in ("src", "href") for _, found in page.tags for name in found)
        assert page.text().count("<img src=x onerror=alert(1)>") >= 4
        assert "http" not in text


# -- what a prompt and a cell show ------------------------------------------------------------------------------------


def long_run() -> Run:
    records = [record(cosine_matrix=np.random.default_rng(0).random((40, 40))) for _ in range(30)]
    return Run(RunHeader("1"), records, Alerts([alert("spike", 3), alert("spike", 9, "resolved"), alert("gone", 5)]))


def test_what_a_prompt_shows_is_short() -> None:
    run = long_run()
    for shown in (run, run.records[0], run.header):
        assert len(repr(shown)) < 120
        assert "array" not in repr(shown)
    assert repr(run) == "<Run: 30 records, steps 12 to 12, 3 alerts>"
    assert repr(run.records[0]) == "<Record of step 12, loss 2.346: 3 metrics>"
    assert repr(run.alerts).count("\n") == 2
    assert repr(Alerts()) == "[]"
    assert run.alerts == [*run.alerts]


def test_alerts_are_a_table_with_a_line_an_incident() -> None:
    page = Page(Alerts([alert(HOSTILE, 3), alert(HOSTILE, 9, "resolved"), alert("gone", 5)])._repr_html_())
    cells = [words for tag, words in page.texts if tag == "td"]
    assert cells[:5] == ["error", HOSTILE, "blocks.3", "3", "9"]
    assert cells[7:12] == ["error", "gone", "blocks.3", "5", "stands"]
    assert not page.all("img")
    assert "no alert" in Page(Alerts()._repr_html_()).text()


def test_plans_are_tables_in_a_notebook_and_text_at_a_prompt() -> None:
    model = Stack(3)
    for plan, heads in (
        (flowscope.find_flows(model), ["flow", "kind", "modules", "first", "last"]),
        (flowscope.find_sites(model), ["block", "site", "shape", "kind", "norm", "add in"]),
    ):
        page = Page(plan._repr_html_())
        assert [words for tag, words in page.texts if tag == "th"] == heads
        assert len(page.all("tr")) == len(plan) + 1
        assert repr(plan) == str(plan)
        assert all(head in repr(plan) for head in heads)


def test_a_run_shows_its_last_profile_and_how_to_get_numbers() -> None:
    page = Page(long_run()._repr_html_())
    assert len(page.all("svg")) == 1
    assert "run.to_pandas" in page.text()


def test_a_figure_is_a_picture_where_pyplot_was_never_imported() -> None:
    code = (
        "import sys; from flowscope import plot, Record; import numpy as np\n"
        "figure = plot.depth_profile(Record(0, 1.0, {'gradient_product': np.array([0.1, 1.0])}))\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
        "import pickle; pickle.loads(pickle.dumps(figure))\n"
        "sys.stdout.buffer.write(figure._repr_png_())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert done.stdout[:8] == b"\x89PNG\r\n\x1a\n"
    image = Image.open(io.BytesIO(done.stdout))
    assert image.width > 400
    assert len(np.unique(np.asarray(image.convert("L")))) > 10  # something is drawn
