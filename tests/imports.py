"""The imports of the two packages, as the tests of the layering see them."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("streamrt", "transport")


@dataclass(frozen=True)
class Import:
    """One imported module: `level` is "module", "function" or "typing" (under TYPE_CHECKING)."""

    importer: str
    target: str
    level: str
    line: int

    @property
    def top(self) -> str:
        """The distribution-level name: ``cupy`` of ``cupy.cuda``."""
        return self.target.partition(".")[0]


def sources() -> dict[str, Path]:
    """Dotted module name to file, for every module of both packages."""
    found = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def resolve(module: str, name: str | None, known: dict[str, Path]) -> str:
    """``from module import name`` names the submodule where there is one, else the module."""
    return f"{module}.{name}" if name is not None and f"{module}.{name}" in known else module


def imports_of(name: str, tree: ast.AST, known: dict[str, Path]) -> Iterator[Import]:
    """Every import of a module's source."""

    def walk(node: ast.AST, level: str) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                for alias in child.names:
                    yield Import(name, alias.name, level, child.lineno)
            elif isinstance(child, ast.ImportFrom):
                assert child.level == 0, f"{name}:{child.lineno}: relative import"
                for alias in child.names:
                    yield Import(name, resolve(child.module or "", alias.name, known), level, child.lineno)
            elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                yield from walk(ast.Module(child.body, []), "typing")
                yield from walk(ast.Module(child.orelse, []), level)
            elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                yield from walk(child, "function")
            else:
                yield from walk(child, level)

    yield from walk(tree, "module")


@functools.cache
def all_imports() -> tuple[Import, ...]:
    """Every import of both packages."""
    known = sources()
    return tuple(
        found for name, path in known.items() for found in imports_of(name, ast.parse(path.read_text(), path), known)
    )
