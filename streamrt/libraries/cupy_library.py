"""CuPy arrays, whose library keeps the current stream that the whole runtime follows on GPUs.

CuPy remembers a stream set with ``.use()`` and one entered by ``with`` in two places and forgets the first when it
leaves the second (cupy/cupy#8377), and compares streams by their raw pointer only.  So what was current is saved and
set again here, by ``.use()``, with the right device current each time.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import cupy
import numpy as np

from streamrt.cuda.current import NamedStream, cupy_stream
from streamrt.device import Device
from streamrt.errors import ArrayError
from streamrt.libraries import ArrayInfo
from streamrt.libraries.dlpack import Exported, relabel
from streamrt.libraries.dtypes import byte_strides, canonical, numpy_dtype
from streamrt.libraries.streamless import Streamless, join_current
from streamrt.stream import Stream

if TYPE_CHECKING:
    from streamrt.libraries import Library

_runtime = cupy.cuda.runtime
_get_current_stream = cupy.cuda.get_current_stream
_pop = cupy.cuda.Stream.null.__exit__  # of whatever stream was pushed last, of its device, which must be current


class CupyLibrary(Streamless):
    """`cupy.ndarray`."""

    name = "cupy"
    keeps_readonly = False

    # streams

    def save(self, device: Device) -> Any:
        if device.kind != "cuda":
            return None
        now = _runtime.getDevice()
        streams = [(now, _get_current_stream(now), None)]
        if device.index != now:
            streams.insert(0, (device.index, _get_current_stream(device.index), None))
        return streams

    def restore(self, token: Any) -> None:
        for index, stream, pushed in token or ():  # the last is the device that was current: it is again
            _runtime.setDevice(index)
            if pushed is not None:
                _pop()
            if stream is not None and _get_current_stream(index) is not stream:
                stream.use()

    def set_device(self, device: Device) -> None:
        if device.kind == "cuda":
            _runtime.setDevice(device.index)

    def current_stream(self, device: Device) -> Stream | None:
        if device.kind != "cuda":
            return None
        stream = _get_current_stream(device.index)
        handle = stream.ptr
        if handle == 0:  # the null stream lives as long as the process
            return Stream.borrow(handle, device)
        if type(stream) is NamedStream:
            owner = stream.owner
            if isinstance(owner, Stream) and owner.handle == handle and owner.device is device:
                return owner
        return Stream.borrow(handle, device, owner=stream)

    def handle_reader(self, device: Device) -> Callable[[], int] | None:
        if device.kind != "cuda":
            return None
        index = device.index
        return lambda: _get_current_stream(index).ptr

    def here_reader(self, device: Device) -> Callable[[], Any] | None:
        reader: Callable[[], Any] = _get_current_stream
        return reader if device.kind == "cuda" else None

    def set_current_stream(self, device: Device, stream: Stream) -> Any:
        if device.kind == "cuda":
            _runtime.setDevice(device.index)
            _native(stream).use()
        return None

    def push_stream(self, device: Device, stream: Stream) -> Any:
        """A ``with`` of CuPy's goes back to what was pushed last, whatever `use` has made current."""
        if device.kind != "cuda":
            return None
        _runtime.setDevice(device.index)
        native = _native(stream)
        native.__enter__()
        return ((device.index, None, native),)

    def exchange(self, device: Device, stream: Stream) -> Any:
        if device.kind != "cuda":
            return None
        native = _native(stream)
        token = ((device.index, _get_current_stream(device.index), native),)
        native.__enter__()
        return token

    def set_aside(self, token: Any) -> None:
        for index, _, pushed in token or ():
            if pushed is not None:
                with _unchanged(index):
                    _pop()

    def take_up(self, token: Any) -> None:
        for index, _, pushed in token or ():
            if pushed is not None:
                with _unchanged(index):
                    pushed.__enter__()

    # arrays

    def owns(self, value: object) -> bool:
        return isinstance(value, cupy.ndarray)

    def device_of(self, array: Any) -> Device:
        return Device("cuda", array.data.device_id)

    def index_reader(self) -> Callable[[Any], int] | None:
        return operator.attrgetter("data.device_id")

    def describe(self, array: Any) -> ArrayInfo:
        dtype, memory, shape, elements = array.dtype, array.data, tuple(array.shape), array.size
        device = Device("cuda", memory.device_id)
        address = memory.ptr if elements else 0
        size = dtype.itemsize
        strides = None if array.flags.c_contiguous else byte_strides(shape, tuple(array.strides), size)
        return ArrayInfo("cupy", device, address, shape, strides, canonical(dtype), size, elements * size, False)

    def join(self, array: Any, stream: Stream) -> None:
        device = self.device_of(array)
        join_current(device, stream, self.current_stream(device))

    def retain(self, array: Any, stream: Stream) -> Any:
        return array.data.mem

    def refusal(self, dtype: str, device: Device) -> str | None:
        if device.kind != "cuda":
            return f"CuPy cannot hold memory of {device}; use arrays='numpy', or move the array to a GPU"
        if dtype.startswith("float8"):
            return f"CuPy has no {dtype}; use arrays='torch' or arrays='jax'"
        try:
            numpy_dtype(dtype)
        except ArrayError as error:
            return str(error)
        return None

    def accepts(self, info: ArrayInfo) -> bool:
        return info.address % info.itemsize == 0

    def empty(self, shape: tuple[int, ...], dtype: str, device: Device) -> Any:
        self._check(dtype, device)
        with device.backend.activate(device.index):
            return cupy.empty(shape, numpy_dtype(dtype))

    def wrap(
        self, address: int, nbytes: int, shape: tuple[int, ...], dtype: str, device: Device, holder: object
    ) -> Any:
        memory = cupy.cuda.UnownedMemory(address, nbytes, holder, device.index)
        with device.backend.activate(device.index):
            return cupy.ndarray(shape, numpy_dtype(dtype), memptr=cupy.cuda.MemoryPointer(memory, 0))

    def _check(self, dtype: str, device: Device) -> None:
        reason = self.refusal(dtype, device)
        if reason is not None:
            raise ArrayError(reason)

    def export(self, array: Any, stream: Stream | None) -> Any:
        device = self.device_of(array)
        if stream is not None:
            self.join(array, stream)
        with device.backend.activate(device.index):
            if any(stride < 0 for stride in array.strides) and self.describe(array).strides is None:
                array = cupy.ndarray(array.shape, array.dtype, memptr=array.data)  # only axes of one element were odd
            return relabel(array.__dlpack__(stream=-1), canonical(array.dtype))

    def adopt(self, source: Library, array: Any, info: ArrayInfo) -> Any:
        self._check(info.dtype, info.device)
        with info.device.backend.activate(info.device.index):
            return cupy.from_dlpack(Exported(source, array, info.device))

    def as_numpy(self, array: Any) -> np.ndarray[Any, Any]:
        raise ArrayError(f"the array is on {self.device_of(array)}; move it with streamrt.arrays.to(array, 'cpu')")

    def copied(self, array: Any, dtype: str | None = None) -> Any:
        device = self.device_of(array)
        with device.backend.activate(device.index):
            return cupy.array(array, None if dtype is None else numpy_dtype(dtype), copy=True, order="C")

    def upload(self, array: np.ndarray[Any, Any], device: Device) -> Any:
        self._check(canonical(array.dtype), device)
        with device.backend.activate(device.index):
            return cupy.array(array)

    def download(self, array: Any) -> np.ndarray[Any, Any]:
        device = self.device_of(array)
        with device.backend.activate(device.index):
            host: np.ndarray[Any, Any] = cupy.asnumpy(array)
        return host


@contextmanager
def _unchanged(index: int) -> Iterator[None]:
    """The device is current, for CuPy's stack of it to change; afterwards the device and its stream are what was."""
    now = _runtime.getDevice()
    _runtime.setDevice(index)
    stream = _get_current_stream(index)
    try:
        yield
    finally:
        if _get_current_stream(index) is not stream:
            stream.use()
        _runtime.setDevice(now)


def _native(stream: Stream) -> Any:
    """CuPy's object for a stream; while it is current, CuPy keeps it, and it keeps ours."""
    natives = stream.natives
    if natives is not None:
        known = natives.get("cupy")
        if known is None:
            known = natives["cupy"] = cupy_stream(stream.device.index, stream.handle, stream)
        return known
    owner = stream.owner
    if getattr(owner, "ptr", None) != stream.handle:
        owner = stream
    return cupy_stream(stream.device.index, stream.handle, owner)
