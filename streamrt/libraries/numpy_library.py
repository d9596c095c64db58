"""NumPy arrays: in ordinary memory (``cpu``) or in that of a virtual device (``host:i``).  NumPy has no streams."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from streamrt.errors import ArrayError
from streamrt.libraries import ArrayInfo
from streamrt.libraries.dlpack import host_capsule
from streamrt.libraries.dtypes import byte_strides, canonical, count, itemsize, numpy_dtype
from streamrt.libraries.host_memory import allocate, packed, place, view
from streamrt.libraries.streamless import Streamless, join_current

if TYPE_CHECKING:
    from streamrt.device import Device
    from streamrt.libraries import Library
    from streamrt.stream import Stream


class NumpyLibrary(Streamless):
    """`numpy.ndarray` and its subclasses; scalars such as ``np.float32(1)`` are values, not arrays."""

    name = "numpy"
    keeps_readonly = True

    def owns(self, value: object) -> bool:
        return isinstance(value, np.ndarray)

    def device_of(self, array: Any) -> Device:
        return place(int(array.__array_interface__["data"][0]))

    def describe(self, array: Any) -> ArrayInfo:
        if isinstance(array, np.ma.MaskedArray):
            raise ArrayError("a masked array cannot travel; send .filled(), or .data and .mask")
        dtype, shape, flags, elements = array.dtype, array.shape, array.flags, array.size
        name = canonical(dtype)
        address = int(array.__array_interface__["data"][0])
        device = place(address)
        if not elements:
            address = 0
        size = dtype.itemsize
        strides = None if flags.c_contiguous else byte_strides(shape, array.strides, size)
        return ArrayInfo("numpy", device, address, shape, strides, name, size, elements * size, not flags.writeable)

    def join(self, array: Any, stream: Stream) -> None:
        join_current(self.device_of(array), stream, None)

    def refusal(self, dtype: str, device: Device) -> str | None:
        if device.kind == "cuda":
            return f"NumPy cannot hold memory of {device}; use arrays='cupy', or move the array to 'cpu'"
        try:
            numpy_dtype(dtype)
        except ArrayError as error:
            return str(error)
        return None

    def empty(self, shape: tuple[int, ...], dtype: str, device: Device) -> Any:
        nbytes = count(shape) * itemsize(dtype)
        block = allocate(device, nbytes)
        return self.wrap(block.address, nbytes, shape, dtype, device, block)

    def wrap(
        self, address: int, nbytes: int, shape: tuple[int, ...], dtype: str, device: Device, holder: object
    ) -> Any:
        if device.kind == "cuda":
            raise ArrayError(self.refusal(dtype, device))
        return view(address, shape, numpy_dtype(dtype), holder)

    def export(self, array: Any, stream: Stream | None) -> Any:
        return host_capsule(array, canonical(array.dtype))

    def adopt(self, source: Library, array: Any, info: ArrayInfo) -> Any:
        return source.as_numpy(array)

    def as_numpy(self, array: Any) -> np.ndarray[Any, Any]:
        shown: np.ndarray[Any, Any] = array
        return shown

    def copied(self, array: Any, dtype: str | None = None) -> Any:
        return packed(self, array, self.describe(array), dtype, keep=array)

    def upload(self, array: np.ndarray[Any, Any], device: Device) -> Any:
        raise ArrayError(self.refusal("float32", device))

    def download(self, array: Any) -> np.ndarray[Any, Any]:
        raise ArrayError("a NumPy array is on no GPU; use arrays.to")
