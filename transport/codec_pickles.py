"""What in a value keeps it from being pickled: the error of a pickler names a type, and no place.

Asked only when pickling has failed: each part is pickled by itself, and the first that cannot be is looked into.
"""

from __future__ import annotations

import functools
import itertools
import sys
import types
from collections.abc import Iterator, Mapping
from typing import Any

import cloudpickle

DEEPEST = 20
"""Steps into a value."""
WIDEST = 1000
"""Parts that are tried in one value; what comes behind them is not named."""
REMEDY = (
    "make it where the function runs, or send what it is made of as an argument; a function of a module that the "
    "worker can import goes by its name"
)


MAINS = ("__main__", "__mp_main__")
"""What the main program's module is called, the second in processes that `multiprocessing` has spawned.  No other
process can import it by that name."""


def dumps(value: object) -> bytes:
    """The value, pickled.  Raises whatever its own ``__reduce__`` raises.  Does not touch the device."""
    spawned = sys.modules.get(MAINS[1])
    if spawned is not None and spawned.__name__ not in cloudpickle.list_registry_pickle_by_value():
        cloudpickle.register_pickle_by_value(spawned)
    pickled: bytes = cloudpickle.dumps(value)
    return pickled


def reason(value: Any, error: BaseException) -> str:
    """Why a value cannot be pickled: which part of it, what that is, the pickler's `error`, and the remedy.

    Does not touch the device.
    """
    try:
        named, where = _name(value), _place(value)
    except Exception as refused:  # noqa: BLE001 - whatever a value's own __repr__ or __getattr__ raises
        named, where = None, f" nor looked into, which raises {type(refused).__name__}"
    remedy = f"; {REMEDY}" if named else ""
    return f"{named or 'it'} cannot be pickled{where} ({type(error).__name__}: {error}){remedy}"


def _name(value: Any) -> str | None:
    """Of a function, also of one with some of its arguments."""
    function = value
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__qualname__", None) if callable(value) else None


def _place(value: Any) -> str:
    steps, culprit = _find(value)
    return f": {''.join(steps).removeprefix(' -> ')} in it is {_kind(culprit)}" if steps else ""


def _kind(value: object) -> str:
    kind = type(value)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return f"an {name}" if name[0] in "aeiou" else f"a {name}"


def _find(value: Any) -> tuple[list[str], Any]:
    """The innermost part that cannot be pickled, and the steps to it."""
    steps: list[str] = []
    seen = {id(value)}
    while len(steps) < DEEPEST:
        tried = itertools.islice(_parts(value), WIDEST)
        found = next(((step, part) for step, part in tried if id(part) not in seen and _fails(part)), None)
        if found is None:
            break
        seen.add(id(found[1]))
        steps.append(found[0])
        value = found[1]
    return steps, value


def _fails(value: object) -> bool:
    try:
        dumps(value)
    except Exception:  # noqa: BLE001 - whatever a __reduce__ raises is an answer
        return True
    return False


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """What a value is made of, as a pickler sees it, with what leads there."""
    if isinstance(value, types.FunctionType):
        for name, part in _variables(value):
            yield f" -> {name}", part
    elif isinstance(value, types.MethodType):
        yield "self", value.__self__
        yield "", value.__func__
    elif isinstance(value, functools.partial):
        yield "", value.func
        for number, part in enumerate(value.args):
            yield f"args[{number}]", part
        for name, part in value.keywords.items():
            yield name, part
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield f"[{key!r:.40}]", part
    elif isinstance(value, list | tuple):
        for number, part in enumerate(value):
            yield f"[{number}]", part
    elif isinstance(value, set | frozenset):
        for part in value:
            yield "{...}", part
    elif not isinstance(value, type | types.ModuleType):
        own = getattr(value, "__dict__", {})
        for name, part in own.items():  # with a name of its own it stands for a function
            yield "" if "__qualname__" in own and callable(part) else f".{name}", part


def _variables(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """The variables that go with a function: those of its closure, its defaults, and the globals that it names."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not set yet
            continue
    code = function.__code__
    defaults = function.__defaults__ or ()
    yield from zip(code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount], defaults, strict=True)
    yield from (function.__kwdefaults__ or {}).items()
    for name in dict.fromkeys(_names(code)):
        if name in function.__globals__:
            yield name, function.__globals__[name]


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)
