"""Healthy models: a fail on one is false unless it is a true fault of that model.

    python -m benchmarks.trials --zoo                    # all
    python -m benchmarks.trials --zoo --every 8          # every eighth
    python -m benchmarks.trials --zoo --task causal      # one kind: causal, masked, seq2seq, image, torchvision
    python -m benchmarks.trials --zoo llama t5           # these model types
    python -m benchmarks.trials --zoo --trials samples   # these trials, with commas between

Every causal, masked and sequence-to-sequence class of transformers that runs in a tiny configuration, its image
classifiers, and torchvision's where it is installed; each in training mode with its own loss, on three batches of
three rows, of 16 tokens with padding on the right, or of pictures of 32 by 32.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers.models.auto import modeling_auto

import flowscope
from benchmarks.patience import time_limit
from benchmarks.trials.case import padded
from benchmarks.zoo.images import with_operators
from benchmarks.zoo.text import LARGEST, MAPPINGS, SIZES, build, logits_of

TRIALS = "causality,samples,padding,recomputation,determinism,train_eval,saving,labels,loss_start"
SECONDS = 60
ROWS, LENGTH, LABELS = 3, 16, 4
IMAGE_SIZES = {
    "image_size": 32,
    "num_labels": LABELS,
    "patch_size": 8,
    "num_channels": 3,
    "depths": [1, 1, 1, 1],
    "hidden_sizes": [16, 24, 32, 48],
    "window_size": 4,
}
TORCHVISION = (
    "alexnet convnext_tiny densenet121 efficientnet_b0 googlenet inception_v3 maxvit_t mnasnet0_5 mobilenet_v2 "
    "mobilenet_v3_small regnet_y_400mf resnet18 resnext50_32x4d shufflenet_v2_x0_5 squeezenet1_1 swin_t vgg11_bn "
    "vit_b_16 wide_resnet50_2"
)

TRUE = {  # fails that are facts of the model, looked at one by one: other ids under the mask change its answers
    "convbert": "its convolutions reach into the padding",
    "cpmant": "takes no mask (it counts the ids that are not 0 and wants them at the end) and lets a prompt see itself",
    "fnet": "takes no mask: its Fourier transform mixes over the padding",
    "funnel": "pools neighbouring positions, padding among them",
    "mobilebert": "reads each token with its neighbours, padding among them",
    "nystromformer": "its landmarks are means over positions, padding among them",
    "prophetnet": "its outputs depend on the length of the text, without any padding too",
    "yoso": "takes 1 + mask / 10000 for the mask, which the library's mask of -3e38 does not fit",
}

Batch = dict[str, Tensor]
Loss = Callable[[Any, Batch], Tensor]
Built = tuple[nn.Module, Loss, list[Batch]]


@dataclass
class Healthy:
    """One healthy model and how the trials judged it."""

    name: str
    task: str
    seconds: float = 0.0
    fails: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    passed: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    broken: str = ""

    def __str__(self) -> str:
        """The row of the list."""
        if self.broken:
            return f"| {self.name} | {self.task} | does not run: {self.broken} | |"
        said = "; ".join(self.fails) or "no fail"
        counts = f"{len(self.passed)} pass, {len(self.notes)} note, {len(self.skipped)} skipped"
        return f"| {self.name} | {self.task} | {said} | {counts} |"


def text_batch(task: str, generator: torch.Generator, needs: set[str]) -> Batch:
    """Return ids, mask and labels as the task's collator makes them; `needs` are the names that the model takes."""
    ids = torch.randint(3, 100, (ROWS, LENGTH), generator=generator)
    ids, mask = padded(ids, generator)
    labels = ids.masked_fill(mask == 0, -100)
    if task == "masked":
        hidden = (torch.rand(ids.shape, generator=generator) < 0.15) & (mask == 1)
        hidden[:, 1] = True
        labels, ids = ids.masked_fill(~hidden, -100), ids.masked_fill(hidden, 1)
    if task == "seq2seq":
        labels = torch.randint(3, 100, (ROWS, LENGTH), generator=generator)
    batch = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    if "decoder_input_ids" in needs:
        batch["decoder_input_ids"] = torch.cat([torch.full_like(labels[:, :1], 2), labels[:, :-1]], 1)
    return {name: value for name, value in batch.items() if name in needs}


def own_loss(model: Any, batch: Batch) -> Tensor:
    """Return the loss that the model computes itself."""
    loss: Tensor = model(**batch)["loss"]
    return loss


def outer_loss(task: str, model: Any, batch: Batch) -> Tensor:
    """Return the loss from the logits, for models that compute none."""
    logits = logits_of(model(**{k: v for k, v in batch.items() if k != "labels"})).float()
    labels = batch["labels"]
    if task == "causal":
        logits, labels = logits[:, :-1], labels[:, 1:]
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=-100)


def shifts_itself(model: nn.Module, batch: Batch) -> bool:
    """Return whether a decoder's own loss moves the labels: a few leave that to the collator (BartForCausalLM)."""
    model.eval()
    with torch.no_grad():
        own, unmoved = own_loss(model, batch), outer_loss("masked", model, batch)
    return not torch.allclose(own.float(), unmoved, rtol=1e-4)


def text_model(task: str, model_class: Any, config_class: Any) -> Built:
    """Return a tiny model, its loss and batches that it runs on: the fullest set of inputs that works."""
    model, inputs = build(model_class, config_class)
    generator = torch.Generator().manual_seed(1)
    errors = []
    for optional in (("attention_mask",), ()):
        for loss in (own_loss, partial(outer_loss, task)):
            model.train()
            names = {*inputs, "labels", *optional} - ({"attention_mask"} if not optional else set())
            batches = [text_batch(task, generator, names) for _ in range(3)]
            try:
                value = loss(model, batches[0])
                value.backward()
            except Exception as error:
                errors.append(f"{type(error).__name__}: {error}")
                continue
            if loss is own_loss and task == "causal" and not shifts_itself(model, batches[0]):
                continue
            if value.ndim == 0 and bool(value.isfinite()):
                model.zero_grad(set_to_none=True)
                return model.train(), loss, batches
            errors.append(f"its loss is {value}")
    raise RuntimeError(errors[0])


def image_batches(height: int = 32) -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    return [
        {
            "pixel_values": torch.randn(ROWS, 3, height, height, generator=generator),
            "labels": torch.randint(0, LABELS, (ROWS,), generator=generator),
        }
        for _ in range(3)
    ]


def image_model(model_class: Any, config_class: Any) -> Built:
    """Return an image classifier of transformers in the smallest configuration of the usual fields that runs."""
    errors = []
    for sizes in ({**SIZES, **IMAGE_SIZES}, IMAGE_SIZES, {"image_size": 32, "num_labels": LABELS}):
        default = config_class()
        fields = {k: v for k, v in sizes.items() if k == "num_labels" or type(getattr(default, k, None)) is type(v)}
        torch.manual_seed(0)
        try:
            with torch.device("meta"):  # of some, the smallest that this finds has billions of weights
                size = sum(p.numel() for p in model_class(config_class(**fields)).parameters())
            if size > LARGEST:
                raise RuntimeError("too large")
            model = model_class(config_class(**fields)).train()
            own_loss(model, image_batches()[0]).backward()
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")
            continue
        model.zero_grad(set_to_none=True)
        return model, own_loss, image_batches()
    raise RuntimeError(errors[-1])


def torchvision_model(name: str) -> Built:
    """Return one of torchvision's classifiers."""
    from torchvision import models

    torch.manual_seed(0)
    size = 299 if name == "inception_v3" else 224 if name in ("maxvit_t", "vit_b_16") else 64
    model = models.get_model(name, num_classes=LABELS).train()

    def loss(m: Any, batch: Batch) -> Tensor:
        out = m(batch["pixel_values"])
        return F.cross_entropy(out if isinstance(out, Tensor) else out.logits, batch["labels"])

    return model, loss, image_batches(size)


def text_of(name: str, task: str, class_name: str) -> Built:
    config_class = config_of(name)
    if task == "causal" and getattr(config_class(), "is_decoder", None) is False and not config_class.sub_configs:
        config_class = partial(config_class, is_decoder=True)  # encoders that are decoders when told so (BERT)
    return text_model(task, getattr(transformers, class_name), config_class)


def image_of(name: str, task: str, class_name: str) -> Built:
    return image_model(getattr(transformers, class_name), config_of(name))


def config_of(name: str) -> Any:
    return type(transformers.AutoConfig.for_model(name))


def members(names: list[str], tasks: list[str]) -> list[tuple[str, str, Callable[[], Built]]]:
    """Return (name, task, how to build it) of all that are wanted, each class once; nothing is imported yet."""
    images = modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES
    found: dict[str, tuple[str, str, Callable[[], Built]]] = {}
    for task, classes in {**MAPPINGS, "image": images}.items():
        for name, class_name in classes.items():
            class_name = class_name if isinstance(class_name, str) else class_name[0]
            make = partial(image_of if task == "image" else text_of, name, task, class_name)
            if (not names or name in names) and (not tasks or task in tasks):
                found.setdefault(class_name, (name, task, make))
    with_operators()
    for name in TORCHVISION.split() if find_spec("torchvision") else ():
        if (not names or name in names) and (not tasks or "torchvision" in tasks):
            found[name] = (name, "torchvision", partial(torchvision_model, name))
    return list(found.values())


def judge(name: str, task: str, make: Callable[[], Any], trials: list[str]) -> Healthy:
    """Return how the trials judge one model."""
    row = Healthy(name, task)
    try:
        model, loss, batches = make()
    except Exception as error:
        row.broken = f"{type(error).__name__}: {error}"[:100].replace("\n", " ").replace("|", "/")
        return row
    start = time.monotonic()
    try:
        report = flowscope.check(model, loss, batches, only=trials)
    except TimeoutError:
        raise
    except Exception as error:
        row.fails.append(f"check itself: {type(error).__name__}: {error}"[:300])
    else:
        for status, kept in (("fail", row.fails), ("note", row.notes)):
            kept += [f"{f.trial} at {f.where}: {f.message}" for f in report.findings if f.status == status]
        row.passed = [f.trial for f in report.findings if f.status == "pass"]
        row.skipped = [f.trial for f in report.findings if f.status == "skipped"]
    row.seconds = time.monotonic() - start
    return row


def main(arguments: list[str]) -> int:
    """Print a row a model and the sum; the status says whether at most two models have a fail."""
    parser = argparse.ArgumentParser(prog="benchmarks.trials --zoo")
    parser.add_argument("names", nargs="*")
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--task", action="append", default=[])
    parser.add_argument("--first", type=int, default=0, help="leave out as many")
    parser.add_argument("--trials", default=TRIALS)
    options = parser.parse_args(arguments)
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    rows = []
    for name, task, make in members(options.names, options.task)[options.first :: options.every]:
        try:
            with time_limit(SECONDS):
                row = judge(name, task, make, options.trials.split(","))
        except TimeoutError as error:
            row = Healthy(name, task, broken=str(error))
        rows.append(row)
        print(row, f"{row.seconds:.1f} s", "<--" if row.fails else "", flush=True)
    running = [row for row in rows if not row.broken]
    failing = [row for row in running if row.fails and row.name not in TRUE]
    print(f"{len(rows)} models, {len(running)} run, {len(failing)} with a fail: {', '.join(r.name for r in failing)}")
    for row in running:
        if row.fails and row.name in TRUE:
            print(f"a true fail: {row.name} {TRUE[row.name]}")
    for status in ("passed", "skipped"):
        counts = {trial: sum(trial in getattr(row, status) for row in running) for trial in options.trials.split(",")}
        print(f"{status}: " + ", ".join(f"{trial} {count}" for trial, count in counts.items()))
    return int(len(failing) > 2)
