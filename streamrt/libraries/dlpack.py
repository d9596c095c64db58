"""DLPack: which number names which stream, and what an importer sees.

The meaning of an omitted `stream` differs between libraries (the legacy stream, no order at all, a blocked host), so
it is never omitted for a device; 0 is disallowed by the standard, and the null stream is 1.  -1 never reaches JAX.

Source: Python array API standard, ``__dlpack__``; dlpack.h 1.1.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

from streamrt.errors import ArrayError
from streamrt.libraries.dtypes import DLPACK_CODES, byte_strides, storage_dtype
from streamrt.libraries.host_memory import view
from streamrt.stream import Stream

if TYPE_CHECKING:
    import numpy as np

    from streamrt.device import Device
    from streamrt.libraries import Library

_CPU, _CUDA = 1, 2
_CODE_OFFSET = 20  # of DLDataType.code in DLManagedTensor: after data (8), device (4 + 4) and ndim (4)

_pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_of.restype = ctypes.c_void_p
_pointer_of.argtypes = [ctypes.py_object, ctypes.c_char_p]


def stream_number(stream: Stream) -> int:
    """The number that names the stream to a producer: 1 for the null stream, 2 per-thread, else its handle.

    Does not touch the device.
    """
    return stream.handle or 1


def consumer_stream(number: object, device: Device) -> Stream | None:
    """The stream that the consumer names by `number`, None if it wants no order (-1, or memory of the host).

    On a GPU: None and 1 are the legacy default stream, 2 the per-thread one, -1 no order, a handle or an object with
    ``__cuda_stream__`` that stream; 0 is disallowed.  In host memory only None is allowed.  Raises `ArrayError`.
    Does not touch the device.
    """
    if device.kind != "cuda":
        if number is not None:
            raise ArrayError(f"an array in host memory is exported with stream=None, not {number!r}")
        return None
    if isinstance(number, bool) or (not isinstance(number, int | None) and not hasattr(number, "__cuda_stream__")):
        raise ArrayError(f"stream={number!r} is no stream; pass an integer handle, 1 for the default stream, or None")
    if number == 0:
        raise ArrayError("stream=0 is ambiguous and disallowed; pass 1 for the legacy default stream, 2 per-thread")
    if number == -1:
        return None
    if isinstance(number, int) and number < 0:
        raise ArrayError(f"stream={number} is no stream; pass a handle, 1, 2, or -1 for no order")
    return Stream.borrow(1 if number is None else number, device)


class Exported:
    """What an importer sees of an array: the standard's two methods, with the rules of this module kept."""

    __slots__ = ("array", "device", "dtype", "source")

    def __init__(self, source: Library, array: Any, device: Device, dtype: str = "") -> None:
        self.source = source
        self.array = array
        self.device = device
        self.dtype = dtype  # another name for the elements, which the source knows as unsigned integers

    def __dlpack_device__(self) -> tuple[int, int]:
        return (_CUDA, self.device.index) if self.device.kind == "cuda" else (_CPU, 0)

    def __dlpack__(
        self, *, stream: Any = None, max_version: Any = None, dl_device: Any = None, copy: Any = None
    ) -> Any:
        """An unversioned capsule.  Enqueues on `stream` a wait for the array (None on a GPU: the legacy stream)."""
        if copy or (dl_device is not None and tuple(map(int, dl_device)) != self.__dlpack_device__()):
            raise BufferError("this export makes no copies; use streamrt.arrays.to")
        return relabel(self.source.export(self.array, consumer_stream(stream, self.device)), self.dtype)


def host_capsule(array: np.ndarray[Any, Any], dtype: str) -> Any:
    """An unversioned capsule of host memory, whose elements are named `dtype`.  Does not touch the device.

    A read-only array goes out too, though such a capsule cannot say so: who asks for one has promised not to write.
    """
    if dtype in DLPACK_CODES:
        array = array.view(storage_dtype(dtype))
    odd = any(stride < 0 for stride in array.strides)  # along axes of one element or none: importers may abort on it
    if not array.flags.writeable or odd:
        strides = byte_strides(array.shape, array.strides, array.itemsize)
        array = view(array.ctypes.data, array.shape, array.dtype, array, strides)
    return relabel(array.__dlpack__(stream=None), dtype)


def relabel(capsule: Any, dtype: str) -> Any:
    """Names the elements of an unversioned capsule `dtype` (bfloat16, eight-bit floats), exported as unsigned integers.

    The capsule stays its exporter's in all else, the deleter too.  Does not touch the device.
    """
    code = DLPACK_CODES.get(dtype)
    if code is not None:
        address = _pointer_of(capsule, b"dltensor")
        ctypes.c_uint8.from_address(address + _CODE_OFFSET).value = code
    return capsule
