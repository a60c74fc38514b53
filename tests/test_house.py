"""The shape of the package: small classes, imports that go one way, names that do not collide."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import flowscope

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "flowscope"
MOST_ATTRIBUTES = 12


def trees() -> Iterator[tuple[Path, ast.Module]]:
    for folder in (PACKAGE, ROOT / "integrations"):
        for path in sorted(folder.rglob("*.py")):
            if not any(part.is_symlink() for part in path.parents):
                yield path, ast.parse(path.read_text())


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def stored(node: ast.ClassDef) -> set[str]:
    """The attributes that a class assigns on `self`."""
    return {
        child.attr
        for child in ast.walk(node)
        if isinstance(child, ast.Attribute)
        and isinstance(child.ctx, ast.Store)
        and isinstance(child.value, ast.Name)
        and child.value.id == "self"
    }


def test_no_class_stores_more_than_twelve_attributes() -> None:
    large = {
        f"{module_name(path)}.{node.name}": len(stored(node))
        for path, tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and len(stored(node)) > MOST_ATTRIBUTES
    }
    assert not large


def top_level(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements outside of functions and classes, also inside of `try` and `if` (of TYPE_CHECKING too)."""
    for statement in body:
        if isinstance(statement, ast.If):
            yield from top_level([*statement.body, *statement.orelse])
        elif isinstance(statement, (ast.Try, ast.With)):
            yield from top_level(statement.body)
        else:
            yield statement


def imports() -> dict[str, set[str]]:
    """Module -> the modules of this package that importing it imports, their packages apart."""
    known = {module_name(path): tree for path, tree in trees()}
    edges: dict[str, set[str]] = {name: set() for name in known}
    for name, tree in known.items():
        for node in top_level(tree.body):
            if isinstance(node, ast.Import):
                edges[name] |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                inner = {f"{node.module}.{alias.name}" for alias in node.names}
                edges[name] |= (inner & known.keys()) or {node.module}
    return {name: {target for target in targets if target in known} for name, targets in edges.items()}


def circle(edges: dict[str, set[str]]) -> list[str]:
    """One circle of imports, empty where there is none."""
    done: set[str] = set()

    def search(name: str, way: list[str]) -> list[str]:
        if name in way:
            return way[way.index(name) :]
        if name in done:
            return []
        for target in sorted(edges[name]):
            if found := search(target, [*way, name]):
                return found
        done.add(name)
        return []

    return next((found for name in sorted(edges) if (found := search(name, []))), [])


def test_imports_go_in_no_circle() -> None:
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"a"}}) == ["a", "b", "c"]
    edges = imports()
    edges["flowscope"] = set()  # its imports are lazy, those under TYPE_CHECKING are for type checkers
    assert not circle(edges)


def test_no_file_or_folder_bears_the_name_of_a_public_function() -> None:
    """The module would take the function's place as an attribute of its package."""
    functions = {name for name in flowscope.__all__ if callable(getattr(flowscope, name))}
    planned = {"check", "bisect", "compare_connections"}
    names = {path.stem for path in PACKAGE.glob("*.py")} | {path.name for path in PACKAGE.iterdir() if path.is_dir()}
    assert not names & (functions | planned)


FEATURES = {
    "attention",
    "batch_norm",
    "connection",
    "detector",
    "gates",
    "instrument",
    "losses",
    "parameters",
    "ranks",
    "routing",
    "solvers",
    "streams",
    "units",
    "wiring",
}
"""What is one feature seen from several folders: the files of it may share its name."""


def test_no_two_files_share_a_name_unless_they_are_one_feature() -> None:
    folders: dict[str, set[str]] = {}
    for path, _ in trees():
        if path.name != "__init__.py" and path.is_relative_to(PACKAGE):
            folders.setdefault(path.stem, set()).add(path.parent.name)
    assert {name for name, places in folders.items() if len(places) > 1} <= FEATURES
