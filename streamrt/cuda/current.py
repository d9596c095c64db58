"""Current devices and streams, and the driver's errors, as the CUDA backend needs them.

CuPy's current stream is per thread and per device, and has two memories: the stack of ``with`` and what ``use()`` set
last.  Leaving a ``with`` goes back to the stack's entry and forgets ``use()`` (cupy#8377), and a stream object without
a device goes to whatever device is current then.  So `made_current` does both: it pushes, so that a ``with`` inside
comes back to it, and at the end pops and then sets exactly the object that it found, with the right device current.

Devices are entered by pushing their primary context.  ``cudaSetDevice`` would not do for the way back: on a thread that
had no context it makes one on device 0, some hundred MB in every process that only uses device 1.
"""

from __future__ import annotations

import functools
import sys
import threading
from types import TracebackType
from typing import Any, NoReturn

from cupy.cuda import get_current_stream, runtime
from cupy.cuda.stream import Stream as CupyStream
from cupy.cuda.stream import _BaseStream

from streamrt.cuda import memops
from streamrt.errors import DeviceError

CUDARuntimeError = runtime.CUDARuntimeError
DEFAULT_HANDLES = (0, 1, 2)  # null, legacy, per-thread: what they mean depends on the current device


def fail(error: Any, doing: str) -> NoReturn:
    """Raises CuPy's error as a `DeviceError` with the driver's code and name.  Does not touch the device."""
    code = int(getattr(error, "status", 0))
    name = str(error).partition(":")[0]
    raise DeviceError(f"{doing} failed: {error}", code=code, name=name) from error


def check_status(status: int, doing: str, *named: object) -> bool:
    """Whether a query's status says "done".  Raises `DeviceError` for anything but done and not yet: `doing`, a format
    string, says with `named` what failed.

    CuPy's own ``done`` takes every error for "not yet", so that a failed device looks busy for ever.
    """
    if status == 0:
        return True
    if status == NOT_READY:
        return False
    fail(CUDARuntimeError(status), doing.format(*named))


NOT_READY = 600


class _Thread(threading.local):
    """What is known of the calling thread: whether it has a context of its own (a fresh thread says "device 0" and has
    none), and how many were pushed here and not yet popped."""

    has_context = False
    pushed = 0


_thread = _Thread()


def is_current(index: int) -> bool:
    """Whether the device is current for the calling thread, and its context is, so that `activated` would do nothing.

    Does not touch the device.
    """
    return bool(runtime.getDevice() == index and (_thread.has_context or _thread.pushed))


@functools.cache
def _capture_mode(name: str) -> Any:
    return getattr(memops.driver().CUstreamCaptureMode, f"CU_STREAM_CAPTURE_MODE_{name}")


def exchange_capture_mode(name: str) -> Any:
    """Sets the calling thread's capture mode and returns the one before, None where the driver refuses.

    Does not block the host.
    """
    code, before = memops.driver().cuThreadExchangeStreamCaptureMode(_capture_mode(name))
    return before if int(code) == 0 else None


class activated:
    """The device current for the calling thread inside a ``with``; costs one query if it is current already."""

    __slots__ = ("_index", "_pushed")

    def __init__(self, index: int) -> None:
        self._index = index
        self._pushed = False

    def __enter__(self) -> None:
        if runtime.getDevice() != self._index:
            driver = memops.driver()
            context = memops.primary_context(self._index)
            memops.check(driver.cuCtxPushCurrent(context), f"entering cuda:{self._index}")
            self._pushed = True
            _thread.pushed += 1
        elif not _thread.has_context and not _thread.pushed:
            # The driver's own calls, unlike the runtime's, make no context by themselves.  Not inside a pushed one: the
            # runtime would go on to say that this device is current after the pop, when the driver is back on another.
            runtime.setDevice(self._index)
            _thread.has_context = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pushed:
            _thread.pushed -= 1
            memops.check(memops.driver().cuCtxPopCurrent(), f"leaving cuda:{self._index}")
        elif not sys.is_finalizing() and runtime.getDevice() != self._index:
            runtime.setDevice(self._index)  # the body changed it: bring back what was current at entry


class NamedStream(_BaseStream):  # type: ignore[misc]
    """A CuPy stream object for a handle that somebody else owns; `owner` is kept alive, nothing is destroyed."""

    def __init__(self, handle: int, index: int, owner: object) -> None:
        super().__init__(handle, index)
        self.owner = owner


def cupy_stream(index: int, handle: int, owner: object = None) -> Any:
    """CuPy's object for a handle: the owner itself if it is one, else a new name.  Does not touch the device."""
    if isinstance(owner, _BaseStream) and owner.ptr == handle:
        return owner
    if handle == 0:
        return CupyStream.null
    if handle == 2:
        return CupyStream.ptds
    return _named(index, handle) if owner is None else NamedStream(handle, index, owner)


@functools.lru_cache(maxsize=1024)
def _named(index: int, handle: int) -> NamedStream:
    """A name that keeps nothing alive: one object will do for all who use it."""
    return NamedStream(handle, index, None)


class made_current:
    """The stream and its device current in CuPy inside a ``with``; brings back exactly what was, also after `use()`."""

    __slots__ = ("_activated", "_index", "_previous", "_stream")

    def __init__(self, index: int, handle: int, owner: object = None) -> None:
        self._index = index
        self._activated = activated(index)
        self._stream = cupy_stream(index, handle, owner)

    def __enter__(self) -> None:
        self._activated.__enter__()
        try:
            self._previous = get_current_stream(self._index)
            self._stream.__enter__()
        except BaseException:
            self._activated.__exit__(None, None, None)
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            with activated(self._index):  # the body may have changed the device
                self._stream.__exit__(kind, error, trace)
                if get_current_stream(self._index) is not self._previous:
                    self._previous.use()
        finally:
            self._activated.__exit__(kind, error, trace)
