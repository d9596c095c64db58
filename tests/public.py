"""The public names of the two packages, as the tests of exports and docstrings see them."""

from __future__ import annotations

import importlib
from types import ModuleType

PUBLIC_MODULES = ("streamrt", "streamrt.testing", "transport")


def public_modules() -> dict[str, ModuleType]:
    """The modules that users import from, by name."""
    return {name: importlib.import_module(name) for name in PUBLIC_MODULES}


def public_objects() -> dict[str, object]:
    """Every exported object by its dotted name."""
    return {
        f"{module_name}.{name}": getattr(module, name)
        for module_name, module in public_modules().items()
        for name in module.__all__
    }
