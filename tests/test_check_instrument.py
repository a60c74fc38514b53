"""`check_instrument` passes what keeps its promises, and refuses each kind of breakage for its own reason."""

from __future__ import annotations

import re

import pytest
from own_instruments import BROKEN, Hooked, ThirdMoment

from flowscope.errors import FlowscopeError
from flowscope.instruments import Instrument
from flowscope.testing import check_instrument


@pytest.mark.parametrize("kind", [ThirdMoment, ThirdMoment(), Hooked], ids=["class", "instance", "own hook"])
def test_it_passes_what_keeps_its_promises(kind: type[Instrument] | Instrument) -> None:
    check_instrument(kind)


@pytest.mark.parametrize(("kind", "check"), BROKEN, ids=[kind.__name__ for kind, _ in BROKEN])
def test_it_refuses_each_kind_of_breakage(kind: type[Instrument], check: str) -> None:
    with pytest.raises(AssertionError, match=rf"check_instrument\({kind.__name__}\), {check}: (.|\n)*Promised: "):
        check_instrument(kind)


def test_it_takes_instruments_only() -> None:
    with pytest.raises(FlowscopeError, match=re.escape("expected a subclass of Instrument")):
        check_instrument(dict)  # type: ignore[arg-type]
