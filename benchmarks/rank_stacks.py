"""Real training stacks on two ranks: each trained bare and watched, from the same weights on the same data.

    python benchmarks/rank_stacks.py [NAME...] [--write docs/scale.md]

Asked of each: are the losses those of the bare run to the bit; is each record that of all ranks, without a flag; is the
gradient norm behind one block the one that a hook of the bare run saw on both ranks; was nothing found. A stack whose
packages are not installed is skipped by name. Ranks are forked, but for Ray, which starts its own.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import logging
import math
import os
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook

from flowscope import watch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from byte_lm import VOCABULARY, ByteLM

RANKS, STEPS = 2, 5
HEAD, TAIL = "<!-- measured by benchmarks/rank_stacks.py -->", "<!-- end of rank stacks -->"
LIMIT = timedelta(seconds=300)


class Twin:
    """One rank of one run, bare or watched, and what was seen of it."""

    def __init__(self, *, watched: bool) -> None:
        self.watched, self.scope = watched, None
        self.losses: list[float] = []
        self.label = ""
        self._squares, self._step = [], 0.0
        register_optimizer_step_post_hook(self._stepped)

    def _stepped(self, *args: Any) -> None:
        self._squares.append(self._step)
        self._step = 0.0

    def look(self, module: nn.Module, label: str) -> None:
        """See the gradients behind a block, by a hook of its own."""
        self.label = label

        def forward(module: nn.Module, args: Any, output: Any) -> None:
            state = output if isinstance(output, Tensor) else output[0]
            if state.requires_grad:
                state.register_hook(self._add)

        module.register_forward_hook(forward)

    def _add(self, gradient: Tensor) -> None:
        self._step += float(gradient.detach().double().square().sum())

    def watch(self, model: nn.Module, optimizer: Any) -> None:
        if self.watched:
            self.scope = watch(model, optimizer, every=1, config={"console": "off"})

    def step(self, loss: Tensor) -> None:
        """At the end of a loop's step."""
        self.losses.append(float(loss.detach()))
        if self.scope is not None:
            self.scope.step(loss=loss)

    def callback(self) -> list[Any]:
        """What the user of a Trainer adds."""
        from flowscope.integrations.huggingface import FlowscopeCallback

        return [FlowscopeCallback(every=1)] if self.watched else []

    def trained(self, trainer: Any, callbacks: list[Any]) -> None:
        self.losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        self.scope = callbacks[0].scope if callbacks else None

    def told(self) -> dict[str, Any]:
        """As JSON can hold it."""
        if self.scope is not None:
            self.scope.close()
        records = self.scope.records if self.scope is not None else []
        norms: list[float] = []
        for record in records:
            labels = [label.removeprefix("module.") for label in record.labels("grad_norm")]
            norms.append(float(record["grad_norm"][labels.index(self.label)]))
        return {
            "losses": [loss.hex() for loss in self.losses],
            "squares": self._squares,
            "norms": norms,
            "flags": [flag for record in records for flag in record.flags],
            "alerts": [f"{a.kind} ({a.severity})" for a in self.scope.alerts] if self.scope is not None else [],
        }


@dataclass(frozen=True)
class Stack:
    """One of them.

    Attributes:
        train: what a rank does.
        imports: what must be installed.
        averaged: over how many ranks the stack averages gradients.
        launch: starts the ranks itself, and has each call `train`.
    """

    train: Callable[[Twin], None]
    imports: tuple[str, ...] = ()
    averaged: int = RANKS
    launch: Callable[[str, Path, bool], None] | None = None


def tokens(count: int, length: int = 16, vocabulary: int = VOCABULARY) -> list[tuple[Tensor, Tensor]]:
    """This rank's own batches."""
    draw = torch.Generator().manual_seed(dist.get_rank())
    window = [torch.randint(vocabulary, (4, length + 1), generator=draw) for _ in range(count)]
    return [(row[:, :-1], row[:, 1:]) for row in window]


def entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def decoder() -> ByteLM:
    torch.manual_seed(0)
    return ByteLM(depth=4, width=32, heads=4, length=16)


def nanogpt(twin: Twin) -> None:
    """Its train.py: micro-batches of which the last synchronises, clipping, two groups, warm-up and cosine."""
    raw = decoder()
    twin.look(raw.blocks[1], "blocks.1")
    model = DistributedDataParallel(raw)
    decayed = [p for p in raw.parameters() if p.dim() >= 2]
    rest = [p for p in raw.parameters() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95))
    twin.watch(model, optimizer)
    data = iter(tokens(2 * STEPS))
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * min((step + 1) / 2, 0.5 * (1 + math.cos(math.pi * step / STEPS)))
        if step == 2:
            model.eval()
            with torch.no_grad():
                raw(tokens(1)[0][0])
            model.train()
        for micro in range(2):
            model.require_backward_grad_sync = micro == 1
            x, y = next(data)
            loss = entropy(model(x), y) / 2
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        twin.step(loss)


def inductor_ddp(twin: Twin) -> None:
    """`torch.compile` around DDP, with its default backend."""
    raw = decoder()
    twin.look(raw.blocks[1], "blocks.1")
    model = DistributedDataParallel(raw)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    twin.watch(model, optimizer)
    _loop(twin, torch.compile(model), optimizer)


def inductor_fsdp2(twin: Twin) -> None:
    """Each block compiled and sharded, as torchtitan does."""
    model = decoder()
    twin.look(model.blocks[1], "blocks.1")
    for block in model.blocks:
        block.compile()
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    twin.watch(model, optimizer)
    _loop(twin, model, optimizer)


def _loop(twin: Twin, model: nn.Module, optimizer: Any) -> None:
    for x, y in tokens(STEPS):
        optimizer.zero_grad()
        loss = entropy(model(x), y)
        loss.backward()
        optimizer.step()
        twin.step(loss)


def torchtitan(twin: Twin) -> None:
    """Its Llama 3 and its own `parallelize_fn`: FSDP2, a loss over the global count of tokens, its clipping."""
    from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
    from torchtitan.distributed import ParallelDims
    from torchtitan.distributed.utils import clip_grad_norm_
    from torchtitan.models.llama3 import model_registry

    spec = model_registry("debugmodel", attn_backend="sdpa")
    parallelism = ParallelismConfig(data_parallel_shard_degree=RANKS, spmd_backend="partial_dtensor")
    dims = ParallelDims.from_config(parallelism, RANKS)
    torch.manual_seed(0)
    model = spec.model.build()
    model.init_states()
    twin.look(model.layers["1"], "layers.1")
    training = TrainingConfig(mixed_precision_param="float32")
    model = spec.parallelize_fn(
        model,
        parallel_dims=dims,
        training=training,
        parallelism=parallelism,
        compile_config=CompileConfig(),
        ac_config=None,
        dump_folder="",
    )
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=8e-4)
    twin.watch(model, optimizer)
    for x, y in tokens(STEPS):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x).flatten(0, 1).float(), y.flatten(), reduction="sum")
        loss = loss / (RANKS * y.numel())
        loss.backward()
        clip_grad_norm_([*model.parameters()], 1.0)
        optimizer.step()
        twin.step(loss)


def _llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, num_key_value_heads=4, **size))


ARGUMENTS: dict[str, Any] = {
    "max_steps": STEPS,
    "per_device_train_batch_size": 4,
    "logging_steps": 1,
    "use_cpu": True,
    "ddp_backend": "gloo",
    "report_to": [],
    "save_strategy": "no",
    "disable_tqdm": True,
    "dataloader_pin_memory": False,
    "learning_rate": 1e-3,
}


def trainer(twin: Twin, **more: Any) -> None:
    """Transformers' Trainer, DDP."""
    from transformers import Trainer, TrainingArguments

    draw = torch.Generator().manual_seed(3)
    rows = [{"input_ids": x, "labels": x} for x in torch.randint(VOCABULARY, (8 * STEPS, 16), generator=draw)]
    model, callbacks = _llama(), twin.callback()
    twin.look(model.model.layers[1], "model.layers.1")
    with tempfile.TemporaryDirectory() as folder:
        made = Trainer(model, TrainingArguments(folder, **ARGUMENTS, **more), train_dataset=rows, callbacks=callbacks)
        made.train()
    twin.trained(made, callbacks)


def trainer_fsdp2(twin: Twin) -> None:
    """The same, sharded by its own option."""
    options = {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
    trainer(twin, fsdp="full_shard auto_wrap", fsdp_config=options)


def trl_sft(twin: Twin) -> None:
    """TRL's SFTTrainer on tokens."""
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    words = {f"w{number}": number for number in range(VOCABULARY - 1)} | {"</s>": VOCABULARY - 1}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w0")), eos_token="</s>", pad_token="w0"
    )
    draw = torch.Generator().manual_seed(3)
    rows = Dataset.from_dict({"input_ids": torch.randint(VOCABULARY, (8 * STEPS, 16), generator=draw).tolist()})
    model, callbacks = _llama(), twin.callback()
    twin.look(model.model.layers[1], "model.layers.1")
    with tempfile.TemporaryDirectory() as folder:
        arguments = SFTConfig(folder, bf16=False, max_length=16, gradient_checkpointing=False, **ARGUMENTS)
        made = SFTTrainer(model, arguments, train_dataset=rows, processing_class=tokenizer, callbacks=callbacks)
        made.train()
    twin.trained(made, callbacks)


def lightning(twin: Twin) -> None:
    """Lightning, DDP: its own launcher is told that the ranks are there."""
    import lightning.pytorch as pl

    from flowscope.integrations.lightning import FlowscopeCallback

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = decoder()
            twin.look(self.model.blocks[1], "model.blocks.1")

        def training_step(self, batch: Any, index: int) -> Tensor:
            loss = entropy(self.model(batch[0]), batch[1])
            twin.losses.append(float(loss.detach()))
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    callbacks: list[Any] = [FlowscopeCallback(every=1)] if twin.watched else []
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    strategy = pl.strategies.DDPStrategy(process_group_backend="gloo")
    made = pl.Trainer(
        max_epochs=1, accelerator="cpu", devices=RANKS, strategy=strategy, callbacks=callbacks,
        use_distributed_sampler=False, **quiet,
    )  # fmt: skip
    made.fit(Module(), torch.utils.data.DataLoader(tokens(STEPS), batch_size=None))
    twin.scope = callbacks[0].scope if callbacks else None


def ray_train(twin: Twin) -> None:
    """A worker of Ray Train: `prepare_model` wraps in DDP."""
    from ray.train.torch import prepare_model

    raw = decoder()
    twin.look(raw.blocks[1], "blocks.1")
    model = prepare_model(raw)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    twin.watch(model, optimizer)
    _loop(twin, model, optimizer)


def launched_by_ray(name: str, folder: Path, watched: bool) -> None:
    import ray
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    def worker(config: Any) -> None:
        sys.path.insert(0, str(Path(config["here"])))
        import rank_stacks

        torch.set_num_threads(1)
        rank_stacks.one(name, Path(config["folder"]), watched=watched)

    paths = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    ray.init(num_cpus=RANKS, include_dashboard=False, runtime_env={"env_vars": {"PYTHONPATH": paths}})
    try:
        TorchTrainer(
            worker,
            train_loop_config={"here": str(Path(__file__).parent), "folder": str(folder)},
            scaling_config=ScalingConfig(num_workers=RANKS),
            torch_config=TorchConfig(backend="gloo"),
            run_config=RunConfig(storage_path=str(folder / "ray")),
        ).fit()
    finally:
        ray.shutdown()


STACKS = {
    "nanoGPT's loop, DDP": Stack(nanogpt),
    "torchtitan's Llama 3, FSDP2": Stack(torchtitan, ("torchtitan",), averaged=1),
    "transformers' Trainer, DDP": Stack(trainer, ("transformers", "accelerate")),
    "transformers' Trainer, FSDP2": Stack(trainer_fsdp2, ("transformers", "accelerate")),
    "TRL's SFTTrainer, DDP": Stack(trl_sft, ("trl", "datasets")),
    "Lightning, DDP": Stack(lightning, ("lightning",)),
    "Ray Train, two workers": Stack(ray_train, ("ray",), launch=launched_by_ray),
    "inductor around DDP": Stack(inductor_ddp),
    "inductor inside of FSDP2": Stack(inductor_fsdp2),
}


def one(name: str, folder: Path, *, watched: bool) -> None:
    """One rank of one run, in a process group that is there."""
    twin = Twin(watched=watched)
    STACKS[name].train(twin)
    (folder / f"{watched}-{dist.get_rank()}.json").write_text(json.dumps(twin.told()))


def _forked(name: str, rank: int, folder: Path, *, watched: bool) -> int:
    if pid := os.fork():
        return pid
    code = 1
    try:
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": RANKS, "LOCAL_WORLD_SIZE": RANKS}
        os.environ |= {key: str(value) for key, value in place.items()} | {"ACCELERATE_USE_CPU": "true"}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
        store = dist.FileStore(str(folder / f"store-{watched}"), RANKS)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=LIMIT)
        one(name, folder, watched=watched)
        dist.barrier()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def judged(name: str) -> tuple[str, str, str, str]:
    """Whether it works, losses, records, and gradient norms, each "yes" or what is wrong; alerts are wrong, too."""
    stack, told = STACKS[name], {}
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        for watched in (False, True):
            if stack.launch is not None:
                stack.launch(name, folder, watched)
            else:
                ranks = [_forked(name, rank, folder, watched=watched) for rank in range(RANKS)]
                if any(os.waitpid(pid, 0)[1] for pid in ranks):
                    return ("watched it fails" if watched else "bare it fails, too"), "", "", ""
            told[watched] = [json.loads((folder / f"{watched}-{rank}.json").read_text()) for rank in range(RANKS)]
    bare, seen = told[False], told[True]
    losses = all(one["losses"] == other["losses"] and one["losses"] for one, other in zip(bare, seen, strict=True))
    flags = sorted({flag for rank in seen for flag in rank["flags"]})
    records = f"flags {flags}" if flags else "yes" if len(seen[0]["norms"]) == STEPS else f"{len(seen[0]['norms'])}"
    expected = [math.sqrt(sum(both)) / stack.averaged for both in zip(*(r["squares"] for r in bare), strict=True)]
    gaps = [abs(a / b - 1) for r in seen for a, b in zip(r["norms"], expected, strict=False)]
    alerts = sorted({alert for rank in seen for alert in rank["alerts"]})
    norms = "yes" if gaps and max(gaps) < 1e-4 else f"off by {max(gaps, default=math.nan):.1g}"
    return "yes" + (f", but {', '.join(alerts)}" if alerts else ""), "yes" if losses else "no", records, norms


def missing(name: str) -> str:
    """Which package it lacks, "" where none."""
    return next((package for package in STACKS[name].imports if importlib.util.find_spec(package) is None), "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="parts of names; all without one")
    parser.add_argument("--write", type=Path, help="put the table between the marks of this page")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    lines = ["| stack | works | losses to the bit | records of all ranks | gradient norm |", "|---|---|---|---|---|"]
    for name in STACKS:
        if arguments.names and not any(part.lower() in name.lower() for part in arguments.names):
            continue
        row = (f"skipped: {missing(name)} is not installed", "", "", "") if missing(name) else judged(name)
        lines.append(f"| {name} | {' | '.join(row)} |")
        print(lines[-1], flush=True)
    if arguments.write is not None:
        before, _, rest = arguments.write.read_text().partition(HEAD)
        after = rest.partition(TAIL)[2]
        arguments.write.write_text(f"{before}{HEAD}\n\n" + "\n".join(lines) + f"\n\n{TAIL}{after}")


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        logging.getLogger("flowscope").setLevel(logging.ERROR)
        main()
