"""What a run's header says of how it was set up, and what two headers differ in."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import flowscope
from flowscope.cli import main
from flowscope.parting.differences import differences
from flowscope.parting.matching import depth_pairs, flow_pairs, parameter_pairs
from flowscope.records import FlowLayout, RunHeader
from flowscope.sinks import read_run
from flowscope.sums.fingerprints import BITS, COLUMNS, PROJECTIONS, checksums, fingerprints, ordered_checksums, signs

ODD = 0x5851F42D4C957F2D


# -- the numbers ---------------------------------------------------------------------------------------------------


def signed(h: int) -> int:
    return (h + 2**63) % 2**64 - 2**63


def mixed(h: int) -> int:
    h = signed((h ^ (h >> 29)) * ODD)
    return h ^ (h >> 32)


def naive_checksum(x: np.ndarray, whole: bool) -> int:
    """Of [B, T, D] float32 in plain Python integers, sample after sample."""
    total = 0
    for sample in x.view(np.int32):
        words = sample.reshape(-1).tolist() if whole else [sum(row.tolist()) for row in sample]
        h = sum(mixed(int(word)) * (2 * i + 1) for i, word in enumerate(words))
        total += mixed(signed(h + ODD)) & ((1 << BITS) - 1)
    return total


@pytest.mark.parametrize(("tokens", "width"), [(5, 7), (65, 64)])
def test_checksum_is_that_of_plain_integers(tokens: int, width: int) -> None:
    x = torch.randn(1, 3, tokens, width, generator=torch.Generator().manual_seed(0))
    assert checksums(x).item() == naive_checksum(x[0].numpy(), whole=tokens * width <= 4096)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool])
def test_every_bit_of_every_entry_counts_and_samples_add_up(dtype: torch.dtype) -> None:
    x = (torch.randn(1, 4, 3, 6) * 3).relu().to(dtype)
    whole = checksums(x)
    assert torch.equal(whole, checksums(x[:, :1]) + checksums(x[:, 1:]))
    for at in ((0, 0, 0), (3, 2, 5), (1, 1, 4)):
        other = x.clone()
        spot = other[0]
        spot[at] = (
            ~spot[at] if dtype == torch.bool else spot[at].nextafter(spot[at] + 1) if x.is_floating_point() else 99
        )
        assert checksums(other) != whole
    swapped = x.flip(1)
    assert checksums(swapped) == whole
    assert ordered_checksums(swapped) != ordered_checksums(x)
    tokens = x.flip(2)
    assert checksums(tokens) != whole


def test_projections_are_those_of_the_definition_and_add_up() -> None:
    x = torch.randn(2, 3, 5, 7, dtype=torch.float64)
    found = fingerprints(x)
    assert found.shape == (2, COLUMNS)
    r = signs(7, x)
    for g in range(2):
        samples = np.array(
            [[sum(float(x[g, b, t] @ r[:, k]) for t in range(5)) for k in range(PROJECTIONS)] for b in range(3)]
        )
        assert np.allclose(found[g, 1], float((x[g] ** 2).sum()), rtol=1e-12)
        assert np.allclose(found[g, 2 : 2 + PROJECTIONS], samples.sum(0), rtol=1e-12)
        assert np.allclose(found[g, 2 + PROJECTIONS :], (samples**2).sum(0), rtol=1e-12)
    assert torch.allclose(found, fingerprints(x[:, :1]) + fingerprints(x[:, 1:]), rtol=1e-12)


def test_convolutions_keep_their_channels() -> None:
    x = torch.randn(1, 2, 3, 4, 5, dtype=torch.float64)
    expected = x.sum((3, 4))[0] @ signs(3, x)
    assert torch.allclose(fingerprints(x, axis=1)[0, 2 : 2 + PROJECTIONS], expected.sum(0), rtol=1e-12)


def test_signs_are_even_and_alike_under_compile() -> None:
    r = signs(4096, torch.zeros(1))
    assert set(r.unique().tolist()) == {-1.0, 1.0}
    assert (r.mean(0).abs() < 0.06).all()  # 4 deviations of 4,096 coins
    assert ((r.T @ r / 4096 - torch.eye(PROJECTIONS)).abs() < 0.06).all()
    x = torch.randn(1, 3, 5, 7)
    compiled = torch.compile(fingerprints, fullgraph=True)(x)
    assert compiled[0, 0] == fingerprints(x)[0, 0]
    assert torch.allclose(compiled, fingerprints(x), rtol=1e-12)


# -- the header ----------------------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self, width: int = 6, depth: int = 3, head: str = "head") -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(depth))
        self.add_module(head, nn.Linear(width, 2))
        self._head = head

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return getattr(self, self._head)(x)


def trained(folder: Path, *, seed: int = 0, lr: float = 0.1, threads: int = 1, **options: object) -> RunHeader:
    torch.manual_seed(seed)
    model = Net(**options)  # type: ignore[arg-type]
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    x = torch.randn(4, model.layers[0][0].in_features, generator=torch.Generator().manual_seed(5))
    try:
        with flowscope.watch(model, optimizer, log_dir=folder, config={"console": "off"}) as scope:
            for _ in range(2):
                optimizer.zero_grad()
                loss = model(x).square().mean()
                loss.backward()
                optimizer.step()
                scope.step(loss=loss)
    finally:
        torch.set_num_threads(before)
    header = read_run(folder).header
    assert header is not None
    return header


def test_the_header_says_how_the_run_was_set_up(tmp_path: Path) -> None:
    setup = trained(tmp_path).setup
    assert setup["packages"]["torch"] == torch.__version__
    assert (setup["device"], setup["dtype"], setup["model"], setup["processes"]) == ("cpu", "float32", "Net", 1)
    assert setup["seeds"]["torch"] == 0
    assert setup["parameters"]["layers.1.0.weight"] == [6, 6]
    assert setup["parameters"]["head.bias"] == [2]
    (optimizer,) = setup["optimizers"]
    (group,) = optimizer["groups"]
    assert optimizer["class"] == "SGD"
    assert (group["lr"], group["momentum"], len(group["parameters"])) == (0.1, 0.9, 8)
    torch.manual_seed(0)
    fresh = Net()
    for name, parameter in fresh.named_parameters():
        assert setup["weights"][name] == checksums(parameter.detach().flatten()[None]).item()


def test_only_spaced_entries_of_a_large_tensor_are_hashed(tmp_path: Path) -> None:
    setup = trained(tmp_path, width=80).setup  # 6,400 entries: each second
    torch.manual_seed(0)
    weight = Net(width=80).layers[0][0].weight.detach().flatten()
    assert setup["weights"]["layers.0.0.weight"] == checksums(weight[::2][None]).item()


def test_differences_name_what_was_set_up_otherwise(tmp_path: Path) -> None:
    good = trained(tmp_path / "a")
    assert differences(good, trained(tmp_path / "b")) == []
    assert differences(good, trained(tmp_path / "c", lr=0.01)) == ["optimizer's lr: 0.1 -> 0.01"]
    told = differences(good, trained(tmp_path / "d", seed=3))
    assert told[0].startswith("initial weights: 8 of 8 differ (layers.0.0.weight, ")
    assert "torch's seed: 0 -> 3" in told
    assert differences(good, trained(tmp_path / "e", threads=2)) == ["threads: 1 -> 2"]
    told = differences(good, trained(tmp_path / "f", head="out"))
    assert told == ["parameters of other names: head.weight -> out.weight, head.bias -> out.bias", *told[1:]]
    assert not any("initial weights" in line for line in told)
    (line,) = [
        x for x in differences(good, trained(tmp_path / "g", width=5)) if x.startswith("the shape of head.weight")
    ]
    assert line == "the shape of head.weight: (2, 6) -> (2, 5)"


def test_runs_without_a_set_up_are_told_as_such(tmp_path: Path) -> None:
    assert differences(RunHeader(), RunHeader()) == []
    (line,) = differences(RunHeader(), trained(tmp_path))
    assert line.startswith("set-up of one of the runs: not recorded")


def test_compare_begins_with_what_differs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trained(tmp_path / "a")
    trained(tmp_path / "b", lr=0.01)
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "b"), "-o", str(tmp_path / "c.html")]) == 0
    assert capsys.readouterr().out.startswith("what differs, a -> b:\n  optimizer's lr: 0.1 -> 0.01\n")
    assert '"differs":["optimizer\'s lr: 0.1 -\\u003e 0.01"]' in (tmp_path / "c.html").read_text().replace(
        "->", "-\\u003e"
    )


# -- which places belong together ----------------------------------------------------------------------------------


def test_points_are_matched_by_relative_depth() -> None:
    assert depth_pairs(4, 4) == [(0, 0), (1, 1), (2, 2), (3, 3)]
    assert depth_pairs(3, 5) == [(0, 0), (1, 2), (2, 4)]
    assert depth_pairs(5, 3) == [(0, 0), (2, 1), (4, 2)]
    assert depth_pairs(1, 4) == [(0, 0)]
    assert depth_pairs(0, 4) == []


def test_flows_are_matched_by_name_then_by_kind() -> None:
    def header(*flows: tuple[str, str]) -> RunHeader:
        return RunHeader(flows=tuple(FlowLayout(name, kind, (), ()) for name, kind in flows))

    pairs = flow_pairs(
        header(("enc", "blocks"), ("dec", "blocks"), ("rnn", "time")), header(("decoder", "blocks"), ("enc", "blocks"))
    )
    assert [(a.name, b.name) for a, b in pairs] == [("enc", "enc"), ("dec", "decoder")]


def test_parameters_are_matched_by_name_then_by_shape_in_order() -> None:
    a = {"emb": [9, 4], "h.0.fc": [4, 4], "h.1.fc": [4, 4], "out": [2, 4]}
    b = {"emb": [9, 4], "blocks.0.fc": [4, 4], "blocks.0.extra": [7], "blocks.1.fc": [4, 4], "out": [3, 4]}
    assert parameter_pairs(a, b) == [("emb", "emb"), ("h.0.fc", "blocks.0.fc"), ("h.1.fc", "blocks.1.fc")]
    assert parameter_pairs({"w": [2]}, {"module.w": [2]}) == [("w", "module.w")]
