"""`check_detector`: what every detector promises, tried on records of every awkward form."""

from __future__ import annotations

import contextlib
import json
import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from types import CodeType
from typing import Any, get_args

import numpy as np

from flowscope.config import WatchConfig
from flowscope.detectors.detector import Detector, Finding, Level
from flowscope.metrics import Metric, told_by_0_1
from flowscope.records import FlowLayout, Record, RunHeader, Severity

LONGEST = 800
"""Characters of a message or an advice: more is no line in a console."""
SECONDS = 0.05
"""For one record of 1,000 rows; the built-in ones need less than a millisecond."""
GROWTH = 1.5
"""What the state may grow by when the run is three times as long."""

Series = list[tuple[Record, RunHeader]]


def check_detector(detector: type[Detector], config: WatchConfig | None = None) -> None:
    """Raise unless a detector class keeps every promise of `flowscope.detectors.Detector`.

    It is fed records that are empty, lack one metric each, hold only NaN, one row, infinities, a growing number of
    rows, or come from steps that were skipped or not sampled, with values that lie on both sides of any limit.

    Args:
        detector: a subclass of `Detector` (or `Limit`); its `__init__` takes a `WatchConfig`.
        config: the limits it is built with.

    Raises:
        AssertionError: says which promise is broken, and by which records.
    """
    config = config or WatchConfig()
    make = partial(detector, config)
    _check_class(make(), detector)
    for name, series in _records(_asked(make)):
        told = f"{detector.__name__} on records that {name}"
        findings = _play(make(), series, told)
        assert _play(make(), series, told) == findings, f"{told}: two fresh instances found different things"
        assert _interrupted(make, series, told) == findings, (
            f"{told}: after state_dict, JSON and load_state_dict it went on differently; what it learns belongs into "
            "self.state"
        )
    _check_bounds(make, detector.__name__)


def _check_class(made: Detector, detector: type[Detector]) -> None:
    name = detector.__name__
    kind = getattr(made, "kind", None)
    assert isinstance(kind, str), f"{name}.kind: got {kind!r}, expected a word"
    assert isinstance(made.level, Level), f"{name}.level: got {made.level!r}, expected one of {[*Level.__members__]}"
    for words in ("yields_to", "yields_to_errors", "explains", "shown_by"):
        given = getattr(made, words)
        fine = isinstance(given, frozenset | tuple) and all(isinstance(word, str) for word in given)
        assert fine, f"{name}.{words}: got {given!r}, expected a frozenset (shown_by: a tuple) of words"
    for function in vars(detector).values():
        code, known = getattr(function, "__code__", None), getattr(function, "__globals__", {})
        used = {name for name in _names(code) if _is_torch(name, known)} if code is not None else set()
        assert not used, f"{name}.{function.__name__} uses torch ({', '.join(used)}): detectors see plain numbers only"


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _is_torch(name: str, known: Mapping[str, Any]) -> bool:
    value = known.get(name)
    home = getattr(value, "__module__", None) or getattr(value, "__name__", "")
    return name == "torch" or str(home).partition(".")[0] == "torch"


# -- playing records ---------------------------------------------------------------------------------------------------


def _play(detector: Detector, series: Series, told: str) -> list[list[str]]:
    """What it finds in each record, as text: NaN equals NaN."""
    return [_found(detector, record, header, told) for record, header in series]


def _found(detector: Detector, record: Record, header: RunHeader, told: str) -> list[str]:
    before = _plain(record)
    try:
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            found = list(detector.findings(record, header))
    except Exception as error:
        raise AssertionError(f"{told}: step {record.step} raised {type(error).__name__}: {error}") from error
    assert _plain(record) == before, f"{told}: step {record.step}: the record was changed"
    for finding in found:
        _check_finding(finding, detector, f"{told}: step {record.step}")
    return [repr(finding) for finding in found]


def _plain(record: Record) -> tuple[Any, ...]:
    metrics = {key: (values.shape, values.tobytes()) for key, values in record.metrics.items()}
    return record.step, record.loss, metrics, record.flags, record.notes, dict(record.metric_labels)


def _check_finding(finding: Finding, detector: Detector, told: str) -> None:
    assert isinstance(finding, Finding), f"{told}: got {finding!r:.80}, expected a Finding"
    assert finding.kind == detector.kind, f"{told}: got kind {finding.kind!r}, expected {detector.kind!r}"
    severities = get_args(Severity)
    assert finding.severity in severities, f"{told}: got severity {finding.severity!r}, expected one of {severities}"
    for name in ("where", "message", "advice", "cause"):
        got = getattr(finding, name)
        assert isinstance(got, str), f"{told}: got {name} {got!r:.80}, expected a string"
        assert len(got) <= LONGEST, f"{told}: got {name} of {len(got)} characters, expected at most {LONGEST}"
    assert finding.flow is None or isinstance(finding.flow, str), f"{told}: got flow {finding.flow!r}"
    assert finding.level in ("beyond", "near", "unseen"), f"{told}: got level {finding.level!r}"
    for name in ("value", "limit"):
        got = getattr(finding, name)
        assert isinstance(got, float | int), f"{told}: got {name} {got!r:.80}, expected a number"
    assert finding.level != "beyond" or finding.message, f"{told}: a finding beyond its limit has no message"


def _interrupted(make: Callable[[], Detector], series: Series, told: str) -> list[list[str]]:
    detector, out = make(), []
    for number, (record, header) in enumerate(series):
        if number in (len(series) // 3, 2 * len(series) // 3):
            state, detector = _saved(detector, told), make()
            detector.load_state_dict(json.loads(state))
        out.append(_found(detector, record, header, told))
    return out


def _saved(detector: Detector, told: str) -> str:
    try:
        return json.dumps(detector.state_dict(), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise AssertionError(f"{told}: its state is not JSON-ready ({error}); self.state holds numbers, words, arrays, "
                             "deques of numbers, and dicts of those") from None  # fmt: skip


def _check_bounds(make: Callable[[], Detector], name: str) -> None:
    detector, sizes, seconds = make(), [], []
    header, asked = _header(999), _asked(make)
    rng = np.random.default_rng(1)
    for step in range(24):
        record = _record(step, header, asked, rng, wild=step % 2 == 1)
        start = time.perf_counter()
        _found(detector, record, header, name)
        seconds.append(time.perf_counter() - start)
    least = min(seconds[1:])
    assert least <= SECONDS, f"{name}: {least:.2g} s a record of 1,000 rows, expected at most {SECONDS} s"
    detector, header = make(), _header(3)
    for step in range(900):
        _found(detector, _record(step, header, asked, rng, wild=step % 9 == 1), header, name)
        sizes.append(len(_saved(detector, name)) if step in (299, 899) else 0)
    first, last = sizes[299], sizes[899]
    assert last <= GROWTH * first + 100, f"{name}: its state grew from {first} to {last} bytes in 600 records"


# -- records -----------------------------------------------------------------------------------------------------------


class _Spy(dict[str, Any]):
    """Metrics that note which of them are asked for."""

    def __init__(self, asked: set[str], known: Mapping[str, Any]) -> None:
        super().__init__(known)
        self._asked = asked

    def get(self, key: str, default: Any = None) -> Any:
        self._asked.add(key)
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        self._asked.add(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self._asked.add(str(key))
        return super().__contains__(key)


def _asked(make: Callable[[], Detector]) -> set[str]:
    """The metrics it reads, found by asking it until it asks for nothing new."""
    asked: set[str] = set()
    header, rng = _header(4), np.random.default_rng(0)
    for step in range(8):
        record, detector = _record(step, header, asked, rng), make()
        record.metrics = _Spy(asked, record.metrics)
        with contextlib.suppress(Exception), warnings.catch_warnings():  # it is told by the records that follow
            warnings.simplefilter("ignore")
            list(detector.findings(record, header))
    return {key.partition("@")[0] for key in asked}


Change = Callable[[Record, int], None]


def _records(asked: set[str]) -> Iterator[tuple[str, Series]]:
    """Each awkward form of records, with its name."""
    changes: dict[str, Change] = {
        "are as usual": lambda record, step: None,
        "hold nothing": _clear,
        "hold only NaN": partial(_fill, math.nan),
        "hold only infinities": partial(_fill, math.inf),
        "hold only zeros": partial(_fill, 0.0),
        "hold some NaN and infinities": _spoil,
        "were skipped or not sampled": _flag,
    }
    changes |= {f"lack {name} now and then": partial(_lack, name) for name in sorted(asked)}
    for name, change in changes.items():
        yield name, _series(asked, lambda step: 4, change)
    yield "have one row", _series(asked, lambda step: 1)
    yield "have ever more rows", _series(asked, lambda step: 1 + step // 4)


def _series(asked: set[str], rows: Callable[[int], int], change: Change = lambda record, step: None) -> Series:
    """Records that are calm and wild in turn."""
    rng, out = np.random.default_rng(2), []
    for step in range(36):
        header = _header(rows(step))
        record = _record(step, header, asked, rng, wild=(step // 6) % 2 == 1)
        change(record, step)
        out.append((record, header))
    return out


def _clear(record: Record, step: int) -> None:
    record.metrics, record.loss = {}, None


def _fill(value: float, record: Record, step: int) -> None:
    record.metrics = {key: np.full(values.shape, value) for key, values in record.metrics.items()}


def _spoil(record: Record, step: int) -> None:
    for number, values in enumerate(record.metrics.values()):
        values.reshape(-1)[(step + number) % values.size] = (math.nan, math.inf, -math.inf, 0.0)[step % 4]


def _flag(record: Record, step: int) -> None:
    record.flags = ((), ("skipped",), ("unsampled",), ("possibly_skipped",))[step % 4]
    if "unsampled" in record.flags:
        record.metrics = {key: values for key, values in record.metrics.items() if key == "canary"}


def _lack(name: str, record: Record, step: int) -> None:
    if step % 5 < 3:
        record.metrics = {key: values for key, values in record.metrics.items() if key.partition("@")[0] != name}


def _header(rows: int) -> RunHeader:
    """Two flows of so many blocks; every metric labelled by their modules."""
    blocks = {name: tuple(f"{name}.{row}" for row in range(rows)) for name in ("encoder", "decoder")}
    flows = tuple(FlowLayout(name, "blocks", (f"{name}.embed", *paths), paths) for name, paths in blocks.items())
    labels = {name: tuple(f"{path}.weight" for path in blocks["encoder"]) for name in ("param_norm", "weight_spread")}
    return RunHeader("0", flows, labels)


@cache
def _specs() -> dict[str, Metric]:
    return {data["name"]: Metric.from_json(data) for data in told_by_0_1()["metrics"]}


def _record(step: int, header: RunHeader, asked: set[str], rng: np.random.Generator, *, wild: bool = False) -> Record:
    """Values around 1 (shares: in [0, 1]), or over many orders of magnitude."""
    specs, metrics = _specs(), {}
    for name in sorted(asked):
        spec = specs.get(name, Metric(name, ""))
        for flow in header.flows if spec.rows in ("points", "blocks", "sites") else header.flows[:1]:
            rows = {"points": len(flow.points), "model": 1}.get(spec.rows, len(flow.blocks))
            shape = (rows, rows) if spec.shape == "matrix" else (rows, 3, 3) if spec.shape == "stack" else (rows,)
            values = 10 ** rng.uniform(-9 if wild else -0.3, 9 if wild else 0.3, shape)
            if spec.bounds is not None:
                values = np.clip(1 - values if rng.random() < 0.5 else values, *spec.bounds)
            metrics[name if flow is header.flows[0] else f"{name}@{flow.name}"] = values
    metrics["canary"] = np.zeros(4)
    labels = {key: tuple(f"encoder.{row}" for row in range(len(values))) for key, values in metrics.items()}
    loss = float(rng.uniform(1, 2))
    return Record(step, loss, metrics, (), (), tuple(flow.name for flow in header.flows), {**labels, **header.labels})
