"""How a function is named on the link to an own child.

A function that the child can import travels as ``@module:qualname`` and is looked up once there.  Any other (a lambda,
a closure, one of the main program's) travels by value in front of its arguments, pickled by cloudpickle, as ``qualname
(by value)``, which is for messages; only an inherited link carries pickles at all.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any

from transport.codec import Names
from transport.codec_pickles import MAINS
from transport.errors import UnknownFunctionError
from transport.service import Function, Service, borrows, check_plain
from transport.wire import MAX_FUNCTION_BYTES, clip

BY_VALUE = " (by value)"
ROOT: Names = ("args", "kwargs")
"""What a call's ``(args, kwargs)`` are called in messages."""
ROOT_BY_VALUE: Names = (("function", "args"), "kwargs")


class ByValue:
    """A function that goes by value, under a name of its own; nothing here remembers it."""

    def __init__(self, function: Callable[..., Any], name: str) -> None:
        """Does not touch the device."""
        self.function = function
        self.__qualname__ = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the function returns, at the child.  Enqueues what the function does."""
        return self.function(*args, **kwargs)


def wire_name(function: Callable[..., Any], args: tuple[Any, ...]) -> tuple[str, tuple[Any, ...], Names]:
    """The name under which a function goes, what goes as its positional arguments, and what messages call that.

    By value that is the function, and the arguments as one tuple.

    Raises `LocalProtocolError` for an ``async def``.
    """
    reference = None if isinstance(function, ByValue) else _reference(function)
    if reference is None:
        return _own_name(function) + BY_VALUE, (function, args), ROOT_BY_VALUE
    return reference, args, ROOT


def _own_name(function: Callable[..., Any]) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    name = getattr(function, "__qualname__", None) or type(function).__qualname__
    return clip(str(name), MAX_FUNCTION_BYTES - len(BY_VALUE))


@functools.lru_cache(maxsize=4096)
def _reference(function: Callable[..., Any]) -> str | None:
    module, qualname = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    check_plain(function)
    if not module or not qualname or module in MAINS or "<locals>" in qualname or "<lambda>" in qualname:
        return None
    found: Any = sys.modules.get(module)
    for part in qualname.split("."):
        found = getattr(found, part, None)
    return f"@{module}:{qualname}" if found is function else None


def _apply(function: Callable[..., Any], args: tuple[Any, ...], /, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


class ChildService(Service):
    """What a child serves its parent: every function that the parent names or sends, and those of a service, if any."""

    def find(self, name: str) -> Function:
        """The function of that name, imported if need be.  Raises `UnknownFunctionError`."""
        if name.endswith(BY_VALUE):
            return Function(name, _apply, self.arrays, takes_state=False)
        if name.startswith("@"):
            return self._imported(name)
        if name not in self._functions:
            raise UnknownFunctionError(
                f"there is no function {name!r} here: a local worker runs any function that its parent passes; "
                "pass the function itself, not its name"
            )
        return super().find(name)

    def check_arguments(self, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raises `TypeError` naming the signature when the arguments do not fit.  Does not touch the device."""
        if function.call is _apply and len(args) == 2:
            inner = Function(function.name.removesuffix(BY_VALUE), args[0], None, takes_state=False)
            super().check_arguments(inner, args[1], kwargs)
        else:
            super().check_arguments(function, args, kwargs)

    def _imported(self, name: str) -> Function:
        known = self._functions.get(name)
        if known is None:
            module, _, qualname = name[1:].partition(":")
            try:
                found: Any = importlib.import_module(module)
                for part in qualname.split("."):
                    found = getattr(found, part)
            except (ImportError, AttributeError) as error:
                raise UnknownFunctionError(
                    f"{qualname} of {module} cannot be imported by the worker: {error}"
                ) from error
            function = Function(name, found, self.arrays, takes_state=False, borrow=borrows(found))
            known = self._functions[name] = function
        return known
