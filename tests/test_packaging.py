"""What the package promises before any model exists: light imports, one-way imports, every folder shipped."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
THIRD_PARTIES = (
    "torch",
    "tensorboard",
    "lightning",
    "transformers",
    "accelerate",
    "ignite",
    "wandb",
    "mlflow",
    "trackio",
    "prometheus_client",
    "opentelemetry",
    "pandas",
)

ANY = {"numpy", "pydantic", "pydantic_core", "scipy"}
READING = ("validation", "terminal")
WORDS = (
    "errors",
    "config",
    "backdrop",
    "metrics",
    "records",
    "schedule",
    "faults",
    "meter",
    "diagnosis",
    "specs",
    "_version",
    *READING,
)
PLAIN = {f"flowscope.{name}" for name in WORDS}
TORCH = {"torch", "flowscope.torch_internals"}
WRAPPING = {"flowscope.model", "flowscope.merging", "flowscope.sums", "flowscope.hooks"}
MEASURING = ANY | PLAIN | TORCH | {"flowscope.model", "flowscope.sums", "flowscope.hooks", "flowscope.record_builder"}
COMPARING = {
    "flowscope.parting",
    "flowscope.corridor.behind",
    "flowscope.model.plan",
    "flowscope.sinks",
    "flowscope.detectors",
}
# place -> what may be imported there besides the standard library (design: imports go one way); the first match counts
ALLOWED: tuple[tuple[str, set[str]], ...] = (
    ("flowscope.errors", set()),
    ("flowscope.faults", {"flowscope.errors", "flowscope.meter"}),
    ("flowscope.meter", set()),
    ("flowscope.terminal", set()),
    ("flowscope.validation", {"pydantic"}),
    ("flowscope.diagnosis", {"flowscope.records", "flowscope.terminal"}),
    ("flowscope._version", set()),
    ("flowscope.schedule", {"flowscope.errors", "flowscope.meter"}),
    ("flowscope.metrics", {"flowscope.errors", "flowscope.validation"}),
    ("flowscope.steps.phase", set()),
    ("flowscope.specs", {"flowscope.metrics"}),
    # the notebook's view and the frames are imported where they are asked for
    ("flowscope.frames", {"numpy", "flowscope.errors", "flowscope.records"}),
    (
        "flowscope.records",
        ANY
        | {"pandas", "flowscope.errors", "flowscope.frames", "flowscope.metrics", "flowscope.notebook"}
        | {"flowscope.validation"},
    ),
    ("flowscope.config", ANY | {"flowscope.errors"}),
    ("flowscope.sums.statistics", {"torch", "numpy"}),
    ("flowscope.sums", ANY | PLAIN | TORCH | {"flowscope.sums"}),
    ("flowscope.record_builder", ANY | {"flowscope.records"}),
    ("flowscope.model", ANY | PLAIN | TORCH | {"flowscope.model", "flowscope.notebook"}),
    ("flowscope.hooks", MEASURING),
    ("flowscope.instruments", MEASURING | {"flowscope.instruments"}),
    ("flowscope.observation", MEASURING | {"flowscope.instruments", "flowscope.observation"}),
    ("flowscope.jacobian", MEASURING | {"flowscope.jacobian"}),
    ("flowscope.merging.profile", ANY | PLAIN | {"torch", "matplotlib"} | WRAPPING),
    ("flowscope.merging", ANY | PLAIN | TORCH | WRAPPING),
    ("flowscope.torch_internals", {"torch"}),
    ("flowscope.detectors", ANY | PLAIN | {"flowscope.detectors"}),
    ("flowscope.sinks", ANY | PLAIN | {"tensorboard", "PIL", "rich", "flowscope.sinks"}),
    ("flowscope.parting", ANY | PLAIN | COMPARING),
    # the stages of a pipeline are one run to every reader
    (
        "flowscope.views",
        ANY | PLAIN | {"tensorboard", "werkzeug", "flowscope.views", "flowscope.parting", "flowscope.sinks.stages"},
    ),
)


def modules() -> dict[str, Path]:
    inside = {path: path.relative_to(ROOT) for path in sorted((ROOT / "flowscope").rglob("*.py"))}
    beside = {path: "flowscope" / path.relative_to(ROOT) for path in sorted((ROOT / "extras").rglob("*.py"))}
    return {
        ".".join(place.with_suffix("").parts).removesuffix(".__init__"): path
        for path, place in (inside | beside).items()
    }


def imported(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            # `from flowscope import records` imports flowscope.records
            names |= {f"flowscope.{a.name}" for a in node.names} if node.module == "flowscope" else {node.module}
    return {name for name in names if name.split(".")[0] not in sys.stdlib_module_names}


def within(name: str, allowed: set[str]) -> bool:
    return any(name == prefix or name.startswith(prefix + ".") for prefix in allowed)


def strangers(module: str, names: set[str]) -> set[str]:
    for place, allowed in ALLOWED:
        if within(module, {place}):
            return {name for name in names if not within(name, allowed)}
    return set()


def run(code: str) -> str:
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


@pytest.mark.parametrize("name", ["flowscope", "flowscope.integrations"])
def test_import_is_light(name: str) -> None:
    loaded = run(f"import sys, {name}; print(*[m for m in {THIRD_PARTIES!r} if m in sys.modules])")
    assert loaded == "", f"import {name} also imports {loaded}"


def test_version_is_the_installed_one() -> None:
    out = run("import flowscope, importlib.metadata as m; print(flowscope.__version__, m.version('flowscope'))")
    here, installed = out.split()
    assert here == installed


@pytest.mark.parametrize("module", modules())
def test_imports_go_one_way(module: str) -> None:
    assert strangers(module, imported(modules()[module])) == set()


def test_nothing_needs_the_extras() -> None:
    users = {
        module for module, path in modules().items() if any(within(n, {"flowscope.extras"}) for n in imported(path))
    }
    assert users - {"flowscope"} == {"flowscope.extras.skipping"}  # `flowscope` names them for type checkers, lazily


def test_the_import_rule_can_fail() -> None:
    assert strangers("flowscope.records", {"torch"}) == {"torch"}
    assert strangers("flowscope.detectors.flow", {"flowscope.hooks.points", "numpy"}) == {"flowscope.hooks.points"}
    assert strangers("flowscope.sums.statistics", {"flowscope.records"}) == {"flowscope.records"}
    assert strangers("flowscope.scope", {"torch", "flowscope.hooks"}) == set()


PRIVATE = {"_sequence_nr", "_execution_engine", "_is_view", "_pop_mode_temporarily", "f_back"}
PRIVATE |= {"_get_fsdp_state", "_get_sequence_number_for_group", "_fsdp_param_group", "_scale", "_per_optimizer_states"}


def private_names_of_torch(source: str) -> set[str]:
    """Attributes of torch that begin with one underline, names imported so, and the methods above."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            found |= {alias.name for alias in node.names if alias.name.startswith("_")}
        if isinstance(node, ast.Attribute):
            of_torch = ast.unparse(node).startswith("torch.") and node.attr.startswith("_")
            found |= {node.attr} if node.attr in PRIVATE or (of_torch and not node.attr.startswith("__")) else set()
    return found


def test_private_names_of_torch_are_in_one_file() -> None:
    found = {name: private_names_of_torch(path.read_text()) for name, path in modules().items()}
    assert {name for name, private in found.items() if private} == {"flowscope.torch_internals"}
    assert private_names_of_torch("import torch; torch._C.f(node._sequence_nr())") == {"_C", "_sequence_nr"}
    assert private_names_of_torch("import torch; torch.__version__; x.grad") == set()


def test_every_folder_is_shipped() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    block = text.split("packages = [", 1)[1].split("]", 1)[0]
    listed = {line.strip().strip('",') for line in block.splitlines() if line.strip()}
    found = {".".join(path.relative_to(ROOT).parent.parts) for path in (ROOT / "flowscope").rglob("__init__.py")}
    assert listed == found | {"flowscope.extras", "flowscope.integrations"}
    modules_in = {path.parent for path in (ROOT / "flowscope").rglob("*.py")}
    assert {d for d in modules_in if not (d / "__init__.py").exists()} == set(), "a folder of modules lacks __init__.py"
