"""What `make demo` runs: a decoder that cannot train, its healthy twin, and the cure, watched side by side.

All are 24 blocks deep. The first two differ only in where the norm sits: Post-LN loses the gradient on its way to the
early blocks within twenty steps and stays at the loss of a model that only knows byte frequencies; Pre-LN trains. The
third is the failing model with one more line, `flowscope.wrap(model, mode="keel")`. Written into runs/demo: one folder
a run, for TensorBoard.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path

import torch
from byte_lm import ByteLM, batches, load_text, train_step
from torch import nn

import flowscope
from flowscope.sinks.console import depth_profile_text

STEPS = 120
LOG_DIR = Path("runs/demo")

RUNS: dict[str, Callable[[], nn.Module]] = {
    "post_ln": lambda: ByteLM(norm="post"),
    "pre_ln": lambda: ByteLM(norm="pre"),
    "post_ln_keel": lambda: flowscope.wrap(ByteLM(norm="post"), mode="keel"),
}


def train(name: str, build: Callable[[], nn.Module], steps: int = STEPS, log_dir: Path = LOG_DIR) -> flowscope.Scope:
    """Train one model and return its closed scope; alerts are printed as they are raised."""
    torch.manual_seed(0)
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = batches(load_text())
    print(f"\n{name}: {steps} steps")
    with flowscope.watch(model, optimizer, log_dir=log_dir / name, every=5, on_alert=print) as scope:
        for step in range(steps):
            loss = train_step(model, optimizer, next(data))
            scope.step(loss=loss)
            if step % 20 == 19:
                print(f"  step {step + 1:>4}  loss {loss.item():.3f}")
    return scope


def report(scopes: dict[str, flowscope.Scope]) -> None:
    """Print what the runs look like beside each other."""
    for metric in ("gradient_product", "token_cosine"):
        print()
        print(depth_profile_text({name: scope.records[-1] for name, scope in scopes.items()}, metric, rows=9))
    print(f"\n{'run':<12} {'loss, last records':>18}   alerts")
    for name, scope in scopes.items():
        losses = [record.loss for record in scope.records[-4:] if record.loss is not None]
        raised = [f"{a.kind} (step {a.step})" for a in scope.alerts if a.state == "raised"]
        print(f"{name:<12} {sum(losses) / len(losses):>18.3f}   {', '.join(raised) or 'none'}")


def main() -> None:
    started = time.perf_counter()
    shutil.rmtree(LOG_DIR, ignore_errors=True)
    report({name: train(name, build) for name, build in RUNS.items()})
    print(f"\n{time.perf_counter() - started:.0f} s. Look closer with: tensorboard --logdir {LOG_DIR}")


if __name__ == "__main__":
    main()
