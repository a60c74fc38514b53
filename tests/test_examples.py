"""The examples run, and the demo's three runs look as the demo says."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


@pytest.fixture(autouse=True)
def examples_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))


def test_text_and_batches_are_reproducible() -> None:
    from byte_lm import batches, load_text

    text = load_text(50_000)
    assert bytes(text[:2000].tolist()) in b"\n".join(
        p.read_bytes() for p in sorted(Path(sys.modules["os"].__file__).parent.glob("*.py"))
    )
    (tokens, targets), again = next(batches(text, batch=3, length=5)), next(batches(text, batch=3, length=5))
    assert tokens.shape == targets.shape == (3, 5)
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    assert torch.equal(tokens, again[0])
    assert not torch.equal(tokens, next(batches(text, batch=3, length=5, seed=1))[0])


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_the_model_is_causal(norm: str) -> None:
    from byte_lm import ByteLM

    torch.manual_seed(0)
    model = ByteLM(norm=norm, depth=2)
    tokens = torch.randint(256, (3, 7))
    changed = tokens.clone()
    changed[:, 4] = (changed[:, 4] + 1) % 256
    a, b = model(tokens), model(changed)
    torch.testing.assert_close(a[:, :4], b[:, :4])
    assert (a[:, 4:] - b[:, 4:]).abs().amax(dim=-1).min() > 1e-4


def gradient_product(model: torch.nn.Module, tokens: torch.Tensor, targets: torch.Tensor) -> float:
    """Norm of dL/dx_0 over norm of dL/dx_L, by autograd on the points of an explicit forward."""
    x = model.embed(tokens) + model.position[: tokens.shape[1]]
    points = [x]
    for block in model.blocks:
        x = block(x)
        points.append(x)
    loss = F.cross_entropy(model.head(model.final(x)).flatten(0, 1), targets.flatten())
    first, last = torch.autograd.grad(loss, [points[0], points[-1]])
    return (first.norm() / last.norm()).item()


def test_post_ln_loses_its_gradient_and_pre_ln_does_not() -> None:
    from byte_lm import ByteLM, batches, load_text, train_step

    text, products = load_text(), {}
    for norm in ("post", "pre"):
        torch.manual_seed(0)
        model, data = ByteLM(norm=norm), batches(text)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for _ in range(20):
            train_step(model, optimizer, next(data))
        products[norm] = gradient_product(model, *next(data))
    assert products["post"] < 1e-2
    assert products["pre"] > 1


def test_demo_alerts_on_post_ln_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import demo

    scopes = {name: demo.train(name, build, steps=24, log_dir=tmp_path) for name, build in demo.RUNS.items()}
    raised = {name: [(a.kind, a.step) for a in s.alerts if a.state == "raised"] for name, s in scopes.items()}
    assert any(kind in ("vanishing_gradient", "token_collapse") and step <= 20 for kind, step in raised["post_ln"])
    assert raised["pre_ln"] == raised["post_ln_keel"] == []
    demo.report(scopes)
    out = capsys.readouterr().out
    assert "gradient_product" in out
    assert "post_ln" in out
    assert {"post_ln", "pre_ln", "post_ln_keel"} <= {p.name for p in tmp_path.iterdir()}


def test_plain_loop(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import plain_loop

    scope = plain_loop.main(steps=3, log_dir=str(tmp_path))
    assert [r.step for r in scope.records] == [0, 1, 2]
    assert capsys.readouterr().out.strip().endswith(scope.summary().strip())
    source = (EXAMPLES / "plain_loop.py").read_text()
    assert len(source.split("def main")[1].split("return scope")[0].splitlines()) < 30


@pytest.mark.parametrize("mode", ["dhc", "keel"])
def test_wrapped_transformers_model_beside_its_original(mode: str, capsys: pytest.CaptureFixture[str]) -> None:
    import wrap_transformers

    scopes = wrap_transformers.main(mode, steps=3)
    original, wrapped = (scope.records for scope in scopes.values())
    assert len(original) == len(wrapped) == 3
    assert "mix_gain_backward" in wrapped[0].metrics or "gate_mean" in wrapped[0].metrics
    if mode == "dhc":
        assert wrapped[0].loss == pytest.approx(original[0].loss, rel=1e-5)
    assert f"16 merge sites, wrapped with mode='{mode}'" in capsys.readouterr().out


def test_lightning_loop_stops_itself(tmp_path: Path) -> None:
    import lightning_loop

    trainer = lightning_loop.main(steps=60, log_dir=str(tmp_path))
    assert trainer.should_stop
    assert trainer.global_step < 60


@pytest.mark.parametrize("mode", [None, "keel"])
def test_trainer_loop(mode: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import trainer_loop

    watcher = trainer_loop.main(mode, steps=3, log_dir=str(tmp_path))
    assert [r.step for r in watcher.scope.records] == [0, 1, 2]
    assert ("gate_mean" in watcher.scope.records[0].metrics) == (mode == "keel")
    assert (tmp_path / "flowscope.jsonl").exists()
    assert capsys.readouterr().out.strip().endswith(watcher.scope.summary().strip())
