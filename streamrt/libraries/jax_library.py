"""JAX arrays: immutable, with no current stream; each waits on its own definition event.

That event is reached through `__dlpack__(stream=number)`, which hands the number to the driver as it is: so it is never
-1, never 0, and never omitted for a GPU (the host would block).  Imports need memory without holes, aligned to 64 bytes
on the host; 64-bit types are cut to 32 bits in silence unless ``jax_enable_x64`` is set, so they are refused here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from streamrt.device import Device, StreamKey, opened_devices
from streamrt.errors import ArrayError, CaptureError
from streamrt.libraries import ArrayInfo, library
from streamrt.libraries.dlpack import Exported, stream_number
from streamrt.libraries.dtypes import DLPACK_CODES, byte_strides, canonical, compact, count, itemsize
from streamrt.libraries.host_memory import allocate, packed, place, view
from streamrt.libraries.streamless import Streamless, join_current
from streamrt.stream import Stream

if TYPE_CHECKING:
    from streamrt.libraries import Library

_WIDE = ("int64", "uint64", "float64", "complex128")
_HOST_ALIGNMENT = 64
_DEVICE_ALIGNMENT = 16  # of XLA's entry parameters on GPUs


class JaxLibrary(Streamless):
    """`jax.Array` on one device.  What comes out of JAX is read-only where the other library can say so."""

    name = "jax"
    keeps_readonly = True

    def __init__(self) -> None:
        self._devices: dict[Device, Any] = {}
        self._side: dict[StreamKey, Stream] = {}

    def owns(self, value: object) -> bool:
        return isinstance(value, jax.Array)

    def _jax_device(self, device: Device) -> Any:
        """JAX's device for one of ours.  Raises `ArrayError` where this JAX does not drive it."""
        found = self._devices.get(device)
        if found is None:
            platform = "cuda" if device.kind == "cuda" else "cpu"
            try:
                here = jax.local_devices(backend=platform)
            except RuntimeError as error:
                raise ArrayError(
                    f"this JAX has no {platform} platform, so it cannot hold memory of {device}; "
                    f"install jax[cuda12] or jax[cuda13], or set JAX_PLATFORMS ({error})"
                ) from None
            matches = [one for one in here if device.kind != "cuda" or one.local_hardware_id == device.index]
            if not matches:
                raise ArrayError(
                    f"JAX does not see {device}; set JAX_PLATFORMS and CUDA_VISIBLE_DEVICES so that it does"
                )
            found = self._devices[device] = matches[0]
        return found

    def device_of(self, array: Any) -> Device:
        if isinstance(array, jax.core.Tracer):
            raise ArrayError("a JAX tracer is no array yet; call outside of jit, grad and vmap, or use io_callback")
        if array.is_deleted():
            raise ArrayError(
                "the JAX array was deleted or donated; keep a copy of what you pass to a donating function"
            )
        devices = array.devices()
        if len(devices) != 1 or not array.is_fully_addressable:
            raise ArrayError(
                f"the JAX array is sharded over {len(devices)} devices; send its addressable_shards one by one"
            )
        (device,) = devices
        if device.platform == "cpu":
            return (
                place(array.unsafe_buffer_pointer())
                if not jax.dtypes.issubdtype(array.dtype, jax.dtypes.extended)
                else place(0)
            )
        if device.platform in ("gpu", "cuda"):
            return Device("cuda", device.local_hardware_id)
        raise ArrayError(f"a JAX array on {device.platform} cannot travel; move it to the CPU or to a GPU first")

    def describe(self, array: Any) -> ArrayInfo:
        device = self.device_of(array)
        if jax.dtypes.issubdtype(array.dtype, jax.dtypes.extended):
            raise ArrayError(f"a JAX array of {array.dtype} cannot travel; for keys send jax.random.key_data(key)")
        dtype = canonical(array.dtype)
        size = itemsize(dtype)
        shape = tuple(array.shape)
        return ArrayInfo(
            library="jax",
            device=device,
            address=array.unsafe_buffer_pointer() if array.size else 0,
            shape=shape,
            strides=_strides(array, shape, size) if len(shape) > 1 else None,
            dtype=dtype,
            itemsize=size,
            nbytes=array.size * size,
            readonly=True,
        )

    def join(self, array: Any, stream: Stream) -> None:
        if stream.capturing:
            _refuse()
        device = self.device_of(array)
        if device.kind == "cuda":
            array.__dlpack__(stream=stream_number(stream))
            return
        if stream.device.kind == "host":
            stream.launch(array.block_until_ready)
        else:
            array.block_until_ready()
        join_current(device, stream, None)

    def refusal(self, dtype: str, device: Device) -> str | None:
        if dtype in _WIDE and not jax.config.jax_enable_x64:
            return (
                f"JAX cuts {dtype} to 32 bits while jax_enable_x64 is off; "
                "set jax.config.update('jax_enable_x64', True), or JAX_ENABLE_X64=1 in the environment (of the worker, "
                "if a worker says so), or convert the array with .astype"
            )
        if dtype in DLPACK_CODES and not hasattr(jnp, dtype):
            return f"jax {jax.__version__} has no {dtype}; convert the array with .astype first"
        try:
            self._jax_device(device)
        except ArrayError as error:
            return str(error)
        return None

    def accepts(self, info: ArrayInfo) -> bool:
        alignment = _DEVICE_ALIGNMENT if info.device.kind == "cuda" else _HOST_ALIGNMENT
        return info.address % alignment == 0 and compact(info.shape, info.strides, info.itemsize)

    def empty(self, shape: tuple[int, ...], dtype: str, device: Device) -> Any:
        nbytes = count(shape) * itemsize(dtype)
        if device.kind == "cuda":
            cupy = library("cupy")
            stream = cupy.current_stream(device)
            block = device.backend.allocate(device.index, nbytes, 0 if stream is None else stream.handle)
        else:
            block = allocate(device, nbytes)
        return self.wrap(block.address, nbytes, shape, dtype, device, block)

    def wrap(
        self, address: int, nbytes: int, shape: tuple[int, ...], dtype: str, device: Device, holder: object
    ) -> Any:
        _refuse_in_capture(device)
        self._check(dtype, device)
        bits = f"uint{8 * itemsize(dtype)}" if dtype in DLPACK_CODES else dtype
        source = library("cupy" if device.kind == "cuda" else "numpy")
        shown = source.wrap(address, nbytes, shape, bits, device, holder)
        return self._import(Exported(source, shown, device, dtype))

    def _check(self, dtype: str, device: Device) -> None:
        reason = self.refusal(dtype, device)
        if reason is not None:
            raise ArrayError(reason)

    @staticmethod
    def _import(exported: Exported) -> Any:
        return jax.dlpack.from_dlpack(exported)

    def export(self, array: Any, stream: Stream | None) -> Any:
        if stream is not None and stream.capturing:
            _refuse()
        device = self.device_of(array)
        if device.kind != "cuda":
            return array.__dlpack__(stream=None)
        if stream is None:  # no order is wanted, and JAX must be given a stream: one that nothing else runs on
            key = ("side", device)
            stream = self._side.get(key)
            if stream is None:
                stream = self._side[key] = Stream(device)
        return array.__dlpack__(stream=stream_number(stream))

    def adopt(self, source: Library, array: Any, info: ArrayInfo) -> Any:
        _refuse_in_capture(info.device)
        self._check(info.dtype, info.device)
        if not self.accepts(info):
            raise ArrayError("JAX cannot share an array with holes or unaligned memory; let convert make a copy")
        if info.device.kind == "cuda":
            return self._import(Exported(source, array, info.device))
        return self._import(Exported(library("numpy"), source.as_numpy(array), info.device, info.dtype))

    def as_numpy(self, array: Any) -> np.ndarray[Any, Any]:
        if self.device_of(array).kind == "cuda":
            raise ArrayError("the JAX array is on a GPU; move it with streamrt.arrays.to(array, 'cpu')")
        info = self.describe(array)
        if info.strides is None:
            shown: np.ndarray[Any, Any] = np.asarray(array)
            return shown
        array.block_until_ready()  # of another order of axes NumPy would make a copy
        shown = view(info.address, info.shape, array.dtype, array, info.strides)
        shown.flags.writeable = False
        return shown

    def copied(self, array: Any, dtype: str | None = None) -> Any:
        info = self.describe(array)
        _refuse_in_capture(info.device)
        if info.device.kind != "cuda":
            return packed(self, self.as_numpy(array), info, dtype, keep=array)
        self._check(dtype or info.dtype, info.device)
        return jnp.array(array, dtype=dtype or info.dtype, copy=True)

    def upload(self, array: np.ndarray[Any, Any], device: Device) -> Any:
        self._check(canonical(array.dtype), device)
        return jax.device_put(array.copy(), self._jax_device(device))  # JAX reads its source after the call returns

    def download(self, array: Any) -> np.ndarray[Any, Any]:
        return np.array(array)


def _refuse() -> NoReturn:
    raise CaptureError(
        "JAX computes on streams of its own, which no capture of ours holds: convert the array before the capture "
        "(streamrt.convert(array, 'cupy')), and let jax.jit do for JAX what a graph does"
    )


def _refuse_in_capture(device: Device) -> None:
    """An import or a copy would run on JAX's own streams, and draw them into the capture or away from it."""
    if device in opened_devices():
        backend = device.backend
        if backend.capturing(device.index, backend.current_stream(device.index)):
            _refuse()


def _strides(array: Any, shape: tuple[int, ...], size: int) -> tuple[int, ...] | None:
    """An imported array keeps the order of axes of its memory; all others are C-contiguous."""
    order = array.format.layout.major_to_minor
    strides = [0] * len(shape)
    step = size
    for axis in reversed(order):
        strides[axis] = step
        step *= shape[axis]
    return byte_strides(shape, tuple(strides), size)
