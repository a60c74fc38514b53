"""What docs/migration.md says about numbers elsewhere, in one run beside each other."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
from lightning.pytorch.utilities import grad_norm
from test_lightning import Lit, data, make_trainer

from flowscope.integrations.lightning import FlowscopeCallback


class Logging(Lit):
    """Logs what Lightning's documentation says to log."""

    def __init__(self) -> None:
        super().__init__()
        self.norms: list[dict[str, float]] = []

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.norms.append({name: float(value) for name, value in grad_norm(self, norm_type=2).items()})


def test_lightnings_grad_norm_is_param_grad_norm_raw() -> None:
    pl.seed_everything(0, verbose=False)
    watcher, module = FlowscopeCallback(every=1), Logging()
    make_trainer(watcher, gradient_clip_val=0.05).fit(module, data())
    assert watcher.scope is not None
    assert len(module.norms) == len(watcher.scope.records) == 4
    for theirs, record in zip(module.norms, watcher.scope.records, strict=True):
        raw = dict(zip(record.labels("param_grad_norm_raw"), record["param_grad_norm_raw"], strict=True))
        assert {f"grad_2.0_norm/{name}" for name in raw} | {"grad_2.0_norm_total"} == theirs.keys()
        for name, norm in raw.items():
            assert norm == pytest.approx(theirs[f"grad_2.0_norm/{name}"], rel=1e-4, abs=1e-4)  # theirs: four digits
        total = np.sqrt(np.square(record["param_grad_norm_raw"]).sum())
        assert total == pytest.approx(theirs["grad_2.0_norm_total"], rel=1e-3)
        assert total * record["clip_ratio"].item() == pytest.approx(0.05, rel=1e-3)
