"""Arrays in ordinary memory, on ``cpu`` or on a virtual device ``host:i``: NumPy, torch and JAX share what is here.

Where an array is follows from its address alone, so every zero-copy view of it, in any library, is there too.  Copies
on a virtual device are queued on its current stream; on ``cpu`` they are made at once.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from streamrt.device import CPU, Block, Device, backend_of
from streamrt.libraries.dtypes import count, itemsize, numpy_dtype, storage_dtype

if TYPE_CHECKING:
    from streamrt.device import Backend
    from streamrt.libraries import ArrayInfo, Library


@functools.cache
def _host() -> Backend:
    return backend_of("host")


def place(address: int) -> Device:
    """``host:i`` if the address is in memory of that virtual device, else ``cpu``.  Does not touch the device."""
    index = _host().device_of(address)
    return CPU if index is None else Device("host", index)


def wait_until_computed(array: Any) -> None:
    """Blocks the host until an array in ordinary memory is there, which only JAX's may not be: its threads compute it.

    Nothing for arrays of other libraries.
    """
    ready = getattr(array, "block_until_ready", None)
    if ready is not None:
        ready()


def allocate(device: Device, nbytes: int) -> Block:
    """64-byte aligned memory on a virtual device (for its current stream) or on ``cpu``.  Does not block the host."""
    backend = _host()
    if device.kind == "cpu":
        return backend.allocate_pinned(nbytes)
    return backend.allocate(device.index, nbytes, backend.current_stream(device.index))


class _Memory:
    """Shows memory to NumPy and keeps its holder: NumPy keeps this object as the base of every view."""

    __slots__ = ("__array_interface__", "holder")

    def __init__(self, interface: dict[str, Any], holder: object) -> None:
        self.__array_interface__ = interface
        self.holder = holder


def is_memory_base(base: object) -> bool:
    """Whether it is what an array over memory of the runtime has as its base.  Does not touch the device."""
    return type(base) is _Memory


def view(
    address: int,
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    holder: object,
    strides: tuple[int, ...] | None = None,
) -> np.ndarray[Any, Any]:
    """A writable NumPy array over memory; `holder` lives as long as any view of it.  Does not touch the device."""
    plain = dtype if dtype.isbuiltin == 1 else np.dtype(f"u{dtype.itemsize}")  # ml_dtypes are no type strings
    interface = {
        "data": (address, False),
        "shape": shape,
        "strides": strides,
        "typestr": plain.str,
        "version": 3,
    }
    array: np.ndarray[Any, Any] = np.asarray(_Memory(interface, holder))
    return array if plain is dtype else array.view(dtype)


def enqueue(device: Device, function: Callable[[], object]) -> None:
    """Enqueues on the current stream of a virtual device; on ``cpu`` it runs now."""
    if device.kind == "cpu":
        function()
        return
    backend = device.backend
    backend.launch(device.index, backend.current_stream(device.index), function, (), (), ())


def enqueue_copy(device: Device, destination: np.ndarray[Any, Any], source: np.ndarray[Any, Any], keep: object) -> None:
    """Enqueues an element-wise copy (of any layout, and cast) on the device's current stream; keeps both alive."""

    def copy_elements(kept: object = keep) -> None:
        np.copyto(destination, source, casting="unsafe")

    enqueue(device, copy_elements)


def enqueue_upload(device: Device, destination: np.ndarray[Any, Any], source: np.ndarray[Any, Any]) -> None:
    """Enqueues a copy out of plain memory, which may be changed as soon as this returns.  Does not block the host.

    Where the copy has not run by then, its source is copied aside first.
    """
    lock = threading.Lock()
    pending = [source]

    def copy_elements() -> None:
        with lock:
            np.copyto(destination, pending.pop())

    enqueue(device, copy_elements)
    with lock:
        if pending:
            pending[0] = source.copy()


def packed(
    target: Library, source: np.ndarray[Any, Any], info: ArrayInfo, dtype: str | None = None, *, keep: object = None
) -> Any:
    """A C-contiguous copy on the same device as an array of `target`; `source` shows the array's memory to NumPy.

    Enqueues on the current stream of a virtual device; on ``cpu`` it is done at once.
    """
    wanted = dtype or info.dtype
    nbytes = count(info.shape) * itemsize(wanted)
    block = allocate(info.device, nbytes)
    cast = wanted != info.dtype
    place_for = view(block.address, info.shape, numpy_dtype(wanted) if cast else storage_dtype(wanted), block)
    if not cast and source.dtype != place_for.dtype:
        source = source.view(place_for.dtype)
    enqueue_copy(info.device, place_for, source, keep)
    return target.wrap(block.address, nbytes, info.shape, wanted, info.device, block)
