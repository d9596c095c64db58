"""Current streams, and guards that change them.

There is one source of truth for the current stream of a thread on a device: the array library (on the host backend,
which no library knows, the backend).  Where several libraries are loaded, a guard moves them together.

Rules:

- On exit everything is as it was *at that entry*: the current device, its stream, and the guarded devices' streams;
  also after an exception, also when the body changed the device or the streams (cupy/cupy#8377, pytorch/pytorch#16019).
- Guards are left in the reverse order of their entries.  One that is left early takes those inside it with it and says
  so; those that are left after it bring back nothing and raise `LifetimeError`.  See `streamrt.entries`.
- An entry belongs to its thread.  Coroutines and generators are guarded step by step: between steps the thread has what
  it had, and what the body itself made current is current again in its next step.
- A guard changes what is current and orders nothing, but for numba, whose launches go to the default stream: that
  stream is fenced in and out.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ParamSpec, Self, TypeVar, cast

from streamrt.device import Device, backend_of, open_device, parse_device
from streamrt.entries import bring_back, leave, open_entries
from streamrt.errors import PlacementError, UnavailableError
from streamrt.libraries import Library, StreamKeeper, library_of, loaded
from streamrt.libraries.nesting import find_arrays
from streamrt.steps import guarded
from streamrt.stream import Stream

if TYPE_CHECKING:
    from streamrt.host.backend import HostBackend

P = ParamSpec("P")
R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., Any])

ENTER_EDGE = "guard.enter"
EXIT_EDGE = "guard.exit"


@functools.cache
def _host() -> HostBackend:
    return cast("HostBackend", backend_of("host"))


class _HostKeeper:
    """The host backend's own current device and streams, whose tokens are its own."""

    def save(self, device: Device) -> Any:
        return _host().save(device.index)

    def set_device(self, device: Device) -> None:
        _host().set_current_device(device.index)

    def current_stream(self, device: Device) -> Stream | None:
        handle, owner = _host().current(device.index)
        if isinstance(owner, Stream) and owner.handle == handle:
            return owner
        return Stream.borrow(handle, device, owner=owner)

    def handle_reader(self, device: Device) -> Callable[[], int] | None:
        return functools.partial(_host().current_stream, device.index)

    def here_reader(self, device: Device) -> None:
        return None

    def set_current_stream(self, device: Device, stream: Stream) -> Any:
        backend = _host()
        backend.set_current_stream(device.index, stream.handle, stream)
        backend.set_current_device(device.index)
        return None

    def push_stream(self, device: Device, stream: Stream) -> Any:
        return self.set_current_stream(device, stream)

    def exchange(self, device: Device, stream: Stream) -> Any:
        token = self.save(device)
        self.set_current_stream(device, stream)
        return token

    def set_aside(self, token: Any) -> None:
        """Nothing: the backend keeps no stack.  Does not touch the device."""

    def take_up(self, token: Any) -> None:
        """Nothing.  Does not touch the device."""

    def restore(self, token: Any) -> None:
        _host().restore(token)


_HOST: tuple[StreamKeeper, ...] = (_HostKeeper(),)
_STREAMLESS = ("numpy", "jax")
_keepers_of: tuple[tuple[Library, ...], tuple[StreamKeeper, ...]] = ((), ())


def keepers(device: Device) -> tuple[StreamKeeper, ...]:
    """Who keeps current streams on the device: the host backend, or the loaded libraries that have such a notion.

    Does not touch the device.
    """
    global _keepers_of
    if device.kind == "host":
        return _HOST
    if device.kind == "cpu":
        return ()
    now = loaded()
    if _keepers_of[0] is not now:
        _keepers_of = (now, tuple(one for one in now if one.name not in _STREAMLESS))
    return _keepers_of[1]


def current_streams(device: Device | str) -> list[Stream]:
    """Every distinct current stream of the calling thread on the device, over the loaded libraries, CuPy's first.

    These are the streams that what comes next may run on, so a wait is enqueued on all of them.  Empty for ``cpu``.
    Does not touch the device.
    """
    device = device if isinstance(device, Device) else open_device(device)
    found: dict[Any, Stream] = {}
    for keeper in keepers(device):
        stream = keeper.current_stream(device)
        if stream is not None:
            found.setdefault(stream.key, stream)
    return list(found.values())


def current_stream(device: Device | str) -> Stream:
    """The calling thread's current stream on the device: the host backend's, or that of the first library that has one.

    Raises `PlacementError` for ``cpu``, which has no streams.  Does not touch the device.
    """
    device = device if isinstance(device, Device) else open_device(device)
    for keeper in keepers(device):
        stream = keeper.current_stream(device)
        if stream is not None:
            return stream
    if not device.has_streams:
        raise PlacementError("cpu has no streams; use 'host:0' or 'cuda:0'")
    return Stream.borrow(device.backend.current_stream(device.index), device)


def find_current(device: Device, there: tuple[StreamKeeper, ...]) -> list[tuple[StreamKeeper, Any]]:
    """What all keepers of the device find current.  Before any of them sets it: the driver's device is one for all."""
    tokens = []
    for keeper in there:
        token = keeper.save(device)
        if token is not None:
            tokens.append((keeper, token))
    return tokens


class using:
    """Makes streams current, in all loaded libraries together, inside a ``with`` or in a decorated function.

    One stream for a device; the first one's device becomes the current device.  As a decorator it also takes coroutine
    functions, generator functions and async generator functions, and guards them step by step.  The same object may be
    entered again, also inside itself and by other threads.  With no stream it changes nothing.

    Enqueues nothing (but see the module on numba).  Does not block the host.  Raises `PlacementError` for two streams
    of one device, and at the exit `LifetimeError` where it is left after a guard around it or by another thread, as a
    ``with`` that is held across ``yield`` or ``await`` may be; an exception that is on its way is given a note instead.
    """

    __slots__ = ("streams",)

    def __init__(self, *streams: Any) -> None:
        self.streams: tuple[Stream, ...] = tuple(map(as_stream, streams))
        if len(streams) > 1 and len({stream.device for stream in self.streams}) != len(streams):
            raise PlacementError(f"two of {self.streams} are of one device, and only one can be current there")

    def __enter__(self) -> Self:
        tokens: list[tuple[StreamKeeper, Any]] = []
        try:
            for stream in reversed(self.streams):  # the first one last: its device is the current one
                device = stream.device
                there = keepers(device)
                tokens += find_current(device, there)
                for keeper in there:
                    token = keeper.push_stream(device, stream)
                    if token is not None:
                        tokens.append((keeper, token))
        except BaseException:
            bring_back(tokens)
            raise
        open_entries().append((self, tokens))
        return self

    def __exit__(self, kind: object = None, error: object = None, trace: object = None) -> None:
        stack = open_entries()
        if stack and stack[-1][0] is self:
            bring_back(stack.pop()[1])
        else:
            leave(stack, self, error)

    def __call__(self, function: F) -> F:
        return guarded(function, lambda args, kwargs: self)

    def suspend(self) -> list[tuple[StreamKeeper, Any]]:
        """What the body has current on the guarded devices; see `streamrt.steps`.  Does not touch the device."""
        return [found for stream in self.streams for found in find_current(stream.device, keepers(stream.device))]

    def resume(self, suspended: list[tuple[StreamKeeper, Any]]) -> None:
        """Makes that current again.  Enqueues nothing (but see the module on numba)."""
        bring_back(suspended)

    def gives(self, value: object) -> None:
        """Nothing: a guard changes what is current and orders nothing.  Does not touch the device."""

    def __repr__(self) -> str:
        return f"<using {', '.join(map(repr, self.streams))}>"


class _DeviceEntry:
    """An entry of `device_guard`."""

    __slots__ = ("device",)

    def __init__(self, device: Device) -> None:
        self.device = device

    def __repr__(self) -> str:
        return f"<device_guard {self.device}>"


@contextmanager
def device_guard(device: Device | str) -> Iterator[Device]:
    """Makes a device current, in all loaded libraries, inside a ``with``; brings back the device and its stream.

    Enqueues nothing.  Does not block the host.  ``cpu`` changes nothing.  Raises `LifetimeError` as `using` does.
    """
    opened = open_device(device)
    there = keepers(opened)
    tokens = find_current(opened, there)
    entry = _DeviceEntry(opened)
    open_entries().append((entry, tokens))
    error: BaseException | None = None
    try:
        for keeper in there:
            keeper.set_device(opened)
        yield opened
    except BaseException as failure:
        error = failure
        raise
    finally:
        leave(open_entries(), entry, error)


def run_on(stream: Stream, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Calls `function` with `stream` current, for engines that work on a stream of their own, and returns its result.

    Enqueues on `stream` a wait for the caller's current streams of its device and for what array arguments are known to
    wait on (edge "guard.enter"), and afterwards, also after an exception, on each of those streams a wait for `stream`
    (edge "guard.exit").  Does not block the host.  (Stability-AI/stable-audio-3#80)
    """
    if not isinstance(stream, Stream):
        raise TypeError(f"{stream!r} is no Stream; write run_on(stream, function, ...), with a lease its .stream")
    callers = current_streams(stream.device)
    if len(callers) > 1 and callers[0].capturing:  # numba's default stream cannot be part of a graph
        callers = [caller for caller in callers if caller.capturing]
    for caller in callers:
        stream.wait(caller, edge=ENTER_EDGE)
    _join_own_order((args, kwargs), stream)
    try:
        with using(stream):
            return function(*args, **kwargs)
    finally:
        for caller in callers:
            caller.wait(stream, edge=EXIT_EDGE)


def _join_own_order(values: object, stream: Stream) -> None:
    """Arrays whose order is no current stream's: JAX's definition events, numba's bound streams."""
    for array in find_arrays(values):
        library = library_of(array)
        if library is not None and library.name in ("jax", "numba") and library.device_of(array) == stream.device:
            library.join(array, stream)


def as_stream(stream: Any) -> Stream:
    """A `Stream` for one of ours or of another library (an object with ``__cuda_stream__`` that tells its device).

    Does not touch the device.  Raises `PlacementError` for a device, `UnavailableError` for anything else.
    """
    if isinstance(stream, Stream):
        return stream
    index = getattr(getattr(stream, "device", None), "index", None)
    if index is None:
        index = getattr(stream, "device_id", None)
    if not isinstance(index, int) or index < 0:
        if isinstance(stream, (str, Device)):
            name = str(stream)
            raise PlacementError(
                f"{name!r} names a device, and a stream is wanted: Stream({name!r}) is a new one; "
                f"device_guard({name!r}) makes a device current"
            )
        raise UnavailableError(f"{stream!r} does not tell its device; use Stream.borrow(stream, device)")
    return Stream.borrow(stream, parse_device(index, default_kind="cuda"))
