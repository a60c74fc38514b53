"""A sample of the benchmark against others' questions, and the way it counts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks.faults.numbers_seen import Probe, Weight
from benchmarks.rivals import answers, harm, table, text
from benchmarks.rivals.__main__ import SHELVES
from benchmarks.rivals.components import component, labelled, written
from benchmarks.rivals.loops import Loop
from benchmarks.rivals.mutants import CLEAN, Mutant, mutants
from benchmarks.rivals.published import SIGNS, DeepFD, signs
from benchmarks.rivals.reports import REPORTS
from benchmarks.rivals.students import STUDENTS, pretrained
from benchmarks.rivals.traincheck import TRAINCHECK
from benchmarks.rivals.tuning import folder_of, tuned

PROGRAMS = [one for shelf in (TRAINCHECK, REPORTS) for one in shelf.told.values() if one.build is not None]


def test_a_part_of_the_page_is_written_and_the_rest_left(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text((Path(__file__).parents[1] / "docs" / "rivals.md").read_text())
    before = page.read_text()
    for name in (*STUDENTS, *SHELVES):
        table.write(page, name, [f"first of {name}", "second"])
        begin, end = (mark.format(name) for mark in (table.BEGIN, table.END))
        assert f"{begin}\n\nfirst of {name}\n\nsecond\n\n{end}" in page.read_text()
    for heading in (line for line in before.splitlines() if line.startswith("#")):
        assert heading in page.read_text()


def test_held_out_windows_lie_in_each_tenth_block_alone() -> None:
    places = torch.arange(30 * text.BLOCK + 7)
    generator = torch.Generator().manual_seed(3)
    for held_out in (True, False):
        rows = text.windows(places, 200, generator, held_out)
        assert rows.shape == (200, text.LENGTH)
        blocks = {int(place) // text.BLOCK for place in rows.flatten()}
        assert all((block % 10 == 9) == held_out for block in blocks)
        assert (rows.diff(dim=1) == 1).all()


def test_sentences_begin_end_and_are_padded() -> None:
    batch = text.sentences(torch.full((50, text.LENGTH), 65), torch.Generator().manual_seed(0))
    for ids, mask in zip(batch["input_ids"].tolist(), batch["attention_mask"].tolist(), strict=True):
        length = sum(mask)
        assert mask == [1] * length + [0] * (text.LENGTH - length)
        assert ids == [text.CLS, *[65] * (length - 2), text.SEP, *[text.PAD] * (text.LENGTH - length)]


def test_every_operator_gives_the_ends_of_its_grid() -> None:
    from defaultplusplus.deform.operators import OPERATORS

    for student in STUDENTS.values():
        names = [one.name for one in mutants(student)]
        assert len(names) == len(set(names))
        by_operator: dict[str, list[Mutant]] = {}
        for one in mutants(student):
            by_operator.setdefault(one.operator, []).append(one)
        for name, operator in OPERATORS.items():
            if operator.scope not in (student.scope, "both"):
                assert name not in by_operator
                continue
            values = [one.value for one in by_operator[name]]
            grid = operator.param_grid
            assert values == ([None] if not grid else [grid[0], grid[-1]] if len(grid) > 1 else [grid[0]])


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ("transformer.wte.weight", "embedding"),
        ("transformer.wpe", "positional"),
        ("transformer.h.0:input", "embedding"),
        ("transformer.h.2", "residual"),
        ("transformer.h.1.ln_2.bias", "layernorm"),
        ("transformer.h.1.attn", "attention"),
        ("transformer.h.1.attn.c_attn.weight", "qkv"),
        ("transformer.h.1.attn.c_proj.weight", "attention"),
        ("transformer.h.0.mlp.c_proj", "ffn"),
        ("transformer.h.0.mlp.act", "ffn"),
        ("lm_head", "output"),
        ("bert.embeddings.token_type_embeddings", "embedding"),
        ("bert.embeddings.position_embeddings.weight", "positional"),
        ("bert.embeddings.LayerNorm", "layernorm"),
        ("bert.encoder.layer.1", "residual"),
        ("bert.encoder.layer.1.attention.self.value.bias", "qkv"),
        ("bert.encoder.layer.1.attention.output.dense", "attention"),
        ("bert.encoder.layer.1.attention.output.LayerNorm", "layernorm"),
        ("bert.encoder.layer.1.intermediate.dense", "ffn"),
        ("bert.encoder.layer.1.output.dense.weight", "ffn"),
        ("bert.encoder.layer.1.output", "ffn"),
        ("classifier.weight", "output"),
        ("", ""),
    ],
)
def test_a_place_belongs_to_a_component(where: str, expected: str) -> None:
    assert component(where) == expected


def test_a_metric_or_a_phase_may_name_what_a_place_does_not() -> None:
    assert component("", phase="loss") == component("", metric="loss") == "output"
    assert component("transformer.ln_f", metric="output_deviation") == "output"
    assert component("transformer.ln_f", metric="act_rms") == "layernorm"
    assert {labelled(one) for one in ("masking", "score", "kernel", "variant")} == {"attention"}
    assert labelled("ffn") == "ffn"


def test_what_an_operator_changes_is_seen() -> None:
    torch.manual_seed(0)
    bert, gpt2 = (STUDENTS[name].build(False) for name in ("bert", "gpt2"))
    assert written(Mutant("", "QZV", "qkv"), bert) == {"qkv"}
    assert written(Mutant("", "QFG", "qkv"), bert) == {"qkv"}
    assert written(Mutant("", "NCE", "layernorm", 1.0), gpt2) == {"layernorm"}
    # the package's pattern for feed-forward weights fits the projection behind the attention, too
    assert written(Mutant("", "FSW", "ffn", 5.0), bert) == {"ffn", "attention"}
    assert written(Mutant("", "OSL", "output", 5.0), gpt2) == {"output"}
    # "layer" is in the path of every module of a BERT's blocks
    within = {"residual", "attention", "qkv", "layernorm", "ffn"}
    assert within <= written(Mutant("", "RSR", "residual", 5.0), bert) <= {*within, "embedding", "output"}
    assert all(parameter.requires_grad for parameter in bert.parameters())


def keep(root: Path, mutant: Mutant, seed: int, loss: float, weights: str) -> None:
    folder = folder_of(STUDENTS["gpt2"], mutant, seed, root)
    folder.mkdir(parents=True)
    run = {"loss": loss, "accuracy": 0.5, "weights": weights, "watched": True, "losses": [loss]}
    (folder / "run.json").write_text(json.dumps(run))


def test_harm_is_five_of_five(tmp_path: Path) -> None:
    """No run may be trained here: each one that is asked for is kept."""
    student = STUDENTS["gpt2"]
    for seed in range(5):
        keep(tmp_path, CLEAN, seed, 2.0, f"clean{seed}")
        keep(tmp_path, Mutant("worse"), seed, 2.1, f"worse{seed}")
    for seed, loss in enumerate((2.1, 2.1, 1.9)):
        keep(tmp_path, Mutant("once better"), seed, loss, f"once{seed}")
    keep(tmp_path, Mutant("as far"), 0, 2.0, "far")
    keep(tmp_path, Mutant("same"), 0, 2.0, "clean0")
    keep(tmp_path, Mutant("infinite"), 0, float("nan"), "infinite")
    expected = {
        "worse": "harmful",
        "once better": "harmless",
        "as far": "harmless",
        "same": "without effect",
        "infinite": "without a result",
    }
    assert {name: harm.verdict(student, Mutant(name), tmp_path) for name in expected} == expected


def weight(grad_norm: float, norm: float = 1.0, largest: float = 1.0) -> Weight:
    moments = {"grad_norm": grad_norm, "grad_mean": grad_norm, "grad_zero": 0.0, "grad_spread": 1.0}
    return Weight("w", True, norm, largest, 0.5, True, 0.0, **moments)


def test_deepfd_signs_are_what_its_monitor_counts() -> None:
    probes = [
        Probe(0, 3.0, 0.2, [weight(1e-5), weight(1.0)]),
        Probe(10, 3.5, None, [weight(80.0, largest=6.0), weight(1.0, norm=2.0)]),
        Probe(20, 2.0, 0.1, [weight(1.0, norm=3.0), weight(1.0, norm=2.0)]),
    ]
    seen = [dict(zip(SIGNS, row, strict=True)) for row in signs(probes)]
    assert [row["gradient vanishes"] for row in seen] == [1, 0, 0]
    assert [row["gradient explodes"] for row in seen] == [0, 1, 0]
    assert [row["large weight"] for row in seen] == [0, 1, 0]
    assert [row["loss rose"] for row in seen] == [0, 1, 0]
    assert [row["accuracy fell"] for row in seen] == [0, 0, 1]
    assert [row["means of weights stand"] for row in seen] == [0, 1, 1]
    assert [row["spreads of weights stand"] for row in seen] == [0, 2, 2]
    assert [row["not converged"] for row in seen] == [1, 1, 1]


def test_deepfd_tells_what_it_was_taught() -> None:
    good = [[Probe(0, 1.0 + k / 10, 0.9, [weight(1.0), weight(1.0)])] for k in range(6)]
    bad = [[Probe(0, 9.0 + k / 10, 0.1, [weight(1e-6), weight(1.0)])] for k in range(6)]
    judge = DeepFD([*good, *bad], [False] * 6 + [True] * 6)
    assert judge([Probe(0, 9.3, 0.1, [weight(1e-6), weight(1.0)])]).found
    assert not judge([Probe(0, 1.3, 0.9, [weight(1.0), weight(1.0)])]).found


def test_traincheck_has_its_twenty_errors() -> None:
    ids = [part for one in TRAINCHECK.told.values() for part in one.sources.replace(";", ",").split(",")]
    assert len([one for one in ids if "found by TrainCheck" not in one]) == 20
    assert all((one.build is None) == bool(one.reason or one.elsewhere[1]) for one in TRAINCHECK.told.values())


@pytest.mark.parametrize("told", PROGRAMS, ids=lambda told: told.name)
def test_twins_differ_and_repeat(told: object) -> None:
    """Both forms run; each is the same again by its seed; weights or what they are called with begin alike."""

    def losses(faulty: bool, seed: int = 0, steps: int = 4) -> list[float]:
        loop: Loop = told.build(faulty, seed)  # type: ignore[attr-defined]
        return [float(loop.run_step()) for _ in range(steps)]

    healthy = losses(False)
    assert healthy == losses(False)
    assert healthy != losses(False, seed=1)
    assert losses(True) == losses(True)


SEEN_BY_LIMITS = ("gradients_never_cleared", "optimizer_holds_replaced_tensors")


@pytest.mark.parametrize("name", SEEN_BY_LIMITS)
def test_programs_are_told_from_their_twins(name: str, tmp_path: Path) -> None:
    from benchmarks.rivals.programs import limits

    told = {**TRAINCHECK.told, **REPORTS.told}[name]
    assert limits(told, True, tmp_path).found
    assert not limits(told, False, tmp_path).found


@pytest.fixture(scope="module")
def school(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A student that has hardly been taught, and its runs."""
    root = tmp_path_factory.mktemp("rivals")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    pretrained(STUDENTS["gpt2"], root, steps=20)
    yield root
    torch.set_num_threads(threads)


STEPS = 12
ZEROED, LOUDER = Mutant("NZG", "NZG", "layernorm"), Mutant("OSL_5.0", "OSL", "output", 5.0)


def made(root: Path, mutant: Mutant, seed: int, suffix: str = "") -> Path:
    student = STUDENTS["gpt2"]
    tuned(student, mutant, seed, watched=True, root=root, steps=STEPS, suffix=suffix)
    return folder_of(student, mutant, seed, root, suffix)


def test_a_run_is_kept_and_is_its_own_twin(school: Path) -> None:
    student = STUDENTS["gpt2"]
    folder = made(school, CLEAN, 0)
    run = json.loads((folder / "run.json").read_text())
    assert tuned(student, CLEAN, 0, watched=True, root=school) == run
    bare = tuned(student, CLEAN, 0, watched=False, root=school, steps=STEPS, suffix="-bare")
    assert bare["weights"] == run["weights"]
    assert bare["losses"] == run["losses"]
    assert not answers.limits(folder).found


def test_a_corridor_of_clean_seeds_tells_a_mutant_at_its_first_step(school: Path) -> None:
    """Five runs certify no more than one in six, so a clean run may part too, but not as it begins."""
    group = answers.group_of([made(school, CLEAN, seed) for seed in range(1, 6)])
    told = answers.corridor(group, made(school, ZEROED, 0))
    assert told.step == 0
    assert component(told.where, told.metric) == "layernorm"
    assert answers.corridor(group, made(school, CLEAN, 0), notes=True).step != 0
