"""The stacks: how each trains the same small net (or its own smallest), watched the way its users would watch it."""

from __future__ import annotations

import functools
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import flowscope

from .case import ROWS, D, K, Seen, batches, data, loss_of, make

LIGHTNING = ("lightning==2.6.6",)
SB3 = ("stable-baselines3==2.9.2",)
HUGGING_FACE = ("transformers[torch]==5.24.0",)
TRL = (*HUGGING_FACE, "datasets", "trl==1.16.0")


@dataclass(frozen=True)
class Stack:
    """How one stack is run.

    Attributes:
        train: trains, and returns the scope.
        how: what the user adds.
        packages: what is installed.
        imports: modules that tell whether it is.
    """

    train: Callable[[Seen], Any]
    how: str
    packages: tuple[str, ...] = ()
    imports: tuple[str, ...] = ()


def net(seen: Seen) -> nn.Module:
    model = make()
    seen.look(model.blocks[1], "blocks.1")
    return model


# -- loops by hand


def plain(seen: Seen, *, make_optimizer: Callable[..., Any] = torch.optim.AdamW, given: bool = True) -> Any:
    model = net(seen)
    optimizer = make_optimizer(model.parameters(), lr=1e-2)
    if hasattr(optimizer, "train"):
        optimizer.train()
    with flowscope.watch(model, optimizer if given else None, every=1) as scope:
        for x, y in [*batches(), *batches()]:
            optimizer.zero_grad()
            loss = loss_of(model(x), y)
            loss.backward()
            optimizer.step()
            scope.step(loss=loss)
    return scope


def micro_batches(seen: Seen) -> Any:
    model = net(seen)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    with flowscope.watch(model, every=1) as scope:
        for number, (x, y) in enumerate([*batches(2), *batches(2)]):
            loss = loss_of(model(x), y)
            (loss / 8).backward()
            if number % 8 == 7:
                optimizer.step()
                optimizer.zero_grad()
            scope.step(loss=loss)
    return scope


def by_hand(seen: Seen) -> Any:
    model = net(seen)
    with flowscope.watch(model, every=1) as scope:
        for x, y in batches():
            loss = loss_of(model(x), y)
            loss.backward()
            with torch.no_grad():
                for p in model.parameters():
                    p.sub_(p.grad, alpha=0.1)
                    p.grad = None
            seen.stepped()
            scope.step(loss=loss)
    return scope


def muon(seen: Seen) -> Any:
    model = net(seen)
    wide = [p for p in model.blocks.parameters() if p.dim() == 2]
    rest = [p for p in model.parameters() if all(p is not q for q in wide)]
    first, second = torch.optim.Muon(wide, lr=1e-2), torch.optim.AdamW(rest, 1e-2)
    seen.optimizers = lambda optimizer: optimizer is second
    with flowscope.watch(model, [first, second], every=1) as scope:
        for x, y in batches():
            model.zero_grad()
            loss = loss_of(model(x), y)
            loss.backward()
            first.step()
            second.step()
            scope.step(loss=loss)
    return scope


def lbfgs(seen: Seen) -> Any:
    model = net(seen)
    seen.place = ""
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)
    (x, y), *_ = batches(32)
    with flowscope.watch(model, optimizer, every=1) as scope:
        for _ in range(4):

            def closure() -> Any:
                optimizer.zero_grad()
                loss = loss_of(model(x), y)
                loss.backward()
                return loss

            scope.step(loss=optimizer.step(closure))
    return scope


def schedulefree(seen: Seen) -> Any:
    from schedulefree import RAdamScheduleFree

    return plain(seen, make_optimizer=RAdamScheduleFree)


def opacus(seen: Seen) -> Any:
    from opacus import PrivacyEngine

    model = make()
    loader = DataLoader(TensorDataset(*data()), 4)
    model, optimizer, loader = PrivacyEngine().make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), 0.1), data_loader=loader, noise_multiplier=1.0,
        max_grad_norm=1.0, poisson_sampling=False,
    )  # fmt: skip
    seen.look(model._module.blocks[1], "blocks.1")
    seen.optimizers = lambda stepped: stepped is optimizer.original_optimizer
    with flowscope.watch(model, optimizer.original_optimizer, every=1) as scope:
        for x, y in loader:
            optimizer.zero_grad()
            loss = loss_of(model(x), y)
            loss.backward()
            optimizer.step()
            scope.step(loss=loss)
    return scope


# -- Lightning


def lit(seen: Seen, package: Any) -> Any:
    class Module(package.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = make()
            seen.look(self.net.blocks[1], "net.blocks.1")

        def training_step(self, batch: Any, number: int) -> Any:
            return loss_of(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), 1e-2)

    return Module()


QUIET = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_checkpointing": False}


def lightning(seen: Seen, package: str = "lightning.pytorch", **more: Any) -> Any:
    pl = __import__(package, fromlist=["Trainer"])
    from flowscope.integrations.lightning import FlowscopeCallback

    watcher = FlowscopeCallback(every=1)
    trainer = pl.Trainer(max_epochs=2, callbacks=[watcher], enable_model_summary=False, **QUIET, **more)
    trainer.fit(lit(seen, pl), DataLoader(TensorDataset(*data()), 4))
    return watcher.scope


def lightning_manual(seen: Seen) -> Any:
    import lightning.pytorch as pl

    from flowscope.integrations.lightning import FlowscopeCallback

    class Gan(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.g, self.d = (nn.Sequential(nn.Linear(a, 8), nn.Tanh(), nn.Linear(8, b)) for a, b in ((4, D), (D, 1)))

        def training_step(self, batch: Any, number: int) -> None:
            of_g, of_d = self.optimizers()
            for optimizer, sign in ((of_g, 1), (of_d, -1)):
                self.toggle_optimizer(optimizer)
                loss = sign * (self.d(batch[0]).mean() - self.d(self.g(torch.randn(4, 4))).mean())
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()
                self.untoggle_optimizer(optimizer)

        def configure_optimizers(self) -> Any:
            return [torch.optim.Adam(self.g.parameters()), torch.optim.Adam(self.d.parameters())], []

    watcher, module = FlowscopeCallback(every=1), Gan()
    seen.optimizers = lambda optimizer: any(
        p is next(module.d.parameters()) for p in optimizer.param_groups[0]["params"]
    )
    trainer = pl.Trainer(max_epochs=1, callbacks=[watcher], enable_model_summary=False, **QUIET)
    trainer.fit(module, DataLoader(TensorDataset(*data()), 4))
    return watcher.scope


def lightning_cli(seen: Seen) -> Any:
    import lightning.pytorch as pl
    from lightning.pytorch.cli import LightningCLI

    kept: list[nn.Module] = []

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            kept.append(lit(seen, pl))
            self.inner = kept[0]
            seen.place = f"inner.{seen.place}"

        def training_step(self, batch: Any, number: int) -> Any:
            return self.inner.training_step(batch, number)

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), 1e-2)

    class Data(pl.LightningDataModule):
        def train_dataloader(self) -> Any:
            return DataLoader(TensorDataset(*data()), 4)

    watcher = {
        "class_path": "flowscope.integrations.lightning.FlowscopeCallback",
        "init_args": {"every": 1, "flows": ["inner.net.blocks"], "config": {"metrics": ["flow", "parameters"]}},
    }
    settings = {"max_epochs": 2, "enable_model_summary": False, "callbacks": [watcher], **QUIET}
    cli = LightningCLI(Module, Data, save_config_callback=None, args={"fit": {"trainer": settings}})
    return next(found.scope for found in cli.trainer.callbacks if hasattr(found, "scope"))


def fabric(seen: Seen) -> Any:
    import lightning as lightning_package

    engine = lightning_package.Fabric(accelerator="cpu", devices=1)
    bare = net(seen)
    model, optimizer = engine.setup(bare, torch.optim.AdamW(bare.parameters(), 1e-2))
    with flowscope.watch(model, optimizer, every=1) as scope:
        for x, y in batches():
            optimizer.zero_grad()
            loss = loss_of(model(x), y)
            engine.backward(loss)
            optimizer.step()
            scope.step(loss=loss)
    return scope


# -- Hugging Face


def trainer(seen: Seen) -> Any:
    from transformers import Trainer, TrainingArguments

    from flowscope.integrations.huggingface import FlowscopeCallback

    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = make()
            seen.look(self.net.blocks[1], "net.blocks.1")

        def forward(self, x: Any, labels: Any) -> Any:
            answer = self.net(x)
            return {"loss": loss_of(answer, labels), "logits": answer}

    x, y = data()
    watcher = FlowscopeCallback(every=1)
    arguments = TrainingArguments(
        tempfile.mkdtemp(), per_device_train_batch_size=4, max_steps=12, use_cpu=True, report_to=[],
        save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    rows = [{"x": a, "labels": b} for a, b in zip(x, y, strict=True)]
    Trainer(WithLoss(), arguments, train_dataset=rows, callbacks=[watcher]).train()
    return watcher.scope


def accelerate(seen: Seen) -> Any:
    from accelerate import Accelerator

    from flowscope.integrations import accelerate as adapter

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = net(seen)
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.AdamW(model.parameters(), 1e-2), DataLoader(TensorDataset(*data()), 4)
    )
    with adapter.watch(accelerator, model, optimizer, every=1) as scope:
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = loss_of(model(x), y)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            scope.step(loss=loss)
    return scope


def bert() -> str:
    from transformers import BertConfig, BertModel, BertTokenizerFast

    folder = tempfile.mkdtemp()
    Path(folder, "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]))
    BertTokenizerFast(folder + "/vocab.txt").save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 64}
    BertModel(BertConfig(vocab_size=25, **sizes)).save_pretrained(folder)
    return folder


WORDS = [f"w{i}" for i in range(20)]


def setfit(seen: Seen) -> Any:
    from datasets import Dataset
    from setfit import SetFitModel, Trainer, TrainingArguments

    from flowscope.integrations.huggingface import FlowscopeCallback

    rows = {"text": [f"{WORDS[i]} {WORDS[i + 1]}" for i in range(16)], "label": [i % 2 for i in range(16)]}
    watcher = FlowscopeCallback(every=1)
    arguments = TrainingArguments(output_dir=tempfile.mkdtemp(), batch_size=8, max_steps=5, report_to="none")
    model = SetFitModel.from_pretrained(bert())
    Trainer(model=model, args=arguments, train_dataset=Dataset.from_dict(rows), callbacks=[watcher]).train()
    return watcher.scope


def sentence_transformers(seen: Seen) -> Any:
    from datasets import Dataset
    from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, losses
    from sentence_transformers import SentenceTransformerTrainingArguments as Arguments
    from sentence_transformers.models import Pooling, Transformer

    from flowscope.integrations.huggingface import FlowscopeCallback

    inner = Transformer(bert())
    model = SentenceTransformer(modules=[inner, Pooling(32)], device="cpu")
    pairs = {"anchor": [f"{w} {w}" for w in WORDS[:16]], "positive": [f"{w} w0" for w in WORDS[:16]]}
    watcher = FlowscopeCallback(every=1)
    arguments = Arguments(tempfile.mkdtemp(), per_device_train_batch_size=4, max_steps=4, report_to=[], use_cpu=True)
    SentenceTransformerTrainer(
        model, arguments, train_dataset=Dataset.from_dict(pairs), loss=losses.MultipleNegativesRankingLoss(model),
        callbacks=[watcher],
    ).train()  # fmt: skip
    return watcher.scope


def llama() -> tuple[Any, Any]:
    """A model of language with its tokenizer, each its smallest."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = {word: at for at, word in enumerate(["[PAD]", "[BOS]", "[EOS]", "[UNK]", *WORDS])}
    inner = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    marks = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "bos", "eos", "unk")}
    sizes = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 32}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(words), pad_token_id=0, **sizes))
    return model, PreTrainedTokenizerFast(tokenizer_object=inner, **marks)


HUB = {"report_to": [], "use_cpu": True, "save_strategy": "no", "disable_tqdm": True, "max_steps": 6}


def trl(seen: Seen, method: str) -> Any:
    import trl as package
    from datasets import Dataset

    from flowscope.integrations.huggingface import FlowscopeCallback

    model, tokenizer = llama()
    watcher = FlowscopeCallback(every=1)
    rows = [f"{a} {b}" for a, b in pairwise(WORDS)]
    more = {"GRPO": {"num_generations": 4, "max_completion_length": 6}}.get(method, {})
    arguments = getattr(package, f"{method}Config")(
        tempfile.mkdtemp(), per_device_train_batch_size=4, bf16=False, gradient_checkpointing=False, **HUB, **more
    )
    given = {"processing_class": tokenizer, "callbacks": [watcher]}
    if method == "GRPO":
        given["reward_funcs"] = lambda completions, **_: [float(len(set(text))) for text in completions]
    seen.look(model.model.layers[1], "model.layers.1")
    columns = {"SFT": {"text": rows}, "GRPO": {"prompt": rows}}[method]
    getattr(package, f"{method}Trainer")(
        model, args=arguments, train_dataset=Dataset.from_dict(columns), **given
    ).train()
    return watcher.scope


def peft(seen: Seen) -> Any:
    from peft import LoraConfig, get_peft_model
    from transformers import Trainer, TrainingArguments

    from flowscope.integrations.huggingface import FlowscopeCallback

    model, _ = llama()
    seen.look(model.model.layers[1], "base_model.model.model.layers.1")
    watched = get_peft_model(model, LoraConfig(target_modules=["q_proj", "v_proj"], r=2))
    watcher = FlowscopeCallback(every=1)
    rows = [{"input_ids": [4 + i, 5 + i, 6 + i], "labels": [4 + i, 5 + i, 6 + i]} for i in range(16)]
    arguments = TrainingArguments(tempfile.mkdtemp(), per_device_train_batch_size=4, **HUB)
    Trainer(watched, arguments, train_dataset=rows, callbacks=[watcher]).train()
    return watcher.scope


def diffusers(seen: Seen) -> Any:
    from accelerate import Accelerator
    from diffusers import DDPMScheduler, UNet2DModel

    from flowscope.integrations import accelerate as adapter

    torch.manual_seed(0)
    kinds = {"down_block_types": ("DownBlock2D",) * 2, "up_block_types": ("UpBlock2D",) * 2}
    unet = UNet2DModel(8, 1, 1, block_out_channels=(8, 8), layers_per_block=3, norm_num_groups=4, **kinds)
    seen.look(unet.down_blocks[0].resnets[1], "down_blocks.0.resnets.1")
    accelerator, noises = Accelerator(cpu=True), DDPMScheduler(50)
    unet, optimizer = accelerator.prepare(unet, torch.optim.AdamW(unet.parameters(), 1e-3))
    with adapter.watch(accelerator, unet, optimizer, every=1) as scope:
        for _ in range(6):
            clean, noise, times = torch.randn(4, 1, 8, 8), torch.randn(4, 1, 8, 8), torch.randint(0, 50, (4,))
            loss = nn.functional.mse_loss(unet(noises.add_noise(clean, noise, times), times).sample, noise)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            scope.step(loss=loss)
    return scope


def deepspeed(seen: Seen, stage: int = 1) -> Any:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=f"2983{stage}", RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    import deepspeed as package

    package.init_distributed("gloo")
    model = net(seen)
    chosen = {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}}
    settings = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": stage}, "optimizer": chosen}
    engine, optimizer, _, _ = package.initialize(model=model, model_parameters=model.parameters(), config=settings)
    with flowscope.watch(engine, optimizer, every=1) as scope:
        for x, y in batches():
            loss = loss_of(engine(x), y)
            engine.backward(loss)
            engine.step()
            scope.step(loss=loss)
    return scope


# -- other trainers


def geometric(seen: Seen) -> Any:
    from torch_geometric.nn import GCN

    torch.manual_seed(0)
    model = GCN(D, D, 4, K)
    seen.look(model.convs[1], "convs.1")
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    (x, y), edges = data(), torch.randint(0, ROWS, (2, 4 * ROWS))
    with flowscope.watch(model, optimizer, every=1) as scope:
        for _ in range(6):
            optimizer.zero_grad()
            loss = loss_of(model(x, edges), y)
            loss.backward()
            optimizer.step()
            scope.step(loss=loss)
    return scope


def ignite(seen: Seen) -> Any:
    from ignite.engine import create_supervised_trainer

    from flowscope.integrations.ignite import attach

    model = net(seen)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    engine = create_supervised_trainer(model, optimizer, loss_of)
    with attach(engine, model, optimizer, every=1) as scope:
        engine.run(list(batches()), max_epochs=2)
    return scope


def monai(seen: Seen) -> Any:
    from monai.data import DataLoader as Loader
    from monai.data import Dataset
    from monai.engines import SupervisedTrainer

    from flowscope.integrations.monai import FlowscopeHandler

    model, watcher = net(seen), FlowscopeHandler(every=1)
    x, y = data()
    rows = Dataset([{"image": a, "label": b} for a, b in zip(x, y, strict=True)])
    SupervisedTrainer(
        device=torch.device("cpu"), max_epochs=2, train_data_loader=Loader(rows, batch_size=4), network=model,
        optimizer=torch.optim.AdamW(model.parameters(), 1e-2), loss_function=loss_of, train_handlers=[watcher],
    ).run()  # fmt: skip
    return watcher.scope


def skorch(seen: Seen) -> Any:
    from skorch import NeuralNetClassifier

    from flowscope.integrations.skorch import FlowscopeCallback

    watcher = FlowscopeCallback(every=1)
    made = NeuralNetClassifier(
        functools.partial(net, seen), criterion=nn.CrossEntropyLoss, max_epochs=2, batch_size=4, verbose=0,
        train_split=None, callbacks=[watcher],
    )  # fmt: skip
    x, y = data()
    made.fit(x.numpy(), y.numpy())
    return watcher.scope


def fastai(seen: Seen, accumulated: int = 1) -> Any:
    from fastai.callback.core import Callback
    from fastai.callback.training import GradientAccumulation
    from fastai.data.core import DataLoaders
    from fastai.data.load import DataLoader as Loader
    from fastai.learner import Learner

    from flowscope.integrations.fastai import FlowscopeCallback

    class Count(Callback):
        def after_step(self) -> None:
            seen.stepped()

    rows, watcher = list(zip(*data(), strict=True)), FlowscopeCallback(every=1)
    loaders = DataLoaders(Loader(rows, bs=4, num_workers=0), Loader(rows, bs=4, num_workers=0))
    more = [GradientAccumulation(8)] if accumulated > 1 else []
    learner = Learner(loaders, net(seen), loss_func=loss_of, cbs=[Count(), *more, watcher])
    with learner.no_logging(), learner.no_bar():
        learner.fit(3)
    return watcher.scope


def keras(seen: Seen) -> Any:
    import keras as package

    from flowscope.integrations.keras import FlowscopeCallback

    class Count(package.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            seen.stepped()

    package.utils.set_random_seed(0)
    hidden = [package.layers.Dense(D, "tanh", name=f"hidden{i}") for i in range(3)]
    model = package.Sequential([package.Input((D,)), *hidden, package.layers.Dense(K, name="logits")])
    seen.look(hidden[1], "hidden1")
    watcher = FlowscopeCallback(every=1)
    model.compile("adam", package.losses.SparseCategoricalCrossentropy(from_logits=True))
    x, y = data()
    model.fit(x.numpy(), y.numpy(), batch_size=4, epochs=2, verbose=0, callbacks=[Count(), watcher])
    return watcher.scope


def sb3(seen: Seen, algorithm: str, place: str) -> Any:
    import stable_baselines3

    from flowscope.integrations.stable_baselines3 import FlowscopeCallback

    environment = "Pendulum-v1" if algorithm in ("SAC", "TD3") else "CartPole-v1"
    more = {"PPO": {"n_steps": 64, "n_epochs": 2}, "A2C": {}}.get(algorithm, {"learning_starts": 20})
    model = getattr(stable_baselines3, algorithm)("MlpPolicy", environment, seed=0, device="cpu", **more)
    watcher = FlowscopeCallback(every=1)
    seen.look(model.policy.get_submodule(place), place)
    seen.optimizers = lambda optimizer: watcher.scope is not None and optimizer is watcher.scope.optimizers[-1]
    model.learn({"PPO": 512, "A2C": 500}.get(algorithm, 120), callback=watcher)
    return watcher.scope


# -- models that are no stacks of blocks


LIBRARIES: list[torch.library.Library] = []
"""What a library defines goes with it."""


def torchvision_loads() -> None:
    """Define the operators that torchvision's import asks for: beside a CPU torch its wheel has none. Never called."""
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            LIBRARIES.append(torch.library.Library("torchvision", "FRAGMENT"))
            LIBRARIES[-1].define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def vision(seen: Seen, model: nn.Module, loss: Callable[[nn.Module], Any], steps: int = 4) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9)
    with flowscope.watch(model, optimizer, every=1) as scope:
        for _ in range(steps):
            value = loss(model)
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
            scope.step(loss=value)
    return scope


def retinanet(seen: Seen) -> Any:
    torchvision_loads()
    from torchvision.models.detection import retinanet_resnet50_fpn

    torch.manual_seed(0)
    sizes = {"min_size": 96, "max_size": 96}
    model = retinanet_resnet50_fpn(weights=None, weights_backbone=None, num_classes=2, **sizes)
    images = [torch.rand(3, 96, 96) for _ in range(2)]
    targets = [{"boxes": torch.tensor([[10.0, 10.0, 40.0, 40.0]]), "labels": torch.tensor([1])} for _ in range(2)]
    return vision(seen, model, lambda net: sum(net(images, targets).values()))


def timm(seen: Seen) -> Any:
    torchvision_loads()
    import timm as package

    torch.manual_seed(0)
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 3, "num_heads": 2}
    model = package.create_model("vit_tiny_patch16_224", num_classes=K, **sizes)
    seen.look(model.blocks[1], "blocks.1")
    x, y = torch.randn(4, 3, 32, 32), torch.randint(0, K, (4,))
    return vision(seen, model, lambda net: loss_of(net(x), y), steps=6)


def segmentation(seen: Seen, name: str) -> Any:
    torchvision_loads()
    import segmentation_models_pytorch as smp

    torch.manual_seed(0)
    model = getattr(smp, name)("resnet18", encoder_weights=None, classes=1)
    x, y = torch.randn(2, 3, 64, 64), torch.zeros(2, 1, 64, 64)
    return vision(seen, model, lambda net: nn.functional.binary_cross_entropy_with_logits(net(x), y))


SMP, VISION = ("segmentation_models_pytorch==0.6.0",), ("segmentation_models_pytorch",)
part = functools.partial
STACKS = {
    "loop": Stack(plain, "watch"),
    "loop, optimizer not given": Stack(part(plain, given=False), "watch"),
    "loop, micro-batches": Stack(micro_batches, "watch, `scope.step` after each"),
    "loop, SGD by hand": Stack(by_hand, "watch, `scope.step`"),
    "Muon and AdamW": Stack(muon, "watch"),
    "LBFGS": Stack(lbfgs, "watch"),
    "schedule-free RAdam": Stack(schedulefree, "watch", ("schedulefree",), ("schedulefree",)),
    "Opacus": Stack(opacus, "watch", ("opacus",), ("opacus",)),
    "Lightning": Stack(lightning, "callback", LIGHTNING, ("lightning",)),
    "Lightning, accumulation and clipping": Stack(
        part(lightning, accumulate_grad_batches=2, gradient_clip_val=0.5), "callback", LIGHTNING, ("lightning",)
    ),
    "Lightning, manual optimization": Stack(lightning_manual, "callback", LIGHTNING, ("lightning",)),
    "LightningCLI": Stack(
        lightning_cli, "callback in the config", (*LIGHTNING, "jsonargparse[signatures]"), ("lightning", "jsonargparse")
    ),
    "pytorch_lightning": Stack(
        part(lightning, package="pytorch_lightning"), "callback", ("pytorch-lightning",), ("pytorch_lightning",)
    ),
    "Fabric": Stack(fabric, "watch", LIGHTNING, ("lightning",)),
    "transformers' Trainer": Stack(trainer, "callback", HUGGING_FACE, ("transformers", "accelerate")),
    "accelerate, accumulation": Stack(accelerate, "adapter", ("accelerate",), ("accelerate",)),
    "SetFit": Stack(setfit, "callback", (*HUGGING_FACE, "datasets", "setfit"), ("setfit",)),
    "sentence-transformers": Stack(
        sentence_transformers, "callback", (*HUGGING_FACE, "datasets", "sentence-transformers[train]"),
        ("sentence_transformers", "datasets"),
    ),
    "TRL SFT": Stack(part(trl, method="SFT"), "callback", TRL, ("trl", "datasets")),
    "TRL GRPO": Stack(part(trl, method="GRPO"), "callback", TRL, ("trl", "datasets")),
    "PEFT, LoRA in transformers' Trainer": Stack(peft, "callback", (*HUGGING_FACE, "peft"), ("peft",)),
    "diffusers, accelerate": Stack(diffusers, "adapter", ("accelerate", "diffusers"), ("diffusers", "accelerate")),
    "DeepSpeed ZeRO 1": Stack(deepspeed, "watch", ("deepspeed",), ("deepspeed",)),
    "DeepSpeed ZeRO 3": Stack(part(deepspeed, stage=3), "watch", ("deepspeed",), ("deepspeed",)),
    "PyTorch Geometric": Stack(geometric, "watch", ("torch-geometric",), ("torch_geometric",)),
    "Ignite": Stack(ignite, "adapter", ("pytorch-ignite",), ("ignite",)),
    "MONAI": Stack(monai, "handler", ("pytorch-ignite", "monai"), ("monai", "ignite")),
    "skorch": Stack(skorch, "callback", ("skorch",), ("skorch",)),
    "fastai": Stack(fastai, "callback", ("fastai",), ("fastai",)),
    "fastai, accumulation": Stack(part(fastai, accumulated=2), "callback", ("fastai",), ("fastai",)),
    "Keras 3": Stack(keras, "callback", ("keras",), ("keras",)),
    **{
        f"stable-baselines3 {name}": Stack(part(sb3, algorithm=name, place=place), "callback", SB3, SB3_MODULES)
        for SB3_MODULES in [("stable_baselines3",)]
        for name, place in {
            "PPO": "mlp_extractor.policy_net.3", "A2C": "mlp_extractor.value_net.3", "DQN": "q_net.q_net.3",
            "SAC": "actor.latent_pi.3", "TD3": "critic.qf0.3",
        }.items()
    },
    "torchvision RetinaNet": Stack(retinanet, "watch", ("torchvision",), ("torchvision",)),
    "timm ViT": Stack(timm, "watch", ("timm",), ("timm",)),
    "segmentation_models_pytorch FPN": Stack(part(segmentation, name="FPN"), "watch", SMP, VISION),
    "segmentation_models_pytorch Unet": Stack(part(segmentation, name="Unet"), "watch", SMP, VISION),
}  # fmt: skip
