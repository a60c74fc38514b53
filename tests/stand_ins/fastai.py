"""fastai 2.8.12: events are methods of callbacks, by order; an exception leaves out the rest of a batch or a fit."""

from __future__ import annotations

from contextlib import nullcontext, suppress
from typing import Any

import torch


class CancelBatchException(Exception):  # noqa: N818
    pass


class CancelFitException(Exception):  # noqa: N818
    pass


INNER = ("before_batch", "after_loss", "before_step", "after_step", "after_batch")


class Callback:
    order, run, run_valid, learn = 0, True, True, None

    def __call__(self, event: str) -> None:
        runs = self.run and (event not in INNER or self.run_valid or self.learn.training)
        if runs and hasattr(self, event):
            getattr(self, event)()
        if event == "after_fit":
            self.run = True


class GradientAccumulation(Callback):
    order, run_valid = -4, False

    def __init__(self, n_acc: int) -> None:
        self.n_acc = n_acc

    def before_fit(self) -> None:
        self.count = 0

    def after_loss(self) -> None:
        self.learn.loss_grad = self.learn.loss_grad / (self.n_acc / len(self.learn.yb[0]))

    def before_step(self) -> None:
        self.count += len(self.learn.yb[0])
        if self.count < self.n_acc:
            raise CancelBatchException
        self.count = 0


class DataLoader(torch.utils.data.DataLoader):
    def __init__(self, rows: Any, bs: int, **options: Any) -> None:
        super().__init__(rows, batch_size=bs, **options)


class DataLoaders:
    def __init__(self, train: Any, valid: Any) -> None:
        self.train, self.valid = train, valid


class Adam:
    """None of torch's, as fastai's own."""

    def __init__(self, params: Any, lr: float) -> None:
        self.params, self.lr = list(params), lr

    @torch.no_grad()
    def step(self) -> None:
        for p in self.params:
            p.sub_(p.grad.sign() * self.lr)

    def zero_grad(self) -> None:
        for p in self.params:
            p.grad = None


class OptimWrapper:
    def __init__(self, params: Any, opt: Any, lr: float) -> None:
        self.opt = opt(list(params), lr=lr)
        self.step, self.zero_grad = self.opt.step, self.opt.zero_grad


class Learner:
    def __init__(self, dls: Any, model: Any, loss_func: Any, opt_func: Any = Adam, cbs: Any = ()) -> None:
        self.dls, self.model, self.loss_func, self.opt_func = dls, model, loss_func, opt_func
        self.cbs = sorted(cbs if isinstance(cbs, list) else [cbs], key=lambda callback: callback.order)
        self.no_logging = self.no_bar = nullcontext
        self.training = False
        for callback in self.cbs:
            callback.learn = self

    def tell(self, event: str) -> None:
        for callback in self.cbs:
            callback(event)

    def fit(self, epochs: int, lr: float = 1e-3) -> None:
        self.opt = self.opt_func(self.model.parameters(), lr=lr)
        try:
            self.tell("before_fit")
            for _ in range(epochs):
                self.tell("before_epoch")
                self._batches(self.dls.train, "train")
                self._batches(self.dls.valid, "validate")
                self.tell("after_epoch")
        except CancelFitException:
            pass
        self.tell("after_fit")

    def validate(self) -> None:
        self.tell("before_fit")
        self._batches(self.dls.valid, "validate")
        self.tell("after_fit")

    def _batches(self, loader: Any, name: str) -> None:
        self.training = name == "train"
        self.model.train(self.training)
        self.tell(f"before_{name}")
        with nullcontext() if self.training else torch.no_grad():
            for x, y in loader:
                self.yb = (y,)
                with suppress(CancelBatchException):
                    self._one(x, y)
                self.tell("after_batch")
        self.tell(f"after_{name}")

    def _one(self, x: Any, y: Any) -> None:
        self.tell("before_batch")
        self.loss_grad = self.loss_func(self.model(x), y)
        self.loss = self.loss_grad.clone()
        self.tell("after_loss")
        if self.training:
            self.loss_grad.backward()
            self.tell("before_step")
            self.opt.step()
            self.tell("after_step")
            self.opt.zero_grad()


MODULES: dict[str, dict[str, Any]] = {
    "fastai": {},
    "fastai.callback.core": {"Callback": Callback, "CancelFitException": CancelFitException},
    "fastai.callback.training": {"GradientAccumulation": GradientAccumulation},
    "fastai.data.core": {"DataLoaders": DataLoaders},
    "fastai.data.load": {"DataLoader": DataLoader},
    "fastai.learner": {"Learner": Learner},
    "fastai.optimizer": {"Adam": Adam, "OptimWrapper": OptimWrapper},
}
