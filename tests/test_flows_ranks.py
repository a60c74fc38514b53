"""Routers and solvers on two ranks: both records hold what one process sees on the whole batch."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from flows_ranks_program import batches, models, train
from two_ranks import RANKS, without_launcher


def test_loads_add_up_and_solvers_are_averaged(tmp_path: Path) -> None:
    ended = without_launcher("flows_ranks_program.py", str(tmp_path), limit=170)
    assert [code for code, _ in ended] == [0, 0], ended
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in RANKS]
    assert json.dumps(ranks[0]) == json.dumps(ranks[1])
    whole = {name: train(model, batches(name)) for name, model in models().items()}
    for step in (0, 1):
        together, alone = ranks[0]["mixture"][step], whole["mixture"][step]
        assert (
            set(together)
            == set(alone)
            == {
                "route_entropy",
                "route_max_violation",
                "route_dead",
                "route_load",
                "route_worst",
            }
        )
        for name, values in alone.items():
            np.testing.assert_allclose(together[name], values, rtol=1e-5, err_msg=name)
    # the first step's weights are the same everywhere: each rank's residual is that of its own half
    whole_batches = batches("implicit")
    halves = [train(models()["implicit"], [x[at : at + 3] for x in whole_batches])[0] for at in (0, 3)]
    first = ranks[0]["implicit"][0]
    assert first["solver_nfe"] == [10.0]
    for name in ("solver_residual", "jacobian_radius"):
        np.testing.assert_allclose(first[name], np.mean([half[name] for half in halves], axis=0), rtol=1e-5)
