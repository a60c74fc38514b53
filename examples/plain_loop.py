"""flowscope in a loop of your own: one line before it, one inside."""

from __future__ import annotations

import torch
from byte_lm import ByteLM, batches, load_text, train_step

import flowscope


def main(steps: int = 60, log_dir: str | None = "runs/plain_loop") -> flowscope.Scope:
    torch.manual_seed(0)
    model = ByteLM(norm="post")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = batches(load_text())

    with flowscope.watch(model, optimizer, log_dir=log_dir, on_alert=print) as scope:
        for _ in range(steps):
            loss = train_step(model, optimizer, next(data))
            scope.step(loss=loss)  # optional: only the loss would be missing

    print(scope.summary())
    return scope


if __name__ == "__main__":
    main()
