"""Arrays on a device for tests that run the same on the host backend and on a GPU.

`make` gives an array over memory of the runtime.  What works on it goes through `Stream.launch`, so that on the host
backend it stays queued as a kernel would; `read` brings an array to the host when its stream is known to be done.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

from streamrt import memory
from streamrt.device import Device, open_device
from streamrt.future import DeviceFuture
from streamrt.guard import using
from streamrt.libraries import Library, library
from streamrt.stream import Stream
from streamrt.testing import Latch, assert_no_host_sync, without

WATCHDOG = 20.0  # seconds after which something that should happen is taken not to
ON_ONE = ["host:0", pytest.param("cuda:0", marks=pytest.mark.gpu)]
ON_TWO = ["host", pytest.param("cuda", marks=pytest.mark.gpu2)]


def home(device: Device) -> Library:
    """The library whose arrays the tests use on the device."""
    return library("cupy" if device.kind == "cuda" else "numpy")


def make(stream: Stream, fill: float | None = None, n: int = 256) -> Any:
    """A float32 array allocated on `stream`; with `fill` it is filled there, and there already when this returns."""
    buffer = memory.allocate(stream.device, 4 * n, stream)
    array = home(stream.device).wrap(buffer.address, 4 * n, (n,), "float32", stream.device, buffer.holder())
    if fill is not None:
        fill_on(stream, array, fill)
        stream.synchronize()
    return array


def assign(target: Any, source: Any) -> None:
    target[...] = source


def double(target: Any, source: Any) -> None:
    target[...] = source
    target += source


def fill_on(stream: Stream, array: Any, value: float) -> None:
    """Enqueues a fill on `stream`."""
    stream.launch(assign, array, value, reads=(), writes=(array,))


def copy_on(stream: Stream, target: Any, source: Any) -> None:
    """Enqueues a copy on `stream`, by a kernel."""
    stream.launch(assign, target, source, reads=(source,), writes=(target,))


def read(array: Any) -> np.ndarray[Any, Any]:
    """The values; the caller has synchronized."""
    values: np.ndarray[Any, Any] = np.array(array.get() if hasattr(array, "get") else array)
    return values


def warm(*devices: Device) -> None:
    """Loads every kernel that the tests use: a first launch blocks the host while a latch is closed."""
    for device in devices:
        stream = Stream(device)
        source, target = make(stream, 1.0), make(stream, 2.0)
        copy_on(stream, target, source)
        stream.launch(double, target, source, reads=(source,), writes=(target,))
        stream.synchronize()
        read(target)


def opened(name: str) -> Device:
    """The device, opened and with its kernels loaded."""
    device = open_device(name)
    warm(device)
    return device


def read_on_another_stream(
    start: Callable[[Stream], DeviceFuture[Any]], device: Device, n: int, *, ordered: bool
) -> np.ndarray[Any, Any]:
    """What a stream reads of a future's array (float32, of length `n`) whose bytes arrive on a stream that is held up.

    `start` makes the future, with its bytes to come on the stream that it is given.  Unless `ordered` the reading
    stream's wait is dropped.
    """
    arriving, reading = Stream(device), Stream(device)
    out = make(reading, 0.0, n)
    with Latch(arriving):
        future = start(arriving)
        eventually(future.done, "the message's arrival")
        with without("future.wait"):
            array = future.result()  # the array itself, while its bytes are on their way
        with using(reading), assert_no_host_sync(), nullcontext() if ordered else without("future.wait"):
            future.wait(non_blocking=True)
            copy_on(reading, out, array)
        if not ordered:
            reading.synchronize(WATCHDOG)
    reading.synchronize(WATCHDOG)
    return read(out)


def eventually(condition: Callable[[], bool], what: str) -> None:
    """Polls until `condition`; fails after the watchdog's time."""
    deadline = time.monotonic() + WATCHDOG
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen within {WATCHDOG} s"
