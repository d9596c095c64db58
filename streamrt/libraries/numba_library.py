"""numba's device arrays, on GPUs only.

numba has no current stream: a kernel without an explicit stream runs on the default stream, and an array may be bound
to a stream of its own.  So the default stream counts as current, cannot be moved, and a guard fences it in and out.
numba exports no DLPack; its arrays go out as CuPy's view of the same memory.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np
from numba import cuda

from streamrt.device import Device, backend_of
from streamrt.errors import ArrayError
from streamrt.libraries import ArrayInfo, library
from streamrt.libraries.dtypes import DLPACK_CODES, byte_strides, canonical, count, numpy_dtype
from streamrt.libraries.streamless import Streamless
from streamrt.stream import Stream

if TYPE_CHECKING:
    from streamrt.libraries import Library


class NumbaLibrary(Streamless):
    """`numba.cuda` device arrays."""

    name = "numba"
    keeps_readonly = False

    # streams

    @staticmethod
    def _default(device: Device) -> Stream:
        per_thread = os.environ.get("NUMBA_CUDA_PER_THREAD_DEFAULT_STREAM", "0") not in ("", "0")
        return Stream.borrow(2 if per_thread else 0, device)

    def current_stream(self, device: Device) -> Stream | None:
        return self._default(device) if device.kind == "cuda" else None

    def set_current_stream(self, device: Device, stream: Stream) -> Any:
        """Enqueues on the default stream a wait for `stream`: numba's launches come after what is on it."""
        if device.kind != "cuda" or stream.capturing:
            return None
        default = self._default(device)
        default.wait(stream, edge="guard.enter")
        return (default, stream)

    def restore(self, token: Any) -> None:
        """Enqueues on the guarded stream a wait for numba's launches on the default stream."""
        if token is not None and not token[1].capturing:
            token[1].wait(token[0], edge="guard.exit")

    # arrays

    def owns(self, value: object) -> bool:
        return bool(cuda.is_cuda_array(value)) and type(value).__module__.startswith("numba")

    def device_of(self, array: Any) -> Device:
        address = _address(array)
        index = backend_of("cuda").device_of(address) if address else None
        return Device("cuda", cuda.current_context().device.id if index is None else index)

    def describe(self, array: Any) -> ArrayInfo:
        dtype = canonical(array.dtype)
        size = array.dtype.itemsize
        shape = tuple(array.shape)
        return ArrayInfo(
            library="numba",
            device=self.device_of(array),
            address=_address(array) if array.size else 0,
            shape=shape,
            strides=byte_strides(shape, tuple(array.strides), size),
            dtype=dtype,
            itemsize=size,
            nbytes=array.size * size,
            readonly=False,
        )

    def _stream_of(self, array: Any, device: Device) -> Stream:
        bound = getattr(array, "stream", 0)
        handle = getattr(bound, "handle", bound)
        number = int(getattr(handle, "value", handle) or 0)
        return Stream.borrow(number, device, owner=bound) if number else self._default(device)

    def join(self, array: Any, stream: Stream) -> None:
        stream.wait(self._stream_of(array, self.device_of(array)), edge="array.join")

    def refusal(self, dtype: str, device: Device) -> str | None:
        if device.kind != "cuda":
            return f"numba's device arrays cannot hold memory of {device}; use arrays='numpy', or move it to a GPU"
        if dtype in DLPACK_CODES:
            return f"numba has no {dtype}; use arrays='torch' or arrays='jax'"
        return None

    def empty(self, shape: tuple[int, ...], dtype: str, device: Device) -> Any:
        self._check(dtype, device)
        with device.backend.activate(device.index):
            return cuda.device_array(shape, numpy_dtype(dtype))

    def wrap(
        self, address: int, nbytes: int, shape: tuple[int, ...], dtype: str, device: Device, holder: object
    ) -> Any:
        self._check(dtype, device)
        return self._show(address, shape, None, dtype, device, holder)

    def _check(self, dtype: str, device: Device) -> None:
        reason = self.refusal(dtype, device)
        if reason is not None:
            raise ArrayError(reason)

    @staticmethod
    def _show(
        address: int,
        shape: tuple[int, ...],
        strides: tuple[int, ...] | None,
        dtype: str,
        device: Device,
        holder: object,
    ) -> Any:
        interface = {
            "data": (address, False),
            "shape": shape,
            "strides": strides,
            "typestr": numpy_dtype(dtype).str,
            "version": 3,
        }
        with device.backend.activate(device.index):
            return cuda.from_cuda_array_interface(interface, owner=holder, sync=False)

    def export(self, array: Any, stream: Stream | None) -> Any:
        if stream is not None:
            self.join(array, stream)
        info = self.describe(array)
        cupy = library("cupy")
        nbytes = info.nbytes
        if info.strides is not None:
            nbytes = info.itemsize + sum((n - 1) * s for n, s in zip(info.shape, info.strides, strict=True) if s > 0)
        flat = cupy.wrap(info.address, nbytes, (nbytes,), "uint8", info.device, array)
        shown = type(flat)(info.shape, numpy_dtype(info.dtype), memptr=flat.data, strides=info.strides)
        return cupy.export(shown, None)

    def adopt(self, source: Library, array: Any, info: ArrayInfo) -> Any:
        self._check(info.dtype, info.device)
        source.join(array, self._default(info.device))
        return self._show(info.address, info.shape, info.strides, info.dtype, info.device, array)

    def as_numpy(self, array: Any) -> np.ndarray[Any, Any]:
        raise ArrayError(f"the array is on {self.device_of(array)}; move it with streamrt.arrays.to(array, 'cpu')")

    def copied(self, array: Any, dtype: str | None = None) -> Any:
        """Through CuPy, on the default stream's order."""
        cupy = library("cupy")
        info = self.describe(array)
        copy = cupy.copied(cupy.adopt(self, array, info), dtype)
        return self.adopt(cupy, copy, cupy.describe(copy))

    def upload(self, array: np.ndarray[Any, Any], device: Device) -> Any:
        self._check(canonical(array.dtype), device)
        with device.backend.activate(device.index):
            return cuda.to_device(np.ascontiguousarray(array))

    def download(self, array: Any) -> np.ndarray[Any, Any]:
        if any(stride < 0 for stride in array.strides):  # numba copies no reversed array to the host
            cupy = library("cupy")
            return cupy.download(cupy.adopt(self, array, self.describe(array)))
        host: np.ndarray[Any, Any] = array.copy_to_host()
        return host


def _address(array: Any) -> int:
    return int(array.__cuda_array_interface__["data"][0] or 0) if count(tuple(array.shape)) else 0
