"""The README's examples are Python, use names that exist, and its commands are targets of the Makefile."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from public import public_modules

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_example_parses_and_uses_public_names(block: str) -> None:
    modules = public_modules()
    for node in ast.walk(ast.parse(block)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
            assert node.attr in modules[node.value.id].__all__, f"{node.value.id}.{node.attr} is not exported"


def test_the_commands_are_targets() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"^make ([a-z-]+)", TEXT, re.MULTILINE))
    assert named
    assert named <= targets


def test_the_files_that_it_names_exist() -> None:
    linked = re.findall(r"\]\(([^)#:]+)\)", TEXT)
    assert linked
    assert [name for name in linked if not (ROOT / name).exists()] == []
