"""The public surface is closed: explicit, resolvable, each name in one place."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest
from public import PUBLIC_MODULES, public_modules, public_objects


def literal(module: ModuleType) -> tuple[ast.expr, str]:
    """The expression assigned to `__all__`, and its source text."""
    assert module.__file__ is not None
    text = Path(module.__file__).read_text()
    for node in ast.parse(text).body:
        if isinstance(node, ast.Assign) and any(ast.unparse(target) == "__all__" for target in node.targets):
            return node.value, ast.get_source_segment(text, node.value) or ""
    pytest.fail(f"{module.__name__} has no __all__")


@pytest.mark.parametrize("name", PUBLIC_MODULES)
def test_all_is_explicit_and_resolves(name: str) -> None:
    module = public_modules()[name]
    expression, source = literal(module)
    names = ast.literal_eval(expression)
    assert list(names) == list(module.__all__), "__all__ is changed after its assignment"
    assert [n for n, count in Counter(names).items() if count > 1] == []
    missing = [n for n in names if not hasattr(module, n)]
    assert missing == []
    assert list(names) == sorted(names) or "#" in source, "sort __all__, or group it under comments"


@pytest.mark.parametrize("name", PUBLIC_MODULES)
def test_nothing_else_looks_public(name: str) -> None:
    module = public_modules()[name]
    imported = {n for n, value in vars(module).items() if isinstance(value, ModuleType) or n == "annotations"}
    if name == "streamrt.testing":  # a module with code of its own imports what it needs
        imported |= {n for n, value in vars(module).items() if getattr(value, "__module__", name) != name}
        imported |= {n for n, value in vars(module).items() if not hasattr(value, "__module__")}
    others = {n for n in vars(module) if not n.startswith("_")} - set(module.__all__) - imported
    assert others == set(), "export these or give them an underscore"


def test_each_public_name_has_one_home() -> None:
    homes = Counter(dotted.rpartition(".")[2] for dotted in public_objects() if not dotted.endswith("__version__"))
    assert [name for name, count in homes.items() if count > 1] == []
