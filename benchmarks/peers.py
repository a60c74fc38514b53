"""The peers, each attached the way its own README says, every step. A peer that does not import is skipped."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable

import torch.nn.functional as F
from pairing import Batch, Runner
from torch import Tensor, nn

After = Callable[[Tensor], object]


def gradlens(runner: Runner) -> After:
    import gradlens

    monitor = runner.stack.enter_context(gradlens.watch(runner.model))
    return lambda loss: monitor.log(loss=loss.item())


def neuraldbg(runner: Runner) -> After:
    from neuraldbg import NeuralDbg

    debugger = runner.stack.enter_context(NeuralDbg(runner.model))

    def after(loss: Tensor) -> None:
        debugger.record_loss(loss.item())
        debugger.step += 1

    return after


def nndiagnostics(runner: Runner) -> None:
    from diagnostics.diagnostics import TensorDiagnosticOptions, attach_diagnostics

    attach_diagnostics(runner.model, TensorDiagnosticOptions(512))


def wandb_watch(log: str) -> Callable[[Runner], After]:
    def attach(runner: Runner) -> After:
        os.environ.update(WANDB_SILENT="true", WANDB_ERROR_REPORTING="false")
        import wandb

        folder = runner.stack.enter_context(tempfile.TemporaryDirectory())
        run = wandb.init(mode="offline", dir=folder, project="overhead", settings=wandb.Settings(console="off"))
        runner.stack.callback(run.finish)
        run.watch(runner.model, log=log, log_freq=1)
        return lambda loss: run.log({"loss": loss.item()})

    return attach


def torchlens(runner: Runner) -> None:
    import torchlens
    from torchlens.options import CaptureOptions

    def forward_backward(model: nn.Module, batch: Batch) -> Tensor:
        tokens, targets = batch
        trace = torchlens.trace(model, tokens, capture=CaptureOptions(backward_ready=True, save_grads="all"))
        logits = trace[trace.output_layers[0]].out
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        trace.log_backward(loss)
        return loss

    runner.forward_backward = forward_backward


PEERS: dict[str, tuple[Callable[[Runner], After | None], str]] = {
    "gradlens 0.2.0": (gradlens, "gradient norms of parameters, dead units"),
    "wandb 0.31.0, gradients": (wandb_watch("gradients"), "histograms of parameter gradients, offline"),
    "wandb 0.31.0, all": (wandb_watch("all"), "histograms of parameters and gradients, offline"),
    "neuraldbg 1.3.2": (neuraldbg, "events from activations and gradients"),
    "nndiagnostics 0.1.9": (nndiagnostics, "statistics of all tensors"),
    "torchlens 2.36.1": (torchlens, "the whole graph with activations and gradients"),
}
