"""The functions that the conformance rows call; served by real worker processes.

They are written once for both backends: CuPy arrays on a GPU, NumPy arrays in virtual devices on the host.  Where user
kernels matter there are two forms, named by the caller: "plain" code, and functions that are "launched" on a stream and
stay queued.  On the host backend plain code runs at once, and what it made is put on its device in the stream's order.
"""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import numpy as np

import streamrt
import transport
from streamrt import Stream
from streamrt.testing import Latch, without

service = transport.Service()
torch_service = transport.Service(arrays="torch")

DELAY = 0.05  # seconds; how long "slow" lasts.  A delay is what these rows are about; nothing waits for it to pass
MEETING_SECONDS = 30.0  # far above what it takes for calls to be running at once
JOIN_EDGE = "conformance.join"

_delay = DELAY
_dropped = contextlib.ExitStack()
_barriers: dict[str, threading.Barrier] = {}
_lock = threading.Lock()


class Placed(Exception):
    """An argument is not where the caller said that it would arrive."""


def on(array: Any, device: str) -> Any:
    """The array, on a device, ready for plain code."""
    moved = streamrt.to(array, device)
    if device.startswith("host"):
        for stream in streamrt.current_streams(streamrt.parse_device(device)):
            stream.synchronize()
    return moved


def expect(array: Any, device: str) -> None:
    found = str(streamrt.device_of(array))
    if found != device:
        raise Placed(f"an argument arrived on {found}, not on {device}")


def slow(stream: Stream) -> None:
    """A delay on a stream: a latch that a timer opens."""
    latch = Latch(stream)
    timer = threading.Timer(_delay, latch.open)
    timer.daemon = True
    timer.start()


@service.function
def drop(edge: str, delay: float) -> None:
    """Until `restore`, this process drops the waits of that name and is slow for `delay` seconds."""
    global _delay
    _dropped.enter_context(without(edge))
    _delay = delay


@service.function
def restore() -> None:
    """Ends what `drop` began; fails if nothing was dropped."""
    global _delay
    _delay = DELAY
    _dropped.close()


@service.function
def meet(name: str, parties: int) -> int:
    """Returns when as many calls as that are running in this process at once."""
    with _lock:
        barrier = _barriers.setdefault(name, threading.Barrier(parties))
    barrier.wait(MEETING_SECONDS)
    return parties


@service.function
def add(x: Any, y: Any, x_at: str, y_at: str, z_at: str) -> Any:
    expect(x, x_at)
    expect(y, y_at)
    x, y = on(x, z_at), on(y, z_at)
    with streamrt.device_guard(z_at):  # CuPy launches on the current device, wherever the arrays are
        return on(x + y, z_at)


@service.function
def two(x: Any, y: Any, x_at: str, y_at: str) -> Any:
    expect(x, x_at)
    expect(y, y_at)
    with streamrt.device_guard(x_at):
        total = on(x + on(y, x_at), x_at)
    with streamrt.device_guard(y_at):
        return total, on(on(x, y_at) - y, y_at)


@service.function
def four(x: Any, y: Any, places: list[str]) -> list[Any]:
    results = (x + y, x - y, x * y, x / y)
    return [streamrt.array(result, device=place) for result, place in zip(results, places, strict=True)]


@service.function
def make(device: str, value: float) -> Any:
    return streamrt.array(np.full(1000, value, np.float32), device=device)


@service.function
def made_late(device: str, value: float) -> Any:
    """A result on a device that no argument used, ready only after a delay."""
    where = streamrt.parse_device(device)
    result = streamrt.empty(1000, "float32", device=device)
    stream = streamrt.current_stream(where)
    slow(stream)
    stream.launch(fill, result, value, writes=[result])
    return result


@service.function
def same(x: Any) -> Any:
    return x


@torch_service.function
def mismatch(x: Any) -> Any:
    import torch

    return x + torch.ones(x.shape, device="cpu" if x.is_cuda else "meta")


def fill(target: Any, value: float) -> None:
    target[...] = value


def add_into(target: Any, *terms: Any) -> None:
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    target[...] = total


def on_own_stream(form: str, *terms: Any) -> Any:
    """Adds on a stream of its own, after a delay, and joins back: the RFC's user who switches streams."""
    device = streamrt.device_of(terms[0])
    current = streamrt.current_stream(device)
    own = Stream(device)
    own.wait(current)
    slow(own)
    with streamrt.using(own):
        if form == "plain":
            result = streamrt.to(sum(terms[1:], terms[0]), str(device))
        else:
            result = streamrt.empty(terms[0].shape, str(terms[0].dtype), device=str(device))
            own.launch(add_into, result, *terms, reads=list(terms), writes=[result])
    for array in (result, *terms):
        streamrt.use(array, own)
    current.wait(own, edge=JOIN_EDGE)
    return result


@service.function
def double_late(x: Any, form: str) -> Any:
    return on_own_stream(form, x, x)


@service.function
def nested(x: Any, y: Any, z: Any, form: str, address: str, device_map: dict[str, str]) -> Any:
    """Adds x and y, and lets a third worker add z; it calls with arrays that are not ready yet."""
    with transport.connect(address, device_map=device_map) as third:
        partial = on_own_stream(form, x, y)
        return third.call("add_late", partial, z, form)


@service.function
def add_late(x: Any, y: Any, form: str) -> Any:
    return on_own_stream(form, x, y)


@service.function
def first_piece(x: Any, form: str) -> Any:
    """A view of a result that is only written after a delay."""
    device = streamrt.device_of(x)
    stream = streamrt.current_stream(device)
    slow(stream)
    if form == "plain":
        result = streamrt.to(np.concatenate([x] * PIECES), str(device))
    else:
        result = streamrt.empty((PIECES * x.shape[0], *x.shape[1:]), str(x.dtype), device=str(device))
        stream.launch(tile_into, result, x, reads=[x], writes=[result])
    return result[: x.shape[0]]


PIECES = 5


def tile_into(target: Any, x: Any) -> None:
    for start in range(0, target.shape[0], x.shape[0]):
        target[start : start + x.shape[0]] = x
