"""Services: the functions that a peer may call, and nothing else.

A service registers functions by name (`@service.function`) and, optionally, makes one object for each device
(`@service.setup`) that is given to functions as their first argument.  Functions run with leased streams current on the
devices of their arguments.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import inspect
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, overload

from streamrt.device import Device, parse_device
from streamrt.libraries import NAMES, check_installed
from transport.errors import LocalProtocolError, UnknownFunctionError
from transport.limits import check_flag

CALL_OPTIONS = ("timeout", "copy", "detach", "reply_stream")  # of `Peer.submit`, which keeps them from the function
OWN_NAMES = ("torch", "jax")  # libraries whose name of every host device is "cpu"
ONLY_ON_GPUS = ("cupy", "numba")


@dataclass(frozen=True, slots=True)
class Function:
    """One registered function: `arrays` is the kind that it receives (None: CuPy on a GPU, NumPy on the host), `borrow`
    whether it reads them in place."""

    name: str
    call: Callable[..., Any]
    arrays: str | None
    takes_state: bool
    borrow: bool = False


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
        check_kind(arrays)
        self.arrays = arrays
        self._functions: dict[str, Function] = {}
        self._setup: Callable[[Any], Any] | None = None
        self._states: dict[str, Any] = {}
        self._lock = threading.Lock()

    @overload
    def function(self, call: Callable[..., Any], /) -> Callable[..., Any]: ...
    @overload
    def function(
        self, call: None = None, /, *, name: str | None = None, arrays: str | None = None, borrow: bool = False
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]: ...
    def function(
        self,
        call: Callable[..., Any] | None = None,
        /,
        *,
        name: str | None = None,
        arrays: str | None = None,
        borrow: bool = False,
    ) -> Any:
        """Registers a function, as ``@service.function`` or ``@service.function(name=..., arrays="torch")``.

        With ``borrow=True`` it reads its arrays where they lie, in the caller's process, as far as they came through
        shared memory: nothing is copied, so a call costs the same whatever their size.  It must not write to them, and
        the caller's memory is held as long as it keeps one.  JAX takes no memory of another device: on GPUs its arrays
        are copied all the same.

        Variables of a function that ended with an error are dropped at once where they hold that error, or a future of
        it; an error that it keeps elsewhere has its traceback, and what the other frames held.

        The function itself is returned unchanged; callers name it by object or by name.  Where the service has a
        `setup`, its first parameter is the set-up object, which the caller does not pass.  Does not touch the device.
        Raises `LocalProtocolError` for a name that is taken and for an ``async def``.
        """
        if call is None:
            return lambda function: self._register(function, name, arrays, borrow)
        return self._register(call, name, arrays, borrow)

    def _register(
        self, call: Callable[..., Any], name: str | None, arrays: str | None, borrow: bool
    ) -> Callable[..., Any]:
        if name is not None and not isinstance(name, str):
            raise LocalProtocolError(f"name={name!r} is no text; a function is called by a name")
        chosen = name or _own_name(call)
        check_plain(call)
        if chosen in self._functions:
            raise LocalProtocolError(f"the service has a function {chosen!r} already; give one of them name=")
        check_flag("borrow", borrow, "True shows the function its arrays in place")
        check_kind(arrays)
        if borrow:
            _borrowing.add(call)
        if name is not None:
            with contextlib.suppress(TypeError):  # what cannot be referred to weakly is called by its name alone
                _named[call] = name
        self._functions[chosen] = Function(chosen, call, arrays or self.arrays, takes_state=True, borrow=borrow)
        return call

    def setup(self, call: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Registers the function that makes what the service's functions get as their first argument.

        ``setup(device)`` runs once for each device: in `streamrt-worker` for all that it serves, before its ready line,
        elsewhere before the device's first call.  `device` is a name: "cuda:1", "host:0" or "cpu".  A service with
        ``arrays="torch"`` or ``"jax"`` is given "cpu" for host devices too, the only name that these libraries have for
        them.  A function gets the object of the device of its arguments.  Does not touch the device.
        """
        if self._setup is not None:
            raise LocalProtocolError("the service has a setup already; a service has one")
        check_plain(call)
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
                as_cpu = self.arrays in OWN_NAMES and parse_device(device).kind == "host"
                self._states[device] = self._setup("cpu" if as_cpu else device)

    def borrows(self, name: str, device: Device) -> bool:
        """Whether a function reads arrays of a device in place.  Does not touch the device."""
        found = self._functions.get(name)
        return found is not None and found.borrow and not (found.arrays == "jax" and device.kind == "cuda")

    def find(self, name: str) -> Function:
        """The function of that name.  Raises `UnknownFunctionError` listing those there are.

        Does not touch the device.
        """
        found = self._functions.get(name)
        if found is None:
            known = ", ".join(self.functions) or "none"
            hint = ""
            if "<lambda>" in name or "<locals>" in name:
                hint = "; functions are sent only to one's own children (local_workers): register it in the service"
            raise UnknownFunctionError(f"there is no function {name!r} here; the service has: {known}{hint}")
        return found

    def check_served(self, device: str) -> None:
        """Raises `LocalProtocolError` where a worker on that device would serve nothing, or not what functions expect,
        `UnavailableError` where the library that they expect is not installed.

        Does not touch the device.
        """
        if not self._functions:
            raise LocalProtocolError("the service has no function; register one with @service.function")
        for function in self._functions.values():
            check_given(
                function.arrays, parse_device(device), f"function {function.name!r} wants {function.arrays} arrays"
            )

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
        if not kwargs and len(bound) in _positional(function.call):
            return
        try:
            signature.bind(*bound, **kwargs)
        except TypeError as error:
            taken = next((name for name in CALL_OPTIONS if f"argument: {name!r}" in str(error)), None)
            wrong = _misspelt(signature, kwargs) or f"{error}{_advice(signature, taken)}"
            first = "" if bound is args else "; its first argument is what the service's setup made"
            raise TypeError(f"{function.name}{signature}: {wrong}{first}") from None


def _misspelt(signature: inspect.Signature, kwargs: dict[str, Any]) -> str:
    """What to say of a keyword that the function does not have: binding would name what is missing in its place."""
    parameters = signature.parameters.values()
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return ""
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    known = [parameter.name for parameter in parameters if parameter.kind in by_name]
    for name in kwargs:
        if name not in known:
            close = difflib.get_close_matches(name, known, 1)
            return f"got an unexpected keyword argument {name!r}" + "".join(f"; did you mean {one!r}?" for one in close)
    return ""


def _advice(signature: inspect.Signature, missing: str | None) -> str:
    if missing is None or missing not in signature.parameters:
        return ""
    if signature.parameters[missing].kind is inspect.Parameter.KEYWORD_ONLY:
        return f" ({missing}= is an option of the call itself: give the function's parameter another name)"
    return f" ({missing}= is an option of the call itself: pass the function's argument by position)"


_borrowing: weakref.WeakSet[Callable[..., Any]] = weakref.WeakSet()
_named: weakref.WeakKeyDictionary[Callable[..., Any], str] = weakref.WeakKeyDictionary()
"""The functions that a service of this process has under another name than their own: the latest one."""


def borrows(call: Callable[..., Any]) -> bool:
    """Whether a function was registered, by any service, as one that reads in place.  Does not touch the device."""
    return call in _borrowing


def check_plain(call: Callable[..., Any]) -> None:
    """Raises `LocalProtocolError` for an ``async def``, which nobody would await.  Does not touch the device."""
    if inspect.iscoroutinefunction(call) or inspect.isasyncgenfunction(call):
        name = getattr(call, "__qualname__", None) or repr(call)
        raise LocalProtocolError(f"{name} is an async function, which is not supported; use a plain one")


def function_name(call: Callable[..., Any] | str) -> str:
    """The name by which a function is called: the string itself, the name under which a service of this process has
    it, or its ``__qualname__``.  Does not touch the device.
    """
    if isinstance(call, str):
        return call
    if _named:
        with contextlib.suppress(TypeError):  # it cannot be hashed, or referred to weakly
            if (name := _named.get(call)) is not None:
                return name
    return _own_name(call)


def _own_name(call: Callable[..., Any]) -> str:
    name = getattr(call, "__qualname__", None) or getattr(call, "__name__", None)
    if not isinstance(name, str):
        raise LocalProtocolError(f"{call!r} has no name; register it with @service.function(name=...)")
    return name


def check_service(service: object) -> None:
    """Raises `LocalProtocolError` unless it is a service, or None.  Does not touch the device."""
    if service is not None and not isinstance(service, Service):
        raise LocalProtocolError(
            f"service={service!r} is no service: make a transport.Service(), and register functions with "
            "@service.function"
        )


def check_kind(arrays: str | None) -> None:
    """Raises `LocalProtocolError` unless it is a kind of array, or None.  Does not touch the device."""
    if arrays is not None and arrays not in NAMES:
        raise LocalProtocolError(f"arrays={arrays!r} is no kind of array; use one of {', '.join(NAMES)}")


def check_given(arrays: str | None, device: Device, what: str) -> None:
    """Whether functions can be given such arrays of a device here: raises `LocalProtocolError` where the library has
    none there, `UnavailableError` where it is not installed.  Does not touch the device.
    """
    if arrays in ONLY_ON_GPUS and device.kind != "cuda":
        raise LocalProtocolError(f"{what}: {arrays} has no arrays on {device}; use another library there")
    if arrays is not None:
        check_installed(arrays)


@functools.lru_cache(maxsize=4096)
def _positional(call: Callable[..., Any]) -> range:
    """How many arguments a function surely takes by position alone, which is cheaper to ask than to bind them."""
    signature = _signature(call)
    if signature is None:
        return range(0)
    by_place, least = 0, 0
    for parameter in signature.parameters.values():
        if parameter.kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD):
            by_place += 1
            least += parameter.default is inspect.Parameter.empty
        elif parameter.kind is inspect.Parameter.KEYWORD_ONLY and parameter.default is inspect.Parameter.empty:
            return range(0)
    return range(least, by_place + 1)


@functools.lru_cache(maxsize=4096)
def _signature(call: Callable[..., Any]) -> inspect.Signature | None:
    try:
        return inspect.signature(call)
    except (TypeError, ValueError):
        return None
