"""The table "mode x life" of docs/wrapping.md: each cell is one of these tests."""

from __future__ import annotations

import copy
import io
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import transformers
import wrap_models as models
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flowscope.merging.modes import MODES
from flowscope.merging.wrapping import connections, wrap

POST_NORM = {"deepnorm"}


class Stack(nn.Module):
    """Two blocks, checkpointed where asked."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(2))
        self.reentrant: bool | None = None

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        return x


def made(mode: str, seed: int = 0) -> Stack:
    """A wrapped model as if trained."""
    torch.manual_seed(0)
    model = Stack(models.PostNormBlock if mode in POST_NORM else models.PreNormBlock)
    wrap(model, mode, example_inputs=models.hidden_states())
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, connection in connections(model):
            for parameter in connection.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    return model.eval()


def same(model: Any, other: Any) -> None:
    x = models.hidden_states()
    torch.testing.assert_close(other(x), model(x))


def by_state_dict(mode: str, path: Path) -> None:
    model, other = made(mode), made(mode, 1)
    torch.save(model.state_dict(), path / "model.pt")
    other.load_state_dict(torch.load(path / "model.pt", weights_only=True), strict=True)
    same(model, other)


def by_deepcopy(mode: str, path: Path) -> None:
    same(made(mode), copy.deepcopy(made(mode)))


def by_pickle(mode: str, path: Path) -> None:
    model, stored = made(mode), io.BytesIO()
    same(model, pickle.loads(pickle.dumps(model)))
    torch.save(model, stored)
    stored.seek(0)
    same(model, torch.load(stored, weights_only=False))


def by_safetensors(mode: str, path: Path) -> None:
    model, other = made(mode), made(mode, 1)
    save_file(model.state_dict(), path / "model.safetensors")
    other.load_state_dict(load_file(path / "model.safetensors"), strict=True)
    same(model, other)


def by_distributed_checkpoint(mode: str, path: Path) -> None:
    model, other = made(mode), made(mode, 1)
    dcp.save(model.state_dict(), checkpoint_id=path / "dcp")
    state = other.state_dict()
    dcp.load(state, checkpoint_id=path / "dcp")
    other.load_state_dict(state, strict=True)
    same(model, other)


def language_model(mode: str) -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    if mode in POST_NORM:
        settings = transformers.BertConfig(**sizes, intermediate_size=48, is_decoder=True)
        model: Any = transformers.BertLMHeadModel(settings)
    else:
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, intermediate_size=48))
    wrap(model, mode, example_inputs={"input_ids": torch.arange(8).reshape(1, 8) + 3})
    return model.eval()


def by_save_pretrained(mode: str, path: Path) -> None:
    model, other, ids = language_model(mode), language_model(mode), torch.arange(8).reshape(1, 8) + 3
    with torch.no_grad():
        for _, connection in connections(model):
            for parameter in connection.parameters():
                parameter.add_(0.05)
    model.save_pretrained(path)
    other.load_state_dict(load_file(path / "model.safetensors"), strict=False)  # tied weights are saved once
    torch.testing.assert_close(other(input_ids=ids).logits, model(input_ids=ids).logits)


def by_lora(mode: str, path: Path) -> None:
    peft = pytest.importorskip("peft")
    model, base, ids = language_model(mode), language_model(mode), torch.arange(8).reshape(1, 8) + 3
    names = ["query", "value"] if mode in POST_NORM else ["q_proj", "v_proj"]
    settings = peft.LoraConfig(target_modules=names, modules_to_save=["connection"], r=2, init_lora_weights=False)
    adapted = peft.get_peft_model(model, settings)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            assert parameter.requires_grad == ("lora" in name or "modules_to_save" in name)
            if "connection" in name:
                parameter.add_(0.05)
    adapted.save_pretrained(path)
    loaded = peft.PeftModel.from_pretrained(base, path)
    torch.testing.assert_close(loaded.eval()(input_ids=ids).logits, adapted.eval()(input_ids=ids).logits)


def by_generate(mode: str, path: Path) -> None:
    model, ids = language_model(mode), torch.arange(8).reshape(1, 8) + 3
    settings: dict[str, Any] = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    cached = model.generate(ids, use_cache=True, **settings)
    assert torch.equal(cached, model.generate(ids, use_cache=False, **settings))


def by_export(mode: str, path: Path, strict: bool = False) -> None:
    model, x = made(mode), models.hidden_states()
    batch = torch.export.Dim("batch", min=2, max=64)
    exported = torch.export.export(model, (x,), dynamic_shapes=({0: batch},), strict=strict).module()
    other = torch.randn(7, *x.shape[1:])
    torch.testing.assert_close(exported(other), model(other))


def by_strict_export(mode: str, path: Path) -> None:
    by_export(mode, path, strict=True)


def gradients(model: Any) -> list[Tensor]:
    x = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(4)).requires_grad_()
    model.zero_grad()
    model(x).square().sum().backward()
    found = {n.removeprefix("module."): p.grad for n, p in model.named_parameters() if p.grad is not None}
    return [torch.as_tensor(getattr(g, "full_tensor", lambda g=g: g)()) for _, g in sorted(found.items())]


def by_checkpointing(mode: str, path: Path) -> None:
    model = made(mode)
    expected = [g.clone() for g in gradients(model)]
    for reentrant in (True, False):
        model.reentrant = reentrant
        torch.testing.assert_close(gradients(model), expected)


def by_compile(mode: str, path: Path) -> None:
    torch._dynamo.reset()
    model = made(mode)
    expected = [g.clone() for g in gradients(model)]
    compiled = torch.compile(copy.deepcopy(model), backend="aot_eager", fullgraph=True)
    same(model, compiled)
    torch.testing.assert_close(gradients(compiled), expected)


def by_ddp(mode: str, path: Path) -> None:
    model = made(mode)
    expected = [g.clone() for g in gradients(model)]
    torch.testing.assert_close(gradients(nn.parallel.DistributedDataParallel(copy.deepcopy(model))), expected)


def by_fsdp2(mode: str, path: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = made(mode)
    expected = [g.clone() for g in gradients(model)]
    sharded = copy.deepcopy(model)
    for block in sharded.blocks:
        fully_shard(block, mesh=init_device_mesh("cpu", (1,)))
    fully_shard(sharded, mesh=init_device_mesh("cpu", (1,)))
    torch.testing.assert_close(gradients(sharded), expected)


LIVES: dict[str, Callable[[str, Path], None]] = {
    "state_dict": by_state_dict,
    "deepcopy": by_deepcopy,
    "pickle": by_pickle,
    "safetensors": by_safetensors,
    "save_pretrained": by_save_pretrained,
    "DCP": by_distributed_checkpoint,
    "LoRA": by_lora,
    "generate, cache": by_generate,
    "export, dynamic batch": by_export,
    "strict export": by_strict_export,
    "checkpointing": by_checkpointing,
    "compile": by_compile,
    "DDP": by_ddp,
    "FSDP2": by_fsdp2,
}


@pytest.fixture(scope="module", autouse=True)
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A group of one process."""
    store = torch.distributed.FileStore(str(tmp_path_factory.mktemp("group") / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("life", LIVES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.filterwarnings("ignore")
def test_life(mode: str, life: str, tmp_path: Path) -> None:
    LIVES[life](mode, tmp_path)


def test_the_table_is_of_these_tests() -> None:
    page = (Path(__file__).resolve().parents[1] / "docs" / "wrapping.md").read_text()
    header, _, *rows = re.findall(r"^\|.*\|$", page.split("## A life", 1)[1].split("\n## ", 1)[0], re.MULTILINE)
    assert [cell.strip() for cell in header.split("|")[2:-1]] == list(LIVES)
    cells = {row.split("|")[1].strip().strip("`"): {c.strip() for c in row.split("|")[2:-1]} for row in rows}
    assert cells == {mode: {"yes"} for mode in MODES}
