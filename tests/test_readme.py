"""The README is short, its Chinese twin says the same section by section, and every page is on the site."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import tarfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import flowscope
from flowscope import _moved

ROOT = Path(__file__).resolve().parents[1]
ENGLISH, CHINESE = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "README.zh.md"))
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def prose(text: str) -> str:
    return BLOCK.sub("", text)


def sections(text: str) -> list[str]:
    return re.split(r"^## ", text, flags=re.MULTILINE)


def code_of(block: str) -> list[str]:
    """Without comments, which are in the reader's language."""
    return [re.sub(r"\s*# .*$", "", line) for line in block.splitlines()]


def test_the_readme_is_short_and_says_what_a_newcomer_asks() -> None:
    assert len(prose(ENGLISH).split()) <= 700
    first_screen = "\n".join(ENGLISH.splitlines()[:25])
    assert "pip install" in first_screen
    assert "flowscope.watch(" in first_screen
    heads = [section.splitlines()[0] for section in sections(ENGLISH)[1:]]
    assert {"Install", "For whom", "One minute", "Why not wandb.watch", "What it does not do"} <= {*heads}
    assert ENGLISH.count("![") == 1


def test_the_chinese_readme_is_equal_section_by_section() -> None:
    ours, theirs = sections(ENGLISH), sections(CHINESE)
    assert len(ours) == len(theirs)
    for english, chinese in zip(ours, theirs, strict=True):
        blocks = [[(kind, code_of(text)) for kind, text in BLOCK.findall(section)] for section in (english, chinese)]
        assert blocks[0] == blocks[1]
        links = [re.findall(r"\]\(([^)]+)\)", section) for section in (english, chinese)]
        if english is not ours[0]:  # each names the other there
            assert links[0] == links[1]
        rows = [section.count("\n|") for section in (english, chinese)]
        assert rows[0] == rows[1]
        names = [set(re.findall(r"`([^`]+)`", prose(section))) for section in (english, chinese)]
        assert names[0] == names[1]
        paragraphs = [len([p for p in prose(section).split("\n\n") if p.strip()]) for section in (english, chinese)]
        assert paragraphs[0] == paragraphs[1]
        numbers = [sorted(re.findall(r"\d+(?:\.\d+)?", prose(section))) for section in (english, chinese)]
        assert set(numbers[0]) == set(numbers[1]), english[:40]


def test_the_minute_runs_as_pasted_and_finds_what_is_wrong(tmp_path: Path) -> None:
    (pasted,) = (text for kind, text in BLOCK.findall(ENGLISH) if kind == "python" and "nn.Sigmoid" in text)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", pasted], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert "vanishing_gradient" in done.stdout
    assert "an activation that does not saturate" in done.stdout


def test_every_page_is_on_the_site_and_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    text = (ROOT / "mkdocs.yml").read_text()
    named = set(re.findall(r"[\w-]+\.md", text))
    assert named == {page.name for page in (ROOT / "docs").glob("*.md")}
    index = (ROOT / "docs/index.md").read_text()
    assert named - {"index.md"} <= {*re.findall(r"\]\(([\w-]+\.md)\)", index)}
    if find_spec("mkdocs") is None or find_spec("material") is None:
        pytest.skip("mkdocs-material is not installed (extra dev)")
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-d", tmp_path / "site"],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr.strip() == ""
    assert (tmp_path / "site/guide/index.html").exists()


def test_the_page_on_what_moved_names_what_still_imports() -> None:
    text = (ROOT / "docs/moved.md").read_text()
    told = re.split(r"^## ", text, flags=re.MULTILINE)[1]
    for old in {name.rpartition(".")[0] for name in _moved.MOVED} | {*_moved.FOLDERS}:
        assert old == "flowscope" or old in told
    for now in re.findall(r"`(flowscope\.[\w.]+)`", told):
        if now not in ("flowscope.plot", "flowscope.read_run", "flowscope.sinks.read_run"):
            module = now.removesuffix(".*")
            assert find_spec(module) is not None or _moved.homes(module) or module in _moved.FOLDERS, now


def project() -> dict[str, Any]:
    reader = pytest.importorskip("tomllib")  # since Python 3.11
    found: dict[str, Any] = reader.loads((ROOT / "pyproject.toml").read_text())["project"]
    return found


def test_the_package_page_says_what_it_is_and_invents_no_address() -> None:
    told = project()
    assert told["readme"] == "README.md"
    assert told["license"] == "Apache-2.0"
    versions = {one.rpartition(" ")[2] for one in told["classifiers"] if "Python :: 3." in one}
    assert versions == {"3.10", "3.11", "3.12", "3.13"}
    assert told["requires-python"] == ">=3.10"
    assert "urls" not in told
    assert len(told["keywords"]) >= 5


def test_the_source_distribution_holds_what_its_tests_need(tmp_path: Path) -> None:
    code = "import sys; from setuptools import build_meta; print(build_meta.build_sdist(sys.argv[1]))"
    copy = tmp_path / "copy"
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.split(
        "\n"
    )
    if not any(files):
        pytest.skip("this is no checkout")
    for name in filter(None, files):
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            (copy / name).write_bytes((ROOT / name).read_bytes())
    done = subprocess.run([sys.executable, "-c", code, tmp_path], cwd=copy, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    archive = (tmp_path / done.stdout.split()[-1]).read_bytes()
    with tarfile.open(fileobj=io.BytesIO(archive)) as held:
        names = {member.name.partition("/")[2] for member in held.getmembers()}
        held.extractall(tmp_path / "unpacked", filter="data")
    wanted = {name for name in files if name and name.split("/")[0] in ("tests", "docs", "examples", "benchmarks")}
    assert {*wanted, "CHANGELOG.md", "Makefile", "mkdocs.yml", "README.zh.md"} <= names
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    for inside in ("extras", "integrations"):
        (unpacked / "flowscope" / inside).symlink_to(f"../{inside}")
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "tests/test_frames.py", "tests/test_cadence.py"],
        cwd=unpacked, env={**os.environ, "PYTHONPATH": str(unpacked)}, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout[-2000:]


def test_read_run_and_run_are_at_the_front_door() -> None:
    assert flowscope.read_run is flowscope.sinks.read_run
