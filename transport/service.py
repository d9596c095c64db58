"""Services: the functions that a peer may call, and nothing else.

A service registers functions by name (`@service.function`) and, optionally, makes one object per worker
(`@service.setup`) that is given to functions as their first argument.  Functions run with leased streams current on the
devices of their arguments.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, overload

from streamrt.libraries import NAMES
from transport.errors import LocalProtocolError, UnknownFunctionError


@dataclass(frozen=True, slots=True)
class Function:
    """One registered function: `arrays` is the kind that it receives (None: CuPy on a GPU, NumPy on the host)."""

    name: str
    call: Callable[..., Any]
    arrays: str | None
    takes_state: bool


class Service:
    """A named set of functions.  `arrays` is the kind of array that its functions receive unless they say otherwise."""

    def __init__(self, name: str = "", *, arrays: str | None = None) -> None:
        """Does not touch the device.

        Raises `LocalProtocolError` for an unknown kind of array, and for a kind of array where the name belongs.
        """
        if name in NAMES and arrays is None:
            raise LocalProtocolError(
                f"{name!r} is the name of the service here; to have its functions receive arrays of that kind, write "
                f"Service(arrays={name!r})"
            )
        self.name = name
        self.arrays = _checked_kind(arrays)
        self._functions: dict[str, Function] = {}
        self._setup: Callable[[Any], Any] | None = None
        self._states: dict[str, Any] = {}
        self._lock = threading.Lock()

    @overload
    def function(self, call: Callable[..., Any], /) -> Callable[..., Any]: ...
    @overload
    def function(
        self, call: None = None, /, *, name: str | None = None, arrays: str | None = None
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]: ...
    def function(
        self, call: Callable[..., Any] | None = None, /, *, name: str | None = None, arrays: str | None = None
    ) -> Any:
        """Registers a function, as ``@service.function`` or ``@service.function(name=..., arrays="torch")``.

        The function itself is returned unchanged; callers name it by object or by name.  Where the service has a
        `setup`, a first parameter that the caller does not fill is the set-up object if it is named like one: see
        `setup`.  Does not touch the device.  Raises `LocalProtocolError` for a name that is taken.
        """
        if call is None:
            return lambda function: self._register(function, name, arrays)
        return self._register(call, name, arrays)

    def _register(self, call: Callable[..., Any], name: str | None, arrays: str | None) -> Callable[..., Any]:
        chosen = name or function_name(call)
        if chosen in self._functions:
            raise LocalProtocolError(f"the service has a function {chosen!r} already; give one of them name=")
        self._functions[chosen] = Function(chosen, call, _checked_kind(arrays) or self.arrays, takes_state=True)
        return call

    def setup(self, call: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Registers the function that makes the worker's state: ``setup(device)`` runs once a worker, before its ready
        line; every function of the service then gets the result as its first argument.  Does not touch the device.
        """
        if self._setup is not None:
            raise LocalProtocolError("the service has a setup already; a service has one")
        self._setup = call
        return call

    @property
    def functions(self) -> tuple[str, ...]:
        """The names that peers may call.  Does not touch the device."""
        return tuple(sorted(self._functions))

    def prepare(self, device: str) -> None:
        """Runs `setup` for a device unless it ran.  Blocks the host as long as the setup does."""
        with self._lock:
            if self._setup is not None and device not in self._states:
                self._states[device] = self._setup(device)

    def find(self, name: str) -> Function:
        """The function of that name.  Raises `UnknownFunctionError` listing those there are.

        Does not touch the device.
        """
        found = self._functions.get(name)
        if found is None:
            known = ", ".join(self.functions) or "none"
            raise UnknownFunctionError(f"there is no function {name!r} here; the service has: {known}")
        return found

    def bind(self, function: Function, device: str) -> Callable[..., Any]:
        """The function with the set-up object as its first argument, where the service has a setup.

        Blocks the host while the setup runs, once for a device.
        """
        if self._setup is None or not function.takes_state:
            return function.call
        self.prepare(device)
        state = self._states[device]

        def call(*args: Any, **kwargs: Any) -> Any:
            return function.call(state, *args, **kwargs)

        return call

    def check_arguments(self, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raises `TypeError` naming the signature when the arguments do not fit.  Does not touch the device."""
        signature = _signature(function.call)
        if signature is None:
            return  # a builtin with no signature says so itself
        bound = (None, *args) if self._setup is not None and function.takes_state else args
        try:
            signature.bind(*bound, **kwargs)
        except TypeError as error:
            raise TypeError(f"{function.name}{signature}: {error}") from None


def function_name(call: Callable[..., Any] | str) -> str:
    """The name by which a function is registered and called: its ``__qualname__``, or the string itself."""
    if isinstance(call, str):
        return call
    name = getattr(call, "__qualname__", None) or getattr(call, "__name__", None)
    if not isinstance(name, str):
        raise LocalProtocolError(f"{call!r} has no name; register it with @service.function(name=...)")
    return name


def _checked_kind(arrays: str | None) -> str | None:
    if arrays is not None and arrays not in NAMES:
        raise LocalProtocolError(f"arrays={arrays!r} is no kind of array; use one of {', '.join(NAMES)}")
    return arrays


@functools.lru_cache(maxsize=4096)
def _signature(call: Callable[..., Any]) -> inspect.Signature | None:
    try:
        return inspect.signature(call)
    except (TypeError, ValueError):
        return None
