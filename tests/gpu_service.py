"""The functions that the RPC tests on GPUs call.  Arrays are CuPy's unless the service says otherwise."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

import streamrt
import transport
from streamrt.testing import Latch

service = transport.Service()
torch_service = transport.Service(arrays="torch")
jax_service = transport.Service(arrays="jax")

DELAY = 0.3  # seconds for which "late" results are not there; nothing waits for it to pass


def fill(target: Any, value: float) -> None:
    target[...] = value


@service.function
def total(x: Any) -> float:
    return float(x.sum(dtype="float64"))


@service.function(borrow=True)
def ends(x: Any) -> float:
    """The sum of the first and the last element, read where they lie."""
    return float(x[0]) + float(x[-1])


@service.function
def double(x: Any) -> Any:
    return x * 2


@service.function
def each_doubled(arrays: list[Any]) -> list[Any]:
    return [x * 2 for x in arrays]


@service.function
def increment(x: Any) -> Any:
    x += 1
    return x


@service.function
def kind_of(x: Any) -> tuple[str, str]:
    return type(x).__module__.partition(".")[0], str(streamrt.device_of(x))


@service.function
def made_late(device: str, value: float) -> Any:
    """On a device that no argument used, written on its current stream behind a delay."""
    where = streamrt.parse_device(device)
    result = streamrt.empty(1000, "float32", device=device)
    stream = streamrt.current_stream(where)
    latch = Latch(stream)
    threading.Timer(DELAY, latch.open).start()
    stream.launch(fill, result, value, writes=[result])
    return result


@service.function
def both(x: Any, y: Any) -> tuple[Any, Any]:
    with streamrt.device_guard(streamrt.device_of(y)):  # CuPy launches on the current device, wherever the arrays are
        tripled = y * 3
    return x * 2, tripled


@service.function
def from_host(x: Any) -> Any:
    """What a process without GPUs makes of ordinary memory."""
    return np.asarray(x) * 2


@service.function
def sample(x: Any, offsets: list[int]) -> tuple[int, list[int]]:
    return int(x.size), [int(x[offset]) for offset in offsets]


@service.function
def break_device(x: Any) -> float:
    """Writes where nobody may: from then on every CUDA call of this process fails."""
    import cupy

    kernel = cupy.RawKernel('extern "C" __global__ void wild(int* p) { p[1ll << 40] = 1; }', "wild")
    kernel((1,), (1,), (x,))
    return float(x.sum())


@torch_service.function
def torch_double(x: Any) -> Any:
    return x * 2


@torch_service.function
def torch_same(x: Any) -> tuple[Any, str]:
    """The tensor, and the dtype that it has here."""
    return x, str(x.dtype)


@jax_service.function
def jax_double(x: Any) -> Any:
    return x * 2


@service.function
def after_a_with_of_its_own(x: Any) -> tuple[int, int]:
    """The handles of CuPy's current stream before a block on another stream, and behind it."""
    import cupy

    before = cupy.cuda.get_current_stream().ptr
    with cupy.cuda.Stream(non_blocking=True):
        pass
    return before, cupy.cuda.get_current_stream().ptr
