"""Two ranks on gloo, started by torch's launcher: the record of all ranks is that of one process on the whole batch.

Each test starts one program (tests/ranks_program.py) that goes through many scenarios, and compares what both ranks
recorded with one process here: gradients from torch.autograd on an unwatched copy, the rest from a watched run.
"""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ranks_models import Batch, batches, build, share, train
from torch import Tensor, nn
from two_ranks import RANKS, torchrun, without_launcher

import flowscope
from flowscope.sums.payload import digits, pack, packed_size, unpack

LIMIT = 170
TOLERANCE = 1e-5
FROM_ONE = {"effective_rank", "cosine_matrix", "rank_gap"}
"""Of the first rank, or of ranks only: not in a single process' record, or not the same."""
PER_BATCH = {"sample_cosine", "top_channel", "top_channel_share"} | {
    f"output_{name}" for name in ("spread", "contrast", "deviation")
}
"""Between the samples that one rank sees, as between those of a micro-batch; of the largest channel of each."""
TO_THE_BIT = {"exact_states", "exact_gradients", "exact_weights", "exact_param_gradients", "exact_updated"}
"""Checksum, squares, projections: of sums in another order the first is another."""
OF_A_PROCESS = {"random_state", "optimizer_options", "exact_inputs", "exact_modules", "replay_drew", "input_checksum"}
"""What was drawn, given and called in one process; of the inputs, how many tensors they came in."""
BUCKETED = {"cosine", "cosine_p05", "cosine_p95"}

Result = dict[str, Any]


def launched(strategy: str, folder: Path) -> dict[str, tuple[Result, Result]]:
    """Run a strategy's scenarios on two ranks: name -> what each rank says."""
    torchrun("ranks_program.py", strategy, str(folder), limit=LIMIT, PYTHONWARNINGS="ignore")
    first, second = (json.loads((folder / f"{strategy}-{rank}.json").read_text()) for rank in RANKS)
    return {name: (first[name], second[name]) for name in first}


def same(record: Result, other: Result, ignored: set[str] = frozenset(), *, loss: bool = True) -> None:  # type: ignore[assignment]
    """Compare two records metric by metric."""
    ours, theirs = record["metrics"], other["metrics"]
    where, ignored = f"step {record['step']}", ignored | PER_BATCH | OF_A_PROCESS
    assert record["step"] == other["step"]
    assert set(ours) - FROM_ONE - ignored == set(theirs) - FROM_ONE - ignored, where
    for name in set(theirs) - FROM_ONE - ignored:
        base = name.partition("@")[0]
        a, b = np.array(ours[name], dtype=float), np.array(theirs[name], dtype=float)
        if base == "step_losses" and not loss:
            a, b = a[:-1], b[:-1]
        if base in TO_THE_BIT:  # beside the norm: projections may be near zero
            size = np.sqrt(np.maximum(a[:, 1:2], b[:, 1:2])) + 1e-30
            a, b = (np.concatenate([x[:, 1:2] / size**2, x[:, 2:6] / size], 1) for x in (a, b))
            np.testing.assert_allclose(a, b, atol=1e-4, err_msg=f"{where} {name}")
            continue
        tolerance, less = TOLERANCE, 0.0
        if base in BUCKETED:  # within 10 % of 1 - cos: a value at a bucket's edge may fall into the next
            a, b, tolerance, less = 1 - a, 1 - b, 0.2, 1e-5
        np.testing.assert_allclose(
            a, b, rtol=tolerance, atol=less or 1e-7 * np.nanmax(np.abs(b), initial=0.0), err_msg=f"{where} {name}"
        )
    if loss:
        assert record["loss"] == pytest.approx(other["loss"], rel=TOLERANCE), where


def same_on_both(result: tuple[Result, Result], *, loss: bool = False) -> None:
    """Both ranks have the same record, to the last digit; the last one's loss may be each rank's own."""
    first, second = (r["records"] for r in result)
    assert [r["step"] for r in first] == [r["step"] for r in second]
    for number, (a, b) in enumerate(zip(first, second, strict=True)):
        last = number == len(first) - 1 and not loss
        assert a["flags"] == b["flags"] == []
        for name in (set(a["metrics"]) | set(b["metrics"])) - OF_A_PROCESS:
            if last and name == "step_losses":
                continue  # the first rank's come back with the next sum
            np.testing.assert_array_equal(a["metrics"][name], b["metrics"][name], err_msg=name)
        if not last:
            assert a["loss"] == b["loss"]
        else:
            assert any("own" in note for note in a["notes"])


def as_one(
    result: tuple[Result, Result], single: Result, ignored: set[str] = frozenset(), *, loss: bool = False
) -> None:  # type: ignore[assignment]
    same_on_both(result, loss=loss)
    ours, theirs = result[0]["records"], single["records"]
    assert len(ours) == len(theirs)
    for number, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        same(a, b, ignored, loss=loss or number < len(ours) - 1)


def truth(model: nn.Module, parts: list[tuple[Batch, dict[str, Any]]]) -> Result:
    """Gradients of the mean of the parts' losses: norms at x_0 ... x_L and of the parameters, by autograd alone."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    squares: list[list[Tensor]] = []
    total = torch.zeros(())
    for (x, y), extra in parts:
        taps: list[Tensor] = []
        loss = nn.functional.mse_loss(model(x, taps, **extra), y) / len(parts)
        gradients = torch.autograd.grad(loss, taps, retain_graph=True)
        squares.append([g.double().square().sum() for g in gradients])
        total = total + loss
    gradients = torch.autograd.grad(total, [p for _, p in named], allow_unused=True)
    return {
        "loss": float(total.detach()),
        "grad_norm": torch.stack([sum(s) for s in zip(*squares, strict=True)]).sqrt().tolist(),  # type: ignore[arg-type]
        "parameters": {
            n: None if g is None else float(g.double().norm()) for (n, _), g in zip(named, gradients, strict=True)
        },
        "gradients": dict(zip((n for n, _ in named), gradients, strict=True)),
    }


def against_autograd(result: Result, model: nn.Module, steps: list[list[tuple[Batch, dict[str, Any]]]]) -> None:
    """Every record's gradient norms, and the updates of plain SGD, against autograd on an unwatched model."""
    assert len(result["records"]) == len(steps)
    for record, parts in zip(result["records"], steps, strict=True):
        expected, metrics = truth(model, parts), record["metrics"]
        norm = np.array(expected["grad_norm"])
        np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=TOLERANCE)
        np.testing.assert_allclose(metrics["gradient_product"], norm / norm[-1], rtol=TOLERANCE)
        labels = record["labels"]["param_grad_norm"]
        assert labels == [name for name, _ in model.named_parameters()]
        held = dict(model.named_parameters())
        for at, name in enumerate(labels):
            gradient, weight = expected["parameters"][name], held[name].detach()
            found = {m: metrics[m][at] for m in ("param_grad_norm", "param_norm", "update_ratio")}
            assert found["param_norm"] == pytest.approx(float(weight.double().norm()), rel=TOLERANCE), name
            if gradient is None:
                assert np.isnan(found["param_grad_norm"]), name
                continue
            assert found["param_grad_norm"] == pytest.approx(gradient, rel=TOLERANCE), name
            if bool(weight.any()):  # from fp32 weights, the change itself is rounded
                assert found["update_ratio"] == pytest.approx(0.1 * gradient / float(weight.norm()), rel=1e-3), name
        with torch.no_grad():
            for name, gradient in expected["gradients"].items():
                if gradient is not None:
                    held[name] -= 0.1 * gradient


def whole(count: int = 4) -> list[list[tuple[Batch, dict[str, Any]]]]:
    return [[(batch, {})] for batch in batches(count)]


def halves(extra: list[dict[str, Any]]) -> list[list[tuple[Batch, dict[str, Any]]]]:
    return [
        list(zip(both, extra, strict=True)) for both in zip(*(share(batches(), rank) for rank in RANKS), strict=True)
    ]


def wrapped(mode: str, *, post: bool = False) -> Result:
    model = flowscope.wrap(build(post=post), mode=mode, example_inputs=batches(1)[0][0])
    return train(model, batches())


def test_ddp(tmp_path: Path) -> None:
    results = launched("ddp", tmp_path)
    single = train(build(), batches())
    for name in ("outer", "inner_after", "inner_before", "static"):
        as_one(results[name], single)
        against_autograd(results[name][1], build(), whole())
    as_one(results["loss_first"], train(build(), batches(), loss_first=True), loss=True)
    calls = {"forward_calls", "backward_calls", "tracked_calls"}
    as_one(results["accumulate"], single, calls)
    assert results["accumulate"][0]["records"][2]["metrics"]["backward_calls"] == [2.0] * 5
    same_on_both(results["unused"])
    against_autograd(results["unused"][0], build(branches=True), halves([{"branch": True}, {"branch": False}]))
    for mode in ("keel", "dhc"):
        as_one(results[mode], wrapped(mode))
    as_one(results["postln"], wrapped("keel-postln", post=True))
    sparse(results["sparse"])
    written(results["files"])


def sparse(result: tuple[Result, Result]) -> None:
    """Steps 0, 3 and 6 of seven are sampled; the records hold the mean loss over both ranks of all steps between."""
    single = train(build(), batches(7), every=lambda step: step in (0, 3, 6))
    as_one(result, single)
    assert [r["step"] for r in result[0]["records"]] == [0, 3, 6]
    losses, model = [], build()
    for parts in whole(7):
        expected = truth(model, parts)
        losses.append(expected["loss"])
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if (gradient := expected["gradients"].get(name)) is not None:
                    parameter -= 0.1 * gradient
    for result_of_rank in result:
        np.testing.assert_allclose(result_of_rank["records"][1]["metrics"]["step_losses"], losses[1:4], rtol=TOLERANCE)


def written(result: tuple[Result, Result]) -> None:
    first, second = result
    assert "flowscope.jsonl" in first["files"]
    assert len(first["files"]) == 2  # and the one of TensorBoard
    assert second["files"] == []
    assert first["heard"] > 4
    assert second["heard"] == 0
    assert first["kinds"][0] == second["kinds"][0] == "non_finite"
    assert first["kinds"] == second["kinds"]
    # the NaN was in the second rank's half of step 4
    assert first["stopped"] == second["stopped"] == 6
    assert np.isnan(first["records"][4]["loss"])


def test_sharded(tmp_path: Path) -> None:
    results = launched("sharded", tmp_path)
    single = train(build(), batches())
    # of a rank's own rows, and what is not read of sharded gradients: NaN
    rows = {"weight_spread", "grad_carried", "clip_ratio", "param_grad_norm_raw"}
    for name in ("outer", "before"):
        as_one(results[name], single, rows)
        against_autograd(results[name][0], build(), whole())
    as_one(results["accumulate"], single, rows | {"forward_calls", "backward_calls", "tracked_calls"})
    # inside a divided layer the first rank sees its own units
    as_one(results["tensor_parallel"], single, rows | {"dead_fraction", "dead_lasting"})
    against_autograd(results["tensor_parallel"][1], build(), whole())
    against_autograd(results["compiled"][1], build(), whole())
    fsdp1(results["fsdp1"], results["fsdp1_names"])
    for mode in ("keel", "dhc"):
        as_one(results[mode], wrapped(mode), rows)
    clipped = train(build(), batches(), before_step=lambda model: flowscope.clip_grad_norm_(model, 0.05))
    as_one(results["clipped"], clipped, rows)
    for record in results["clipped"][0]["records"]:
        total = np.sqrt(np.nansum(np.square(record["metrics"]["param_grad_norm"])))
        assert total == pytest.approx(0.05, rel=1e-4)


def fsdp1(flat: tuple[Result, Result], names: tuple[Result, Result]) -> None:
    """FSDP1: shards add up; without the parameters' own names a row is a wrapped module's flat parameter."""
    for result in (flat, names):
        same_on_both(result)
        assert [rank["alerts"] for rank in result] == [[], []]
        assert not any("rank_gap" in record["metrics"] for record in result[0]["records"])
    against_autograd(names[1], build(), whole())
    expected, record = truth(build(), whole()[0]), flat[1]["records"][0]
    norm = np.array(expected["grad_norm"])
    np.testing.assert_allclose(record["metrics"]["grad_norm"], norm, rtol=TOLERANCE)
    for label, found in zip(record["labels"]["param_grad_norm"], record["metrics"]["param_grad_norm"], strict=True):
        place = label.removesuffix("_flat_param")
        inside = [n for n in expected["parameters"] if (n.startswith(place) if place else not n.startswith("blocks."))]
        assert found == pytest.approx(np.sqrt(sum(expected["parameters"][n] ** 2 for n in inside)), rel=TOLERANCE)


def test_ranks_that_do_not_belong_together(tmp_path: Path) -> None:
    results = launched("apart", tmp_path)
    for name in ("other_schedules", "other_models", "own_pace"):
        for result in results[name]:
            assert all(record["flags"] == ["local"] for record in result["records"])
    only = results["only_first_watches"][0]["records"]
    assert [record["flags"] for record in only] == [["local"]] * 4
    # a rank's own numbers are those of its half of the batch
    own = truth(build(), [(share(batches(), 0)[0], {})])
    np.testing.assert_allclose(only[0]["metrics"]["grad_norm"], own["grad_norm"], rtol=TOLERANCE)
    assert [len(r["records"]) for r in results["own_pace"]] == [3, 7]

    first, second = results["one_closes"]
    assert [r["flags"] for r in first["records"]] == [[], [], ["local"], ["local"]]
    assert [r["flags"] for r in second["records"]] == [[], []]
    first, second = results["one_pauses"]
    assert [r["step"] for r in second["records"]] == [0, 2, 3]
    assert "1 of 2 ranks observed this step" in first["records"][1]["notes"]
    for a, b in zip((first["records"][k] for k in (0, 2, 3)), second["records"], strict=True):
        np.testing.assert_array_equal(a["metrics"]["grad_norm"], b["metrics"]["grad_norm"])
    # what runs out of batches enters no sum: inside of Join the records are each rank's own
    first, second = results["uneven"]
    assert first["flags"] == [[], [], *[["local"]] * 4]
    assert second["flags"] == [[], [], *[["local"]] * 2]
    # the other rank slept for six seconds
    alone = results["closes_alone"][0]
    assert alone["seconds"] < 4.0
    assert alone["flags"] == [[], [], [], ["local"]]
    replicas(results)


def replicas(results: dict[str, tuple[Result, Result]]) -> None:
    gaps = {
        name: [max(record["metrics"]["rank_gap"]) for record in results[name][1]["records"]]
        for name in ("in_sync", "past_the_wrapper", "lost_payloads", "local_clipping")
    }
    assert gaps["in_sync"] == [0.0] * 12
    # norms are those before the step: what happens in step 4 shows in step 5
    assert gaps["past_the_wrapper"][:5] == [0.0] * 5
    assert min(gaps["past_the_wrapper"][5:]) > 1e-3
    for name in ("lost_payloads", "local_clipping"):
        assert gaps[name][0] == 0.0
        assert min(gaps[name][1:]) > 1e-4
    labels = results["lost_payloads"][0]["records"][-1]["labels"]["rank_gap"]
    assert labels == [name for name, _ in build().named_parameters()]


@pytest.mark.parametrize("name", ["SIGKILL", "SIGTERM"])
def test_a_rank_that_dies_ends_the_other_by_the_frameworks_own_error(tmp_path: Path, name: str) -> None:
    told = {}
    for twin in ("bare", "watched"):
        folder = tmp_path / twin
        folder.mkdir()
        environment = {"RANKS_BARE": "1"} if twin == "bare" else {}
        number = getattr(signal, name)
        environment |= {"WORLD_SIZE": "2", "RANKS_STORE": str(folder / "store"), "RANKS_SIGNAL": str(int(number))}
        ended = without_launcher("ranks_program.py", "death", str(folder), limit=LIMIT, **environment)
        (first, out), (second, _) = ended
        assert second == -number
        assert first == 0, out
        told[twin] = json.loads((folder / "death-0.json").read_text())["dies"]
    assert told["watched"]["error"].startswith("RuntimeError")
    assert "flowscope" not in told["watched"]["error"]
    assert told["watched"]["records"] == 2
    # far less than the sixty seconds after which gloo itself gives up
    assert told["watched"]["seconds"] < told["bare"]["seconds"] + 5.0


def test_the_life_of_a_job(tmp_path: Path) -> None:
    single = build()
    optimizer = torch.optim.SGD(single.parameters(), 0.1)
    with flowscope.watch(single, optimizer, every=1, config={"console": "off"}) as scope:
        for x, y in batches(3):
            optimizer.zero_grad()
            nn.functional.mse_loss(single(x), y).backward()
            optimizer.step()
        (tmp_path / "state.json").write_text(json.dumps(scope.state_dict()))
    results = launched("life", tmp_path)

    first, second = results["closes_for_one"]
    assert [r["flags"] for r in first["records"]] == [[], [], ["local"], ["local"]]
    assert [r["flags"] for r in second["records"]] == [[], []]
    # from one process to two, and back to one
    for result in results["resumes"]:
        assert result["records"] == [[step, []] for step in range(3, 7)]
    with flowscope.watch(single, optimizer, every=1, config={"console": "off"}) as scope:
        scope.load_state_dict(results["resumes"][1]["state"])
        optimizer.zero_grad()
        nn.functional.mse_loss(single(x), y).backward()
        optimizer.step()
        assert [record.step for record in scope.records] == [7]
    for result in results["closes_after_the_group"]:
        assert result == {"flags": [[]] * 4, "failed": {}}


def test_a_job_that_is_restarted(tmp_path: Path) -> None:
    """The launcher starts all ranks again when one fails: they find each other, and nothing of the first try."""
    # gloo itself may read the addresses of the first try where the launcher keeps the store
    own = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    torchrun("elastic_program.py", str(tmp_path), limit=LIMIT, options=("--max-restarts", "1"), **own)
    for rank in RANKS:
        tries = [json.loads((tmp_path / f"{attempt}-{rank}.json").read_text()) for attempt in (0, 1)]
        assert tries[1] == [[step, []] for step in range(4)]


@pytest.mark.parametrize("ranks", [2, 3, 8, 1000, 10_000])
def test_packed_counts_of_many_ranks_add_up(ranks: int) -> None:
    generator = torch.Generator().manual_seed(ranks)
    flags = (torch.rand(5, 37, generator=generator) < 0.6).double()
    members = torch.arange(ranks) % 5
    # each of the five patterns comes from several ranks
    sums = sum(float((members == k).sum()) * pack(flags[k], ranks) for k in range(5))
    counts = sum(float((members == k).sum()) * flags[k] for k in range(5))
    assert isinstance(sums, Tensor)
    assert isinstance(counts, Tensor)
    assert sums.numel() == packed_size(37, ranks) == -(-37 // digits(ranks))
    np.testing.assert_array_equal(unpack(sums.numpy(), 37, ranks), counts.numpy())
