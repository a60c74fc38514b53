"""`FlowscopeCallback` in real runs of transformers' Trainer: steps, losses, clipping, NaN, stopping, resuming."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import flowscope
from flowscope.integrations.huggingface import FlowscopeCallback

VOCAB, WIDTH, DEPTH, BATCH, LENGTH = 13, 8, 3, 3, 5


@pytest.fixture(autouse=True)
def strict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLOWSCOPE_STRICT", "1")


def make_model() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCAB,
            n_positions=2 * LENGTH,
            n_embd=WIDTH,
            n_layer=DEPTH,
            n_head=2,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=0,
            eos_token_id=0,
        )
    )
    model.loss_type = "ForCausalLM"  # the Trainer then counts the predicted tokens, as for newer classes
    return model


def data(rows: int = 8 * BATCH, seed: int = 3) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCAB, (rows, LENGTH), generator=generator)
    return [{"input_ids": row, "labels": row} for row in tokens]


def make_trainer(folder: Path, *callbacks: Any, model: Any = None, rows: Any = None, **options: Any) -> Trainer:
    settings: dict[str, Any] = {
        "output_dir": str(folder),
        "per_device_train_batch_size": BATCH,
        "max_steps": 4,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "use_cpu": True,
        "report_to": [],
        "logging_steps": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    trainer_options = {name: options.pop(name) for name in ("eval_dataset", "model_init") if name in options}
    if "model_init" not in trainer_options:
        trainer_options["model"] = make_model() if model is None else model
    return options.pop("kind", Trainer)(
        args=TrainingArguments(**{**settings, **options}),
        train_dataset=data() if rows is None else rows,
        callbacks=list(callbacks),
        **trainer_options,
    )


def scope_of(callback: FlowscopeCallback) -> flowscope.Scope:
    assert callback.scope is not None
    return callback.scope


def logged_losses(trainer: Trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def record_batches(model: GPT2LMHeadModel) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    """What the Trainer feeds, and the parameters before each forward in training."""
    seen: list[Tensor] = []
    states: list[dict[str, Tensor]] = []

    def keep(module: GPT2LMHeadModel, args: Any, kwargs: dict[str, Any]) -> None:
        if module.training:
            seen.append(kwargs["input_ids"].clone())
            states.append(copy.deepcopy(module.state_dict()))

    model.register_forward_pre_hook(keep, with_kwargs=True)
    return seen, states


def gradients(state: dict[str, Tensor], *micro_batches: Tensor) -> tuple[list[float], dict[str, float], float]:
    """Norms of dL/dx_l and dL/dp, and the loss, of the mean over all tokens of the micro-batches; by torch.autograd."""
    model = make_model().train()
    model.load_state_dict(state)
    count = sum(batch[:, 1:].numel() for batch in micro_batches)
    squares, total = np.zeros(DEPTH + 1), 0.0
    for batch in micro_batches:
        x = model.transformer.wte(batch) + model.transformer.wpe(torch.arange(LENGTH))
        points = [x]
        for block in model.transformer.h:
            out = block(points[-1])
            points.append(out[0] if isinstance(out, tuple) else out)
        logits = model.lm_head(model.transformer.ln_f(points[-1]))
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten(), reduction="sum")
        loss = loss / count
        squares += [g.double().square().sum().item() for g in torch.autograd.grad(loss, points, retain_graph=True)]
        loss.backward()
        total += loss.item()
    norms = {name: p.grad.double().norm().item() for name, p in model.named_parameters()}
    return list(np.sqrt(squares)), norms, total


def test_the_first_inputs_are_tried_and_the_training_is_unchanged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    callback = FlowscopeCallback(check=True)
    bare, tried = make_trainer(tmp_path / "bare"), make_trainer(tmp_path / "tried", callback)
    bare.train()
    tried.train()
    assert logged_losses(bare) == logged_losses(tried)
    for (name, a), b in zip(bare.model.named_parameters(), tried.model.parameters(), strict=True):
        assert torch.equal(a, b), name
    report = callback.check_report
    assert report is not None
    statuses = {finding.trial: finding.status for finding in report.findings}
    assert {statuses[name] for name in ("causality", "samples", "gradient", "data", "saving")} == {"pass"}
    assert capsys.readouterr().out.count(str(report)) == 1


def padded_rows(rows: int = 8 * BATCH) -> list[dict[str, Tensor]]:
    """Texts of 2 to LENGTH tokens, labels of the rest ignored: micro-batches have unequal counts of targets."""
    lengths = [2 + (n * 7) % (LENGTH - 1) for n in range(rows)]
    return [
        {"input_ids": row["input_ids"], "labels": row["labels"].masked_fill(torch.arange(LENGTH) >= length, -100)}
        for row, length in zip(data(rows), lengths, strict=True)
    ]


class MeanOfEach(Trainer):
    """Ignores how many targets a step has: transformers 37766."""

    def compute_loss(self, model: Any, inputs: Any, *given: Any, **named: Any) -> Any:
        return super().compute_loss(model, inputs)


class Averaged(MeanOfEach):
    """Gives each micro-batch the same weight, however many targets it has."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        return super().training_step(model, inputs, None)


class NeverZeroed(Trainer):
    """What a step leaves in the gradients stays there."""

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        self.model.zero_grad = lambda *given, **named: None
        return super().create_optimizer(*args, **kwargs)


class FromOutputs(Trainer):
    """Computes its loss from the logits."""

    def compute_loss(self, model: Any, inputs: Any, *given: Any, **named: Any) -> Any:
        logits = model(**inputs).logits
        return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), inputs["input_ids"][:, 1:].flatten())


class WithPenalty(Trainer):
    """Adds a term to the model's loss."""

    def compute_loss(self, model: Any, inputs: Any, *given: Any, **named: Any) -> Any:
        loss = super().compute_loss(model, inputs, *given, **named)
        return loss + 0.1 * sum(p.square().sum() for p in model.parameters())


@pytest.mark.parametrize(
    ("kind", "micro", "status", "says"),
    [
        (Trainer, 1, "pass", "that of its 1 micro-batches"),
        (Trainer, 4, "pass", "that of its 4 micro-batches"),
        (MeanOfEach, 4, "fail", "the gradient is 4 times that of one batch of the same samples"),
        (Averaged, 4, "fail", "weigh the same, 0.25, unlike in one batch of all of them"),
        (NeverZeroed, 2, "fail", "times that of the step's batches"),
        (FromOutputs, 2, "skipped", "computes a loss of its own from the model's outputs"),
        (WithPenalty, 2, "skipped", "adds something to the model's own loss"),
    ],
)
def test_accumulation_is_tried_on_the_trainers_own_step(
    tmp_path: Path, kind: Any, micro: int, status: str, says: str
) -> None:
    callback = FlowscopeCallback(check=True)
    rows = data() if kind is MeanOfEach else padded_rows()
    # what is left of a clipped gradient is next to nothing
    options = {"gradient_accumulation_steps": micro, "max_grad_norm": 0.0 if kind is NeverZeroed else 0.1}
    trainer = make_trainer(tmp_path, callback, rows=rows, kind=kind, **options)
    trainer.train()
    assert callback.check_report is not None
    [found] = [finding for finding in callback.check_report.findings if finding.trial == "accumulation"]
    assert (found.status, says in found.message) == (status, True), found
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in trainer.model.modules())


def test_records_are_those_of_a_bare_loop_before_clipping_and_after(tmp_path: Path) -> None:
    callback, model = FlowscopeCallback(every=1), make_model()
    batches, states = record_batches(model)
    trainer = make_trainer(tmp_path, callback, model=model, max_grad_norm=0.1)
    trainer.train()
    records = scope_of(callback).records
    assert [r.step for r in records] == [0, 1, 2, 3]
    assert [r.loss for r in records] == pytest.approx(logged_losses(trainer), rel=1e-6)
    for record, batch, state in zip(records, batches, states, strict=True):
        points, parameters, loss = gradients(state, batch)
        assert record.loss == pytest.approx(loss, rel=1e-5)
        np.testing.assert_allclose(record["grad_norm"], points, rtol=1e-5)
        whole = math.sqrt(sum(norm**2 for norm in parameters.values()))
        assert whole > 0.2  # so that clipping to .1 matters
        after = dict(zip(record.labels("param_grad_norm"), record["param_grad_norm"], strict=True))
        raw = dict(zip(record.labels("param_grad_norm_raw"), record["param_grad_norm_raw"], strict=True))
        assert after.keys() == raw.keys() == parameters.keys()
        for name, norm in parameters.items():
            assert raw[name] == pytest.approx(norm, rel=1e-4), name
            assert after[name] == pytest.approx(norm * 0.1 / whole, rel=1e-4), name
        assert record["clip_ratio"].item() == pytest.approx(0.1 / whole, rel=1e-4)


def test_accumulated_micro_batches_are_one_step(tmp_path: Path) -> None:
    callback, model = FlowscopeCallback(every=1), make_model()
    batches, states = record_batches(model)
    trainer = make_trainer(tmp_path, callback, model=model, gradient_accumulation_steps=2, max_steps=3)
    trainer.train()
    records = scope_of(callback).records
    assert [r.step for r in records] == [0, 1, 2]
    for k, record in enumerate(records):
        points, _, loss = gradients(states[2 * k], batches[2 * k], batches[2 * k + 1])
        assert record.loss == pytest.approx(loss, rel=1e-5)
        np.testing.assert_allclose(record["grad_norm"], points, rtol=1e-5)


def test_training_is_unchanged_and_nothing_stays_attached(tmp_path: Path) -> None:
    bare, watched = make_trainer(tmp_path / "a"), make_trainer(tmp_path / "b", FlowscopeCallback(every=1))
    bare.train()
    watched.train()
    assert logged_losses(bare) == logged_losses(watched)
    for (name, a), b in zip(bare.model.named_parameters(), watched.model.parameters(), strict=True):
        assert torch.equal(a, b), name
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in watched.model.modules())


def test_evaluation_in_between_is_not_counted(tmp_path: Path) -> None:
    plain, evaluating = FlowscopeCallback(every=1), FlowscopeCallback(every=1)
    make_trainer(tmp_path / "a", plain).train()
    options = {"eval_dataset": data(2 * BATCH, seed=5), "eval_strategy": "steps", "eval_steps": 1}
    trainer = make_trainer(tmp_path / "b", evaluating, per_device_eval_batch_size=BATCH, **options)
    trainer.train()
    assert sum("eval_loss" in entry for entry in trainer.state.log_history) == 4
    for a, b in zip(scope_of(plain).records, scope_of(evaluating).records, strict=True):
        assert (a.step, a.loss) == (b.step, b.loss)
        np.testing.assert_array_equal(a["grad_norm"], b["grad_norm"])


class Regression(torch.nn.Module):
    """Returns its loss in a dict; one label that is NaN makes the loss NaN."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Linear(4, WIDTH)
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH))
        self.head = torch.nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.embed(x)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return {"loss": torch.nn.functional.mse_loss(self.head(x)[:, 0], labels)}


def regression(rows: int = 8 * BATCH, nan_at: int | None = None) -> list[dict[str, Tensor]]:
    x = torch.randn(rows, 4, generator=torch.Generator().manual_seed(1))
    labels = x.sum(1)
    if nan_at is not None:
        labels[nan_at] = float("nan")
    return [{"x": a, "labels": b} for a, b in zip(x, labels, strict=True)]


def test_a_nan_loss_that_the_trainer_hides_is_seen(tmp_path: Path) -> None:
    torch.manual_seed(0)
    callback = FlowscopeCallback(every=1)
    rows = regression(nan_at=7)  # shuffled: somewhere in the first epoch of 8 steps
    trainer = make_trainer(tmp_path, callback, model=Regression(), rows=rows, max_steps=8)
    assert trainer.args.logging_nan_inf_filter
    trainer.train()
    assert all(math.isfinite(loss) for loss in logged_losses(trainer))
    first = next(a for a in scope_of(callback).alerts if a.kind == "non_finite")
    losses = [r.loss for r in scope_of(callback).records]
    assert math.isnan(losses[first.step])
    assert all(math.isfinite(loss) for loss in losses[: first.step])


def test_a_nan_loss_between_sampled_steps_is_seen(tmp_path: Path) -> None:
    torch.manual_seed(0)
    callback = FlowscopeCallback(every=lambda step: step == 0)
    make_trainer(tmp_path, callback, model=Regression(), rows=regression(nan_at=7), max_steps=8).train()
    assert "non_finite" in [a.kind for a in scope_of(callback).alerts]


@pytest.mark.parametrize("by", ["stop_on", "action"])
def test_an_alert_stops_the_training_and_the_trainer_ends_as_usual(tmp_path: Path, by: str) -> None:
    seen: list[flowscope.Alert] = []
    options: dict[str, Any] = {"stop_on": "non_finite", "on_alert": seen.append}
    if by == "action":
        options = {"on_alert": [flowscope.actions.Stop("non_finite"), seen.append]}
    callback, model = FlowscopeCallback(every=1, **options), make_model()
    with torch.no_grad():
        model.transformer.ln_f.weight[0] = float("nan")
    trainer = make_trainer(tmp_path, callback, model=model, max_steps=8)
    result = trainer.train()
    assert "non_finite" in [a.kind for a in seen]
    assert trainer.state.global_step < 8
    assert "train_runtime" in result.metrics
    assert scope_of(callback).closed


def test_an_alert_that_was_not_asked_for_stops_nothing(tmp_path: Path) -> None:
    callback, model = FlowscopeCallback(every=1, stop_on=["gate_saturation", "info"]), make_model()
    with torch.no_grad():
        model.transformer.ln_f.weight[0] = float("nan")
    trainer = make_trainer(tmp_path, callback, model=model)
    trainer.train()
    assert "non_finite" in [a.kind for a in scope_of(callback).alerts]
    assert trainer.state.global_step == 4


@pytest.mark.parametrize("restore", [False, True])
def test_resuming_goes_on_with_steps_and_standing_alerts(tmp_path: Path, restore: bool) -> None:
    model = make_model()
    with torch.no_grad():
        model.transformer.ln_f.weight[0] = float("nan")  # stands, and is in the checkpoint
    first = FlowscopeCallback(every=1)
    make_trainer(tmp_path, first, model=model, learning_rate=0.0, save_strategy="steps", save_steps=4).train()
    assert "non_finite" in [a.kind for a in scope_of(first).alerts if a.state == "raised"]
    second = FlowscopeCallback(every=1)
    options = {"restore_callback_states_from_checkpoint": restore, "max_steps": 7, "learning_rate": 0.0}
    trainer = make_trainer(tmp_path, second, model=make_model(), **options)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    live = next(c for c in trainer.callback_handler.callbacks if isinstance(c, FlowscopeCallback))
    assert [r.step for r in scope_of(live).records] == [4, 5, 6]
    assert "non_finite" not in [a.kind for a in scope_of(live).alerts]  # not raised again


def test_resuming_from_a_checkpoint_made_without_flowscope(tmp_path: Path) -> None:
    make_trainer(tmp_path, save_strategy="steps", save_steps=4).train()
    callback = FlowscopeCallback(every=1)
    trainer = make_trainer(tmp_path, callback, max_steps=6, save_strategy="steps", save_steps=6)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert len(scope_of(callback).records) == 2
    assert (tmp_path / "checkpoint-6").is_dir()


def test_a_second_training_starts_a_new_scope(tmp_path: Path) -> None:
    callback = FlowscopeCallback(every=1)
    trainer = make_trainer(tmp_path, callback)
    trainer.train()
    first = scope_of(callback)
    trainer.train()
    assert scope_of(callback) is not first
    assert [r.step for r in scope_of(callback).records] == [0, 1, 2, 3]


def test_mode_wraps_before_the_optimizer_is_made_and_resumes(tmp_path: Path) -> None:
    callback, model = FlowscopeCallback(mode="keel", every=1), make_model()
    make_trainer(tmp_path, callback, model=model, save_strategy="steps", save_steps=4).train()
    gates = [gate for _, connection in flowscope.connections(model) for gate in connection.gates]
    assert len(gates) == 2 * DEPTH
    assert all(gate.generator.abs().sum() > 0 for gate in gates)
    assert "gate_mean" in scope_of(callback).records[-1].metrics
    assert "parameters_not_optimized" not in [a.kind for a in scope_of(callback).alerts]
    again, resumed = FlowscopeCallback(mode="keel", every=1), make_model()
    trainer = make_trainer(tmp_path, again, model=resumed, max_steps=5)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert [r.step for r in scope_of(again).records] == [4]


def test_mode_that_comes_too_late_is_an_error(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    trainer.add_callback(FlowscopeCallback(mode="keel"))
    with pytest.raises(flowscope.FlowscopeError, match="not to add_callback"):
        trainer.train()


def test_without_a_mode_it_may_be_added_later_and_a_model_init_may_make_the_model(tmp_path: Path) -> None:
    callback = FlowscopeCallback(every=1)
    trainer = make_trainer(tmp_path, model_init=make_model)
    trainer.add_callback(callback)
    trainer.train()
    assert [r.loss for r in scope_of(callback).records] == pytest.approx(logged_losses(trainer), rel=1e-6)


def test_label_smoothing_gives_the_logged_loss(tmp_path: Path) -> None:
    callback = FlowscopeCallback(every=1)
    trainer = make_trainer(tmp_path, callback, label_smoothing_factor=0.1)
    trainer.train()
    assert [r.loss for r in scope_of(callback).records] == pytest.approx(logged_losses(trainer), rel=1e-6)


class Preferring(Trainer):
    """A loss of its own from the logits, beside the one that the model returns, as trainers of policies have it."""

    def compute_loss(self, model: Any, inputs: dict[str, Tensor], *args: Any, **kwargs: Any) -> Tensor:
        del args, kwargs
        logits = model(**inputs).logits
        return -logits.log_softmax(-1).square().mean().sqrt() - 7.0


@pytest.mark.parametrize("accumulated", [1, 2])
def test_a_loss_that_the_trainer_computes_from_the_logits_is_its_own(tmp_path: Path, accumulated: int) -> None:
    callback = FlowscopeCallback(every=1)
    trainer = make_trainer(tmp_path, callback, kind=Preferring, gradient_accumulation_steps=accumulated)
    trainer.train()
    losses = [r.loss for r in scope_of(callback).records]
    assert losses == pytest.approx(logged_losses(trainer), rel=1e-6)
    assert max(losses) < -7  # that of the model is a cross-entropy


def test_compiled_numbers_are_the_eager_ones(tmp_path: Path) -> None:
    torch._dynamo.utils.counters.clear()
    runs: list[list[flowscope.Record]] = []
    for options in ({}, {"torch_compile": True, "torch_compile_backend": "aot_eager"}):
        torch.manual_seed(0)
        callback = FlowscopeCallback(every=lambda step: step != 1)
        trainer = make_trainer(tmp_path, callback, model=Regression(), rows=regression(), **options)
        trainer.train()
        runs.append(scope_of(callback).records)
        assert [r.loss for r in runs[-1]] == pytest.approx([logged_losses(trainer)[k] for k in (0, 2, 3)], rel=1e-6)
    for eager, compiled in zip(*runs, strict=True):
        assert compiled.loss == pytest.approx(eager.loss, rel=1e-5)
        np.testing.assert_allclose(compiled["gradient_product"], eager["gradient_product"], rtol=1e-5)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2  # sampling on and off
    assert not torch._dynamo.utils.counters["graph_break"]


def test_log_dir_is_a_run_folder(tmp_path: Path) -> None:
    from flowscope.sinks import read_run

    make_trainer(tmp_path / "out", FlowscopeCallback(log_dir=tmp_path / "run")).train()
    assert [r.step for r in read_run(tmp_path / "run").records] == [0, 1, 2, 3]
