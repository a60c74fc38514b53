"""Loops people write and public bug reports of other monitors, each on the right number.

The numbers are those of public issues (which repository, which symptom: docs/troubleshooting.md names the outcome):

| report | trigger | test |
|---|---|---|
| 1, 2 | watch, then torch.compile: no host read, no graph break | test_compile: two_graphs, buffers_stay |
| 3, 4 | hooks added after the first compiled call | test_compile: attached_after |
| 6 | in-place operation right behind a hooked module | test_watch_cases: inplace_relu_modules, an_inplace_operation |
| 7 | a module that returns its input | test_watch_cases: a_module_that_returns_its_input |
| 8 | dict, list, dataclass outputs | test_watch_cases: structured_outputs |
| 10 | evaluation with hooks attached | test_watch_cases: evaluation_between_steps; here: generation |
| 11 | a shared layer in and out of a checkpoint | test_watch_calls: a_shared_block_in_and_out |
| 12 | blocks recomputed in backward | test_watch_calls: checkpointing_gives_every_number |
| 13, 15 | create_graph=True, cycles, leaks | test_watch_cases: create_graph; test_watch_changes: ten_thousand |
| 16 | torch.save and deepcopy while attached, spawned workers | test_watch_cases: saving_copying; here: spawned |
| 18, 19 | scaled gradients, fused optimizers that unscale inside | test_watch_edges: scaled_gradients; test_precision |
| 21, 22 | gradients of FSDP2's DTensors, norms that add up | test_ranks: sharded |
| 24 | DataParallel and DDP | here: data_parallel; test_ranks |
| 25 | a module used twice | test_watch_calls: a_relu_used_twice, a_module_called_three_times |
| 26 | frozen backbone | test_watch_cases: a_frozen_backbone |
| 27 | inner hooks that never fire | test_watch_cases: torch_attention; test_compile: called_past |
| 28 | bf16, complex, integer and sparse parameters | test_watch_cases: parameters_of_every_kind; here: integer |
| 29 | inf and NaN gradients | test_watch_cases: nonfinite_gradients; test_detectors_finiteness |
| 31 | step time and memory that grow | test_watch_changes: ten_thousand; here: payload |
| 33 | hyper-connections with NaN | test_connection_training: one_group; test_connections_manifold: overflow |
| 34 | mixing matrices that stay where they start | test_connections_manifold: gets_gradient_and_moves |

Axis letters: B batch, T tokens, D features.
"""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from watch_models import IN, OUT, B, Block, D, Stack, T, close_to, data, loss_of, norms, sgd, truth, watched

pytestmark = pytest.mark.usefixtures("strict")


# -- two backwards a step


class Sharpness(torch.optim.Optimizer):
    """SAM: climb by the first gradient, take the second there, step from where it began."""

    def __init__(self, parameters: Any, base: type[torch.optim.Optimizer], rho: float, **options: Any) -> None:
        super().__init__(parameters, {"rho": rho, **options})
        self.base = base(self.param_groups, **options)

    @torch.no_grad()
    def first_step(self, *, to_none: bool) -> None:
        held = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        length = torch.stack([p.grad.norm() for p in held]).norm()
        for p in held:
            self.state[p]["climb"] = self.param_groups[0]["rho"] * p.grad / length
            p.add_(self.state[p]["climb"])
        self.zero_grad(set_to_none=to_none)

    @torch.no_grad()
    def second_step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(self.state[p]["climb"])
        self.base.step()


@pytest.mark.parametrize("to_none", [True, False])
def test_sam_shows_the_gradient_it_steps_with(to_none: bool) -> None:
    model = Stack(3)
    optimizer = Sharpness(model.parameters(), torch.optim.SGD, rho=0.5, lr=0.1)
    with watched(model, optimizer.base) as scope:
        for step in range(3):
            optimizer.zero_grad(set_to_none=to_none)
            loss_of(model, data(step)).backward()
            optimizer.first_step(to_none=to_none)
            expected = norms(truth(model, data(step)))
            loss_of(model, data(step)).backward()
            gradients = [float(p.grad.norm()) for p in model.parameters()]
            optimizer.second_step()
            record = scope.records[step]
            close_to(record["grad_norm"], expected)
            close_to(record["param_grad_norm"], gradients)
            assert (record["backward_calls"] == 1).all()


def test_gradients_set_to_zero_instead_of_none() -> None:
    model = Stack(3)
    optimizer = sgd(model)
    with watched(model, optimizer) as scope:
        for step in range(3):
            optimizer.zero_grad(set_to_none=False)
            expected = norms(truth(model, data(2 * step)), truth(model, data(2 * step + 1)))
            for i in range(2):
                loss_of(model, data(2 * step + i)).backward()
            gradients = [float(p.grad.norm()) for p in model.parameters()]
            optimizer.step()
            close_to(scope.records[step]["grad_norm"], expected)
            close_to(scope.records[step]["param_grad_norm"], gradients)


# -- exceptions, Ctrl-C


class Interrupted(nn.Module):
    """Raises as a signal would, in the middle of the forward or the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.fail = nn.Linear(D, D), ""

    def forward(self, x: Tensor) -> Tensor:
        if self.fail == "forward":
            raise KeyboardInterrupt
        x = self.fc(x)
        if self.fail == "backward":
            x.register_hook(self.interrupt)
        return x + 0.0

    def interrupt(self, gradient: Tensor) -> None:
        raise KeyboardInterrupt


@pytest.mark.parametrize("place", ["forward", "backward"])
def test_ctrl_c_goes_through_and_the_scope_closes(place: str, tmp_path: Path) -> None:
    model = Stack(3, Interrupted)
    optimizer = sgd(model)
    scope = watched(model, optimizer, log_dir=tmp_path)
    loss_of(model, data()).backward()
    optimizer.step()
    model.blocks[1].fail = place
    with pytest.raises(KeyboardInterrupt), scope:
        loss_of(model, data(1)).backward()
    assert [r.step for r in scope.records] == [0]
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    lines = [json.loads(line) for line in (tmp_path / "flowscope.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["type"] == "record"] == [0]


class Failing(torch.optim.SGD):
    fail = False

    def step(self, closure: Any = None) -> None:
        if self.fail:
            raise MemoryError("in the middle of the step")
        super().step(closure)


def test_an_optimizer_that_fails_leaves_nothing_in_the_next_step() -> None:
    model = Stack(3)
    optimizer = Failing(model.parameters(), 0.1)
    with watched(model, optimizer) as scope:
        for k in range(3):
            optimizer.zero_grad()
            optimizer.fail = k == 1
            expected = norms(truth(model, data(k)))
            loss_of(model, data(k)).backward()
            if optimizer.fail:
                with pytest.raises(MemoryError):
                    optimizer.step()
            else:
                optimizer.step()
                close_to(scope.records[-1]["grad_norm"], expected)
    assert [r.step for r in scope.records] == [0, 1]


# -- what comes and goes


def test_lazy_layers_are_recorded_from_their_first_step_on() -> None:
    model = nn.Sequential(nn.LazyLinear(D), nn.Tanh(), nn.LazyLinear(OUT))
    with watched(model) as scope:
        model(data()[0])  # the shapes are known now
        optimizer = sgd(model)
        loss_of(model, data()).backward()
        gradients = [float(p.grad.norm()) for p in model.parameters()]
        optimizer.step()
    record = scope.records[0]
    assert record.labels("param_grad_norm") == ["0.weight", "0.bias", "2.weight", "2.bias"]
    close_to(record["param_grad_norm"], gradients)


def test_modules_added_renamed_and_removed_while_attached() -> None:
    model = Stack(2)
    model.extra = nn.Linear(D, D)
    with watched(model, sgd(model)) as scope:
        loss_of(model, data()).backward()
        scope.optimizers[0].step()
        first = scope.records[0]
        model.tail = model.head  # renamed: the head is called by another name from here on
        del model.extra
        model.blocks.append(Block())
        forward = type(model).forward
        model.forward = lambda x: renamed(model, x)  # type: ignore[method-assign]
        optimizer = sgd(model)
        optimizer.zero_grad()
        del model.head
        loss_of(model, data(1)).backward()
        gradients = {name: float(p.grad.norm()) for name, p in model.named_parameters()}
        norm = {name: float(p.detach().norm()) for name, p in model.named_parameters()}
        optimizer.step()
        record = scope.records[1]
    assert forward is Stack.forward
    seen = dict(zip(record.labels("param_grad_norm"), record["param_grad_norm"], strict=True))
    held = dict(zip(record.labels("param_norm"), record["param_norm"], strict=True))
    assert len(seen) == len(first["param_grad_norm"]) + len(list(Block().parameters()))
    for name, value in gradients.items():
        assert seen[name] == pytest.approx(value, rel=1e-5), name
        assert held[name] == pytest.approx(norm[name], rel=1e-5), name
    assert np.isnan(seen["extra.weight"])
    assert "extra.weight" not in gradients
    assert any("blocks.2.norm.weight" in note for note in record.notes)


def renamed(model: nn.Module, x: Tensor) -> Tensor:
    x = model.embed(x)
    for block in model.blocks:
        x = block(x)
    return model.tail(x)


def test_an_averaged_copy_made_and_updated_while_attached() -> None:
    model = Stack(3)
    optimizer = sgd(model)
    with watched(model, optimizer) as scope:
        ema = torch.optim.swa_utils.get_ema_multi_avg_fn(0.5)
        average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=ema)
        for step in range(3):
            expected = norms(truth(model, data(step)))
            optimizer.zero_grad()
            loss_of(model, data(step)).backward()
            optimizer.step()
            average.update_parameters(model)
            loss_of(average, data(50 + step)).backward()  # deposits nowhere
            close_to(scope.records[step]["grad_norm"], expected)
    assert all((r["backward_calls"] == 1).all() for r in scope.records)


def test_generation_between_steps_counts_nowhere() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=17, n_positions=16, n_embd=D, n_layer=3, n_head=2, bos_token_id=0)
    config.eos_token_id = config.pad_token_id = None
    model = transformers.GPT2LMHeadModel(config)
    ids = torch.randint(0, 17, (B, T))
    optimizer = sgd(model)
    with watched(model, optimizer) as scope:
        for step in range(2):
            twin = copy.deepcopy(model).train()
            states = twin(input_ids=ids, labels=ids, output_hidden_states=True)
            model.train()
            optimizer.zero_grad()
            if step:
                model.eval()
                model.generate(ids, max_new_tokens=4, do_sample=False)
                model.train()
            torch.manual_seed(step)
            model(input_ids=ids, labels=ids).loss.backward()
            if not step:
                model.eval()
                model.generate(ids, max_new_tokens=4, do_sample=False)
                model.train()
            optimizer.step()
            record = scope.records[step]
            assert (record["backward_calls"] == 1).all(), step
            assert (record["forward_calls"] == 1).all(), step
            assert len(record["grad_norm"]) == len(states.hidden_states)
            assert np.isfinite(record["grad_norm"]).all()
            gradients = [float(p.grad.norm()) for p in model.parameters()]
            close_to(record["param_grad_norm"], gradients)


# -- the remaining reports


def test_data_parallel_on_the_host_is_the_module_itself() -> None:
    model = Stack(3)
    parallel = nn.DataParallel(model)
    optimizer = sgd(model)
    expected = norms(truth(model, data()))
    with watched(parallel, optimizer) as scope:
        loss_of(parallel, data()).backward()
        optimizer.step()
    close_to(scope.records[0]["grad_norm"], expected)
    assert scope.records[0].labels("grad_norm")[-1] == "blocks.2"


def test_integer_parameters_are_left_out() -> None:
    class Quantised(Stack):
        def __init__(self) -> None:
            super().__init__(2)
            self.table = nn.Parameter(torch.arange(6, dtype=torch.int8), requires_grad=False)

    model = Quantised()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
    with watched(model, optimizer) as scope:
        loss_of(model, data()).backward()
        gradients = [float(p.grad.norm()) for p in model.parameters() if p.requires_grad]
        optimizer.step()
    assert "table" not in scope.records[0].labels("param_norm")
    close_to(scope.records[0]["param_grad_norm"], gradients)


SPAWNED = """
import sys
sys.path.insert(0, {tests!r})
import torch
from torch.utils.data import DataLoader, Dataset
from watch_models import Stack, data, loss_of, watched

class Features(Dataset):
    def __init__(self, model):
        self.model = model          # goes to the worker with its hooks' stand-ins

    def __len__(self):
        return 3

    def __getitem__(self, i):
        with torch.no_grad():
            return self.model(data(i)[0]).sum()

if __name__ == "__main__":
    torch.manual_seed(0)
    model = Stack(2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with watched(model, optimizer) as scope:
        loader = DataLoader(Features(model), num_workers=1, multiprocessing_context="spawn")
        inside = torch.cat(list(loader))
        outside = torch.stack([model(data(i)[0]).sum() for i in range(3)]).detach()
        torch.testing.assert_close(inside, outside)
        loss_of(model, data()).backward()
        optimizer.step()
        assert (scope.records[0]["backward_calls"] == 1).all()
    print("worker and trainer agree")
"""


def test_a_spawned_worker_gets_the_watched_model(tmp_path: Path) -> None:
    script = tmp_path / "spawned.py"
    script.write_text(SPAWNED.format(tests=str(Path(__file__).parent)))
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "worker and trainer agree" in done.stdout


def test_the_payload_of_a_record_grows_with_the_layers_not_with_the_weights(tmp_path: Path) -> None:
    def bytes_of(width: int) -> int:
        layers = [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(4)]
        model, folder = nn.Sequential(nn.Linear(IN, width), *layers, nn.Linear(width, OUT)), tmp_path / str(width)
        optimizer = sgd(model)
        with watched(model, optimizer, log_dir=folder, config={"slow_every": 0}):
            for step in range(3):
                optimizer.zero_grad()
                loss_of(model, data(step)).backward()
                optimizer.step()
        records = [line for line in (folder / "flowscope.jsonl").read_text().splitlines() if '"record"' in line[:20]]
        assert len(records) == 3
        return max(map(len, records))

    narrow, wide = bytes_of(6), bytes_of(96)
    assert wide < 1.2 * narrow  # 256 times the weights
    assert wide < 20_000
