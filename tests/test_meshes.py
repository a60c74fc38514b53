"""Ranks on meshes of three axes, with parts of a sequence, with some of the experts each: one process' numbers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from forked_ranks import told
from meshes_program import CHOSEN, EXPERTS, SCENARIOS, attention, experts, sequences
from ranks_models import batches, build
from test_ranks import TOLERANCE, Result, against_autograd, same_on_both, truth, whole
from two_ranks import program


def test_the_numbers_are_those_of_one_process(tmp_path: Path) -> None:
    program("meshes_program.py", str(tmp_path), limit=300, PYTHONWARNINGS="ignore")
    results = {name: told(name, count, tmp_path) for name, (count, _) in SCENARIOS.items()}
    for name, ranks in results.items():
        for other in ranks[4:] if name == "three_axes_of_a_stage" else ranks[1:]:
            same_on_both((ranks[4 if name == "three_axes_of_a_stage" else 0], other))
    four = [[((x[:4], y[:4]), {})] for x, y in batches(2)]
    against_autograd(results["three_axes"][7], build(2), four)
    for rank, depth in ((1, 1), (6, 2)):
        against_autograd(results["three_axes_of_a_stage"][rank], build(depth), whole(2))
    against_autograd(results["context_parallel"][1], attention(), [[(batch, {})] for batch in sequences()])
    for names in ("own", "all"):
        routed(results[f"experts_by_{names}_numbers"], names)


def routed(ranks: list[Result], names: str) -> None:
    """One profile of the routers over all experts, from their logits on the whole batch; the first rank's experts."""
    model = experts("all")
    held = dict(model.named_parameters())
    for step, batch in enumerate(sequences()):
        expected = truth(model, [(batch, {})])
        for rank in ranks:
            record = rank["records"][step]
            metrics, labels = record["metrics"], record["labels"]
            assert record["flags"] == []
            np.testing.assert_allclose(metrics["grad_norm"], expected["grad_norm"], rtol=TOLERANCE)
            assert labels["route_load"] == [f"blocks.{at}.gate" for at in range(2)]
            for at, block in enumerate(model.blocks):
                logits = block.logits[-1].double().reshape(-1, EXPERTS)
                load = np.bincount(logits.topk(CHOSEN).indices.reshape(-1).numpy(), minlength=EXPERTS)
                entropy = torch.distributions.Categorical(logits=logits).entropy().mean() / np.log(EXPERTS)
                found = {name: metrics[name][at] for name in metrics if name.startswith("route_")}
                assert found["route_load"] == load.mean()
                assert found["route_max_violation"] == pytest.approx(load.max() / load.mean() - 1, rel=1e-6)
                assert found["route_dead"] == (load == 0).mean()
                assert found["route_entropy"] == pytest.approx(float(entropy), rel=1e-5)
            for at, name in enumerate(labels["param_grad_norm"]):
                if ".experts." not in name or rank is ranks[0]:
                    norm = expected["parameters"][name]
                    assert metrics["param_grad_norm"][at] == pytest.approx(norm, rel=TOLERANCE), name
                gap = metrics["rank_gap"][at]
                assert np.isnan(gap) if ".experts." in name else gap == 0.0, name
        with torch.no_grad():
            for name, gradient in expected["gradients"].items():
                held[name] -= 0.1 * gradient
    assert [rank["alerts"] for rank in ranks] == [[], []]
