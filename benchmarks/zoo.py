"""Wrap every causal, masked and sequence-to-sequence architecture of transformers in a tiny configuration.

    python benchmarks/zoo.py                 # all, writes docs/zoo.md
    python benchmarks/zoo.py llama bert      # these model types, printed only

For each: the sites found, the relative change of the output under `dhc` and `mhc` (limit 1e-5), whether every
connection gets gradient (one tensor of each after one backward, every tensor after three steps), and whether `unwrap`
restores the output.
"""

from __future__ import annotations

import contextlib
import copy
import signal
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.models.auto import modeling_auto

from flowscope.errors import FlowscopeError
from flowscope.merging.wrapping import connections, unwrap, wrap
from flowscope.model.sites import find_sites

TINY: dict[int, str] = {
    64: "hidden_size d_model n_embd dim embed_dim embedding_size embedding_dim word_embed_proj_dim",
    128: "intermediate_size d_ff encoder_ffn_dim decoder_ffn_dim ffn_dim n_inner hidden_dim max_position_embeddings "
    "n_positions",
    2: "num_hidden_layers n_layer num_layers n_layers encoder_layers decoder_layers num_decoder_layers "
    "num_encoder_layers num_key_value_heads num_experts_per_tok",
    4: "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads num_experts "
    "num_local_experts n_routed_experts",
    16: "head_dim d_kv qk_nope_head_dim qk_rope_head_dim v_head_dim",
    32: "kv_lora_rank q_lora_rank",
    256: "vocab_size",
    1: "n_group topk_group first_k_dense_replace bos_token_id",
}
EXTRA = {"mamba_d_ssm": 128, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_chunk_size": 8}
EXTRA |= {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64, "pad_token_id": 0, "eos_token_id": 2}
SIZES = {name: size for size, names in TINY.items() for name in names.split()} | EXTRA
VARIATIONS: tuple[dict[str, int], ...] = (  # tried in turn until the model runs
    {},
    {"num_key_value_heads": 4},  # multi-head latent attention has as many
    {"num_hidden_layers": 4, "n_layer": 4, "num_layers": 4},  # hybrids need a layer of each kind
    {"num_hidden_layers": 6, "num_key_value_heads": 4, "head_dim": 32},
)
SPECIAL_BASE = {"vocab_size": 256}
OWN: dict[str, dict[str, Any]] = {  # sizes that must fit each other in their own way
    "codegen": {"n_embd": 64, "n_layer": 2, "n_head": 4, "rotary_dim": 8},
    "gptj": {"n_embd": 64, "n_layer": 2, "n_head": 4, "rotary_dim": 8},
    "mamba2": {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_heads": 8,
        "head_dim": 16,
        "n_groups": 1,
        "state_size": 16,
    },
}
MAPPINGS = {
    "causal": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "masked": modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    "seq2seq": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
}
LIMIT = 1e-5
SECONDS = 150
LARGEST = 30_000_000
WHY = {  # what does not work, in words
    "xlm": "its blocks are no modules: lists of attentions, norms and feed-forwards are run by the model itself",
    "longcat_flash": "one layer in this configuration, so no depth axis is found",
    "phi4_multimodal": "the audio tower keeps its size and does not run; the decoder counts as incidental beside it",
}
WHY["flaubert"] = WHY["xlm"]


@dataclass
class Row:
    """What one architecture showed."""

    name: str
    task: str
    runs: bool = False
    sites: int = 0
    dhc: float = float("nan")
    mhc: float = float("nan")
    gradient: bool = False
    restored: bool = False
    note: str = ""

    @property
    def passes(self) -> bool:
        """Whether everything promised holds."""
        return self.sites > 0 and self.dhc <= LIMIT and self.mhc <= LIMIT and self.gradient and self.restored

    def __str__(self) -> str:
        """The row of the table."""
        if not self.runs:
            return f"| {self.name} | {self.task} | - | - | - | - | - | does not run plain: {self.note} |"
        numbers = (self.name, self.task, self.sites, f"{self.dhc:.1e}", f"{self.mhc:.1e}")
        flags = ("yes" if self.gradient else "no", "yes" if self.restored else "no")
        return f"| {' | '.join(map(str, (*numbers, *flags, self.note)))} |"


def tiny_config(config_class: type[Any], **sizes: int) -> Any:
    """Return a configuration with the sizes of `TINY` (or the given ones) where the architecture has such fields."""
    default = config_class()
    if default.model_type in OWN:
        return config_class(**SPECIAL_BASE, **OWN[default.model_type])
    fields: dict[str, Any] = {}
    for name, size in {**SIZES, **sizes}.items():
        value = getattr(default, name, "absent")
        if isinstance(value, int) or (value is None and name.endswith("_id")):
            fields[name] = size
    for name, part in getattr(config_class, "sub_configs", {}).items():
        kind = type(getattr(default, name, None)) if part.__name__ == "AutoConfig" else part
        if hasattr(kind, "model_type"):
            fields[name] = tiny_config(kind, **sizes)
    try:
        config = config_class(**fields)
    except Exception:
        config = default
        for name, size in fields.items():
            with contextlib.suppress(Exception):
                setattr(config, name, size)
    if not hasattr(config, "pad_token_id"):
        config.pad_token_id = 0
    if config.model_type == "encoder-decoder":
        config.decoder.is_decoder = config.decoder.add_cross_attention = True
    return config


def architectures(chosen: list[str]) -> Iterator[tuple[str, str, type[nn.Module], type[Any]]]:
    """Yield (model type, task, model class, configuration class), each class once."""
    seen: set[str] = set()
    for task, names in MAPPINGS.items():
        for model_type, class_name in names.items():
            class_name = class_name if isinstance(class_name, str) else class_name[0]
            if class_name in seen or (chosen and model_type not in chosen):
                continue
            seen.add(class_name)
            with contextlib.suppress(Exception):
                model_class = getattr(transformers, class_name)
                yield model_type, task, model_class, transformers.AutoConfig.for_model(model_type).__class__


def build(model_class: type[Any], config_class: type[Any]) -> tuple[nn.Module, dict[str, Tensor]]:
    """Return a tiny model in evaluation mode and inputs that it runs on."""
    errors = []
    for sizes in VARIATIONS:
        torch.manual_seed(0)
        try:
            config = tiny_config(config_class, **sizes)
            config.use_cache = False
            with torch.device("meta"):
                size = sum(p.numel() for p in model_class(copy.deepcopy(config)).parameters())
            if size > LARGEST:
                raise RuntimeError(f"{size:,} parameters, its sizes are not among those of TINY")
            model = model_class(config).eval()
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")
            continue
        ids = torch.randint(3, 100, (2, 16))
        for more in ({}, {"decoder_input_ids": ids}, {"attention_mask": torch.ones_like(ids)}):
            try:
                with torch.no_grad():
                    logits_of(model(input_ids=ids, **more))
            except Exception as error:
                errors.append(f"{type(error).__name__}: {error}")
            else:
                return model, {"input_ids": ids, **more}
    raise RuntimeError(errors[0])


def logits_of(output: Any) -> Tensor:
    """Return the logits of a model's output."""
    logits: Tensor = output["logits"] if "logits" in output else output[0]
    return logits


def output_of(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    """Run the model without gradient, the same randomness each time."""
    torch.manual_seed(1)
    with torch.no_grad():
        return logits_of(model(**inputs)).float()


def change(before: Tensor, after: Tensor) -> float:
    """Return the relative change of the output."""
    return ((after - before).abs().max() / before.abs().max().clamp_min(1e-30)).item()


def change_in_double(model: nn.Module, inputs: dict[str, Tensor], mode: str) -> float:
    """Return the relative change in fp64, where rounding is not amplified beyond the limit."""
    plain = copy.deepcopy(model).double()
    before = output_of(plain, inputs)
    return change(before, output_of(wrap(plain, mode, example_inputs=inputs), inputs))


def gradient_reaches(model: nn.Module, inputs: dict[str, Tensor]) -> str:
    """Return which connections get no gradient: one tensor of each after one backward, all after three steps."""
    parameters = [p for _, c in connections(model) for p in c.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=1e-2)
    target = torch.randn_like(output_of(model, inputs))
    reached: set[int] = set()
    for step in range(4):
        optimizer.zero_grad()
        torch.manual_seed(1)
        (logits_of(model(**inputs)).float() * target).mean().mul(1e3).backward()
        reached |= {id(p) for p in parameters if p.grad is not None and bool(p.grad.any())}
        for path, connection in connections(model) if step == 0 else ():
            if not any(id(p) in reached for p in connection.parameters()):
                return f"no gradient in {path}"
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
    idle = [f"{path}.{n}" for path, c in connections(model) for n, p in c.named_parameters() if id(p) not in reached]
    return f"no gradient in {idle[0]} ({len(idle)} tensors)" if idle else ""


def try_one(name: str, task: str, model_class: type[Any], config_class: type[Any]) -> Row:
    """Return what one architecture shows."""
    row = Row(name, task)
    try:
        model, inputs = build(model_class, config_class)
    except Exception as error:
        row.note = f"{type(error).__name__}: {str(error)[:100]}".replace("\n", " ").replace("|", "/")
        return row
    row.runs = True
    try:
        before = output_of(model, inputs)
        if change(before, output_of(model, inputs)) > 0:
            row.note = "its plain output differs from run to run; "
        row.sites = len(find_sites(model, inputs))
        for mode in ("dhc", "mhc"):
            wrapped = copy.deepcopy(model)
            wrap(wrapped, mode, example_inputs=inputs)
            difference = change(before, output_of(wrapped, inputs))
            if difference > LIMIT:
                row.note += f"{mode} {difference:.1e} in fp32, the table has fp64; "
                difference = change_in_double(model, inputs, mode)
            setattr(row, mode, difference)
            row.note += gradient_reaches(wrapped, inputs)
        row.gradient = "no gradient" not in row.note
        wrap(model, "dhc", example_inputs=inputs)
        row.restored = torch.equal(output_of(unwrap(model), inputs), before)
    except FlowscopeError as error:
        row.note += WHY.get(name, str(error)[:300].replace("\n", " ").replace("|", "/"))
    except Exception as error:
        row.note += f"{type(error).__name__}: {str(error)[:150]}".replace("\n", " ").replace("|", "/")
    return row


@contextlib.contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    """Raise TimeoutError in the main thread after some seconds."""

    def stop(*_: Any) -> None:
        raise TimeoutError(f"more than {seconds} s")

    previous = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)


def table(rows: list[Row]) -> str:
    """Return the page for docs/."""
    running = [row for row in rows if row.runs]
    passing = [row for row in running if row.passes]
    head = (
        "# The zoo: `wrap` on every text architecture of transformers\n\n"
        f"Written by `benchmarks/zoo.py` with torch {torch.__version__} and transformers {transformers.__version__}: "
        f"{len(running)} of {len(rows)} architectures run in a tiny random configuration; {len(passing)} of those pass "
        "everything: sites found, output kept within 1e-5 (relative) by `dhc` and `mhc`, gradient in every connection, "
        "`unwrap` bitwise exact.\n\n"
        "| architecture | task | sites | dhc change | mhc change | gradient | unwrap | note |\n"
        "|---|---|---|---|---|---|---|---|\n"
    )
    return head + "\n".join(str(row) for row in sorted(rows, key=lambda r: (not r.runs, r.passes, r.name))) + "\n"


def main(chosen: list[str]) -> int:
    """Run the zoo; the exit status says whether at least 200 architectures pass."""
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    rows = []
    for name, task, model_class, config_class in architectures(chosen):
        start = time.monotonic()
        try:
            with time_limit(SECONDS):
                row = try_one(name, task, model_class, config_class)
        except TimeoutError as error:
            row = Row(name, task, note=str(error))
        rows.append(row)
        print(row, f"{time.monotonic() - start:.1f} s", "" if row.passes else "<--", flush=True)
    if not chosen:
        (Path(__file__).parent.parent / "docs" / "zoo.md").write_text(table(rows))
    passing = sum(row.passes for row in rows)
    print(f"{len(rows)} architectures, {sum(row.runs for row in rows)} run, {passing} pass")
    return 0 if chosen or passing >= 200 else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
