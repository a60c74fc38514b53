"""The gallery: twelve labelled runs, each with a page section, a picture, and a cure that one of them shows to work."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from benchmarks.gallery import IMAGES, PAGE, PIECES, case_of, is_cured, picture, section, seen

ROOT = Path(__file__).resolve().parents[1]


def test_twelve_faulty_runs_of_the_corpus_stand_on_the_page_with_their_pictures() -> None:
    page = (ROOT / PAGE).read_text(encoding="utf-8")
    assert len({piece.case for piece in PIECES}) == len(PIECES) == 12
    assert page.count("\n## ") == 12
    for piece in PIECES:
        case = case_of(piece)
        assert case.score == "faulty"
        assert f"## {case.title.capitalize()}\n" in page
        assert any(f"`{kind}`" in page for kind in case.kinds)
        with Image.open(ROOT / IMAGES / f"{piece.case}.png") as image:
            assert image.width > 700
            assert len(image.convert("RGB").getcolors(1 << 20) or []) > 20
    assert sum(file.stat().st_size for file in (ROOT / IMAGES).iterdir()) < 1_000_000


def test_a_piece_is_sick_as_it_is_and_well_when_cured(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    pytest.importorskip("matplotlib")
    piece = next(piece for piece in PIECES if piece.case == "F04")
    sick, cured = seen(piece, cured=False), seen(piece, cured=True)
    assert {alert.kind for alert in sick.raised()} & {*case_of(piece).kinds}
    assert not {alert.kind for alert in cured.raised()} & {*case_of(piece).kinds}
    assert cured.quality > 0.8 > sick.quality  # accuracy on digits that were held out
    assert is_cured(piece, sick, cured)
    assert not is_cured(piece, sick, sick)
    picture(piece, sick, cured, tmp_path / "p.png")
    assert (tmp_path / "p.png").stat().st_size > 2000
    told = section(piece, sick, cured)
    assert "`vanishing_gradient`" in told
    assert "Xavier" in told
