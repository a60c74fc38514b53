"""A checkpoint carries the options that decide a connection's function; loading compares them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import wrap_models as models
from safetensors.torch import load_file, load_model, save_file
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

from flowscope.errors import FlowscopeError
from flowscope.merging.connection import Connection, ModeOptions
from flowscope.merging.saved_options import decode, encode
from flowscope.merging.wrapping import connections, wrap


def stack(mode: Any, block: Any = models.PreNormBlock, depth: int = 2, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    return wrap(models.Stack(block, depth), mode, example_inputs=models.hidden_states(), **options)


DIFFERENT = [
    # mode, saved with, loaded into, what the error must name
    ("keel", {"preserve": True}, {}, ["preserve=True", "preserve=False"]),
    ("keel", {"preserve": True, "init_bias": 2.0}, {"preserve": True, "init_bias": 1.0}, ["init_bias=[2.0, 2.0]"]),
    ("keel", {"gate": "token"}, {"gate": "feature"}, ["gate='token'"]),
    ("keel-postln", {"alpha": 3.0}, {}, ["alpha=[1.0, 1.0]", "alpha=[3.0, 3.0]"]),
    ("shc", {"reduce": "sum"}, {}, ["reduce='sum'"]),
    ("dhc", {"tanh": False}, {}, ["tanh=False"]),
    ("dhc", {"norm": "rms"}, {}, ["norm='rms'"]),
    ("dhc", {"streams": 2}, {"streams": 3}, ["streams=2", "streams=3"]),
    ("mhc", {"iterations": 5}, {}, ["iterations=5", "iterations=20"]),
    ("mhc", {"streams_init": "distinct"}, {}, ["streams_init='distinct'"]),
]


@pytest.mark.parametrize(("mode", "saved", "loaded", "named"), DIFFERENT)
def test_option_that_changes_the_function_is_named(mode: str, saved: Any, loaded: Any, named: list[str]) -> None:
    state = stack(mode, **saved).state_dict()
    model = stack(mode, **loaded)
    with pytest.raises(FlowscopeError) as error:
        model.load_state_dict(state)
    assert "blocks." in str(error.value)
    assert any(name in str(error.value) for name in named)
    other = stack(mode, **saved)
    assert str(other.load_state_dict(state)) == "<All keys matched successfully>"


def test_alpha_of_another_depth_is_named() -> None:
    """The default alpha is the number of sub-layers: 6, cut to 4."""
    deep, short = stack("keel-postln", depth=3), stack("keel-postln", depth=2)
    state = {key: value for key, value in deep.state_dict().items() if "blocks.2" not in key}
    with pytest.raises(FlowscopeError, match=r"blocks\.1\.connection .* alpha=\[6\.0, 6\.0\].*\[4\.0, 4\.0\]"):
        short.load_state_dict(state)
    alpha = stack("deepnorm", models.PostNormBlock, alpha=2.0).state_dict()
    with pytest.raises(FlowscopeError, match=r"alpha=\[2\.0, 2\.0\]"):
        stack("deepnorm", models.PostNormBlock).load_state_dict(alpha)


@pytest.mark.parametrize(("mode", "other"), [("keel", "highway"), ("shc", "dhc"), ("residual", "keel"), ("dhc", "mhc")])
def test_mode_is_named(mode: str, other: str) -> None:
    with pytest.raises(FlowscopeError, match=f"saved with mode='{mode}', .* wrapped with mode='{other}'"):
        stack(other).load_state_dict(stack(mode).state_dict(), strict=False)


@pytest.mark.parametrize(
    ("mode", "saved"),
    [
        ("keel", {"init_bias": -1.0}),
        ("dhc", {"init": "ramp", "dynamic_scale_init": 0.1, "output_scale": True}),
        ("mhc", {"init_diagonal": 1.0}),
    ],
)
def test_where_parameters_start_is_no_difference(mode: str, saved: dict[str, Any]) -> None:
    model, x = stack(mode, **saved), models.hidden_states()
    other = stack(mode)
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(x), model(x))


def test_checkpoint_without_options_loads_with_one_line(caplog: pytest.LogCaptureFixture) -> None:
    model, x = stack("dhc"), models.hidden_states()
    with torch.no_grad():
        next(connections(model)[0][1].parameters()).add_(0.3)
    old = {key: value for key, value in model.state_dict().items() if not key.endswith("_extra_state")}
    other = stack("dhc", depth=2)
    caplog.clear()
    for _ in range(2):
        assert str(other.load_state_dict(old, strict=True)) == "<All keys matched successfully>"
    assert caplog.messages == ["the checkpoint holds no options of its connections: whether they agree is not known"]
    assert torch.equal(other(x), model(x))


def test_options_through_files(tmp_path: Path) -> None:
    model = stack("mhc", iterations=7)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    stack("mhc", iterations=7).load_state_dict(load_file(tmp_path / "model.safetensors"), strict=True)
    assert load_model(stack("mhc", iterations=7), tmp_path / "model.safetensors") == (set(), [])
    with pytest.raises(FlowscopeError, match="iterations=7"):
        stack("mhc").load_state_dict(load_file(tmp_path / "model.safetensors"))
    torch.save(model.state_dict(), tmp_path / "model.pt")
    with pytest.raises(FlowscopeError, match="iterations=7"):
        stack("mhc").load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))


@pytest.mark.filterwarnings("ignore")  # torch says that it works in one process
def test_options_through_a_distributed_checkpoint(tmp_path: Path) -> None:
    """It loads in place into the model's own tensors: what counts is the model's options, not what lies there."""
    dcp.save(stack("dhc", tanh=False).state_dict(), checkpoint_id=tmp_path / "new")
    for tanh in (False, True):
        model = stack("dhc", tanh=tanh)
        state = model.state_dict()
        dcp.load(state, checkpoint_id=tmp_path / "new")
        if tanh:
            with pytest.raises(FlowscopeError, match="tanh=False"):
                model.load_state_dict(state)
        else:
            model.load_state_dict(state)
    old = {key: value for key, value in stack("dhc").state_dict().items() if not key.endswith("_extra_state")}
    dcp.save(old, checkpoint_id=tmp_path / "old")
    model = stack("dhc")
    state = model.state_dict()
    dcp.load(state, checkpoint_id=tmp_path / "old", planner=DefaultLoadPlanner(allow_partial_load=True))
    model.load_state_dict(state)


def test_options_are_no_parameter_and_no_buffer() -> None:
    model = stack("dhc")
    assert not list(model.buffers())
    extra = [value for key, value in model.state_dict().items() if key.endswith("_extra_state")]
    assert [value.shape for value in extra] == [(256,), (256,)]
    assert {value.dtype for value in extra} == {torch.uint8}


def test_averaged_checkpoints_keep_the_options() -> None:
    state = encode({"mode": "keel", "preserve": True})
    averaged = 0.9 * state.float() + 0.1 * state.float()
    assert decode(averaged) == {"mode": "keel", "preserve": True}
    assert decode(torch.zeros(256, dtype=torch.uint8)) is None
    assert decode(None) is None
    assert json.loads(bytes(state.tolist())) == {"mode": "keel", "preserve": True}


class Scaled(Connection):
    """A rule of one's own: `init` says where its parameters start, `power` what it computes."""

    mode = "scaled"

    class Options(ModeOptions):
        starting = ("init",)
        init: float = 1.0
        power: int = 1


def test_options_of_a_rule_of_ones_own() -> None:
    state = stack(Scaled, init=0.5, power=2).state_dict()
    stack(Scaled, init=1.0, power=2).load_state_dict(state)
    with pytest.raises(FlowscopeError, match="power=2"):
        stack(Scaled, init=0.5).load_state_dict(state)


class FSDPModule:
    """Stands for torch's: `fully_shard` puts it into a module's class."""


@pytest.fixture
def one_rank(tmp_path: Path) -> Any:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.skipif(os.name == "nt", reason="gloo by file")
def test_wrap_after_data_parallelism_is_refused(one_rank: None) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    x = models.hidden_states()
    parallel = nn.parallel.DistributedDataParallel(models.Stack(models.PreNormBlock))
    with pytest.raises(FlowscopeError, match=r"DDP\) already.*flowscope\.wrap\(model\), then DistributedDataParallel"):
        wrap(parallel, "keel", example_inputs=x)
    sharded = models.Stack(models.PreNormBlock)
    for block in sharded.blocks:
        fully_shard(block, mesh=init_device_mesh("cpu", (1,)))
    with pytest.raises(FlowscopeError, match=r"fully_shard \(FSDP2\) already"):
        wrap(sharded, "dhc", example_inputs=x)
    wrapped = wrap(models.Stack(models.PreNormBlock), "dhc", example_inputs=x)
    nn.parallel.DistributedDataParallel(wrapped)(x).sum().backward()


@pytest.mark.parametrize(
    ("mode", "block", "said"),
    [
        ("highway", models.PreNormBlock, "highway on pre-norm blocks learns far less"),
        ("mhc", models.PostNormBlock, "mhc on post-norm blocks did not learn"),
    ],
)
def test_traps_are_said(mode: str, block: Any, said: str, caplog: pytest.LogCaptureFixture) -> None:
    stack(mode, block)
    assert said in caplog.text
    caplog.clear()
    stack(mode, models.PostNormBlock if block is models.PreNormBlock else models.PreNormBlock)
    assert "did not learn" not in caplog.text
    assert "learns far less" not in caplog.text
