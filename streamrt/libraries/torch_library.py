"""torch tensors: on the host, or on GPUs with torch's own current stream, one for each thread and device.

Traps that this file knows: a negative stride given to `torch.from_dlpack` aborts the process; setting a stream makes
its device current; the per-thread default stream is not supported; `__dlpack__` refuses a tensor of a device that is
not current, and by default orders nothing.  So the order is made here, by an event, and the capsule asked for none.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from streamrt.device import Device
from streamrt.errors import ArrayError, UnavailableError
from streamrt.libraries import ArrayInfo
from streamrt.libraries.dlpack import Exported, host_capsule
from streamrt.libraries.dtypes import (
    DLPACK_CODES,
    ITEMSIZES,
    byte_strides,
    canonical,
    count,
    itemsize,
    numpy_dtype,
    storage_dtype,
)
from streamrt.libraries.host_memory import allocate, packed, place, view
from streamrt.libraries.streamless import Streamless, join_current
from streamrt.libraries.torch_graph import TorchRecorder
from streamrt.stream import Stream

if TYPE_CHECKING:
    from streamrt.captures import Recorder
    from streamrt.libraries import Library

_CUDA = 1  # c10::DeviceType::CUDA
_DTYPES = {name: getattr(torch, name) for name in ITEMSIZES if isinstance(getattr(torch, name, None), torch.dtype)}


class _Interface:
    """Shows device memory to torch, which keeps this object, and with it the holder, as long as any alias lives."""

    __slots__ = ("__cuda_array_interface__", "holder")

    def __init__(self, address: int, nbytes: int, holder: object) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": (nbytes,),
            "strides": None,
            "typestr": "|u1",
            "version": 2,
        }
        self.holder = holder


class TorchLibrary(Streamless):
    """`torch.Tensor` and its subclasses, dense and strided; sparse tensors travel as their dense parts."""

    name = "torch"
    keeps_readonly = False

    def __init__(self) -> None:
        self._cuda: bool | None = None

    # streams

    def _drives(self, device: Device) -> bool:
        if device.kind != "cuda":
            return False
        if self._cuda is None:
            self._cuda = torch.cuda.is_available()
        return self._cuda

    def save(self, device: Device) -> Any:
        if not self._drives(device):
            return None
        torch.cuda._lazy_init()
        now = torch.cuda.current_device()
        streams = [torch._C._cuda_getCurrentStream(now)]
        if device.index != now:
            streams.insert(0, torch._C._cuda_getCurrentStream(device.index))
        return streams

    def restore(self, token: Any) -> None:
        for stream_id, index, device_type in token or ():  # the last is the device that was current: it is again
            torch._C._cuda_setStream(stream_id=stream_id, device_index=index, device_type=device_type)

    def set_device(self, device: Device) -> None:
        if self._drives(device):
            torch.cuda.set_device(device.index)

    def current_stream(self, device: Device) -> Stream | None:
        if not self._drives(device):
            return None
        # Not asked whether torch is initialised: a stream can be made and set before torch says that it is.
        return Stream.borrow(torch._C._cuda_getCurrentRawStream(device.index), device)

    def handle_reader(self, device: Device) -> Callable[[], int] | None:
        return functools.partial(torch._C._cuda_getCurrentRawStream, device.index) if self._drives(device) else None

    def set_current_stream(self, device: Device, stream: Stream) -> Any:
        if not self._drives(device):
            return None
        number = _number(stream)
        torch.cuda._lazy_init()
        torch._C._cuda_setStream(stream_id=number, device_index=device.index, device_type=_CUDA)
        return None

    def exchange(self, device: Device, stream: Stream) -> Any:
        if not self._drives(device):
            return None
        index = device.index
        number = _number(stream)
        torch.cuda._lazy_init()
        token = (torch._C._cuda_getCurrentStream(index),)
        torch._C._cuda_setStream(stream_id=number, device_index=index, device_type=_CUDA)
        return token

    def recorder(self, stream: Stream) -> Recorder | None:
        return TorchRecorder(stream) if self._drives(stream.device) else None

    # arrays

    def owns(self, value: object) -> bool:
        return isinstance(value, torch.Tensor)

    def device_of(self, array: Any) -> Device:
        kind = array.device.type
        if kind == "cpu":
            return place(array.data_ptr()) if array.layout == torch.strided else place(array._values().data_ptr())
        if kind == "cuda":
            return Device("cuda", array.device.index)
        raise ArrayError(f"a tensor on {array.device} cannot travel; move it to 'cpu' or 'cuda' first")

    def index_reader(self) -> Callable[[Any], int] | None:
        get_device: Callable[[Any], int] = torch.Tensor.get_device
        return get_device

    def address_reader(self) -> Callable[[Any], int] | None:
        data_ptr: Callable[[Any], int] = torch.Tensor.data_ptr
        return data_ptr

    def memory_of(self, array: Any) -> object:
        return array.detach()  # an alias: it keeps the storage that `x.data =` takes away

    def resolve(self, array: Any, *, detach: bool = False) -> Any:
        if array.requires_grad:
            if not detach:
                raise ArrayError(
                    "the tensor requires grad, and gradients do not travel; pass tensor.detach() or detach=True"
                )
            array = array.detach()
        if array.is_conj():
            array = array.resolve_conj()
        return array.resolve_neg() if array.is_neg() else array

    def describe(self, array: Any) -> ArrayInfo:
        if array.requires_grad:
            self.resolve(array)
        if array.layout != torch.strided or array.is_nested:
            raise ArrayError(f"a tensor of layout {array.layout} cannot travel whole; send its dense parts")
        if array.is_quantized:
            raise ArrayError("a quantized tensor cannot travel; send .int_repr() with its scale and zero point")
        if array.is_conj() or array.is_neg():
            raise ArrayError("the tensor's conjugate or negative bit is set; pass it through streamrt.arrays.resolve")
        dtype = canonical(array.dtype)
        size = array.element_size()
        shape = tuple(array.shape)
        return ArrayInfo(
            library="torch",
            device=self.device_of(array),
            address=array.data_ptr() if array.numel() else 0,
            shape=shape,
            strides=None
            if array.is_contiguous()
            else byte_strides(shape, tuple(s * size for s in array.stride()), size),
            dtype=dtype,
            itemsize=size,
            nbytes=array.numel() * size,
            readonly=False,
        )

    def join(self, array: Any, stream: Stream) -> None:
        device = self.device_of(array)
        join_current(device, stream, self.current_stream(device))

    def retain(self, array: Any, stream: Stream) -> Any:
        """torch's allocator keeps a storage for the streams that it is told.  Memory that is not its own goes by the
        tensor alone."""
        if array.is_cuda:
            index = stream.device.index
            array.record_stream(torch.cuda.Stream(stream_id=_number(stream), device_index=index, device_type=_CUDA))
        return array

    def refusal(self, dtype: str, device: Device) -> str | None:
        if dtype not in _DTYPES:
            return f"torch {torch.__version__} has no {dtype}; convert the array with .astype first"
        if device.kind == "cuda" and not self._drives(device):
            return f"this torch has no CUDA, so it cannot hold memory of {device}; install a CUDA build of torch"
        return None

    def accepts(self, info: ArrayInfo) -> bool:
        return info.address % info.itemsize == 0 and (
            info.strides is None or all(stride >= 0 and stride % info.itemsize == 0 for stride in info.strides)
        )

    def empty(self, shape: tuple[int, ...], dtype: str, device: Device) -> Any:
        if device.kind == "host":
            nbytes = count(shape) * itemsize(dtype)
            block = allocate(device, nbytes)
            return self.wrap(block.address, nbytes, shape, dtype, device, block)
        self._check(dtype, device)
        return torch.empty(shape, dtype=_DTYPES[dtype], device="cpu" if device.kind == "cpu" else str(device))

    def wrap(
        self, address: int, nbytes: int, shape: tuple[int, ...], dtype: str, device: Device, holder: object
    ) -> Any:
        self._check(dtype, device)
        if device.kind != "cuda":
            plain = view(address, (nbytes,), np.dtype(np.uint8), holder)
            return torch.from_numpy(plain).view(_DTYPES[dtype]).view(shape)
        if nbytes == 0:
            return torch.empty(shape, dtype=_DTYPES[dtype], device=str(device))
        shown = torch.as_tensor(_Interface(address, nbytes, holder), device=str(device))
        return shown.view(_DTYPES[dtype]).view(shape)

    def _check(self, dtype: str, device: Device) -> None:
        reason = self.refusal(dtype, device)
        if reason is not None:
            raise ArrayError(reason)

    def export(self, array: Any, stream: Stream | None) -> Any:
        if not array.is_cuda:
            return host_capsule(self.as_numpy(array), canonical(array.dtype))
        if stream is not None:
            self.join(array, stream)
        with torch.cuda.device(array.device):
            return array.__dlpack__(stream=-1)

    def adopt(self, source: Library, array: Any, info: ArrayInfo) -> Any:
        self._check(info.dtype, info.device)
        if not self.accepts(info):
            raise ArrayError("torch cannot share an unaligned or reversed array; let convert make a copy")
        if info.device.kind == "cuda":
            return torch.from_dlpack(Exported(source, array, info.device))
        shown = source.as_numpy(array).view(storage_dtype(info.dtype))
        # torch has no read-only tensors (the caller was asked and accepts that), and takes no negative stride, not even
        # along an axis of one element
        if not shown.flags.writeable or info.strides is None:
            shown = view(shown.ctypes.data, shown.shape, shown.dtype, shown, info.strides)
        return torch.from_numpy(shown).view(_DTYPES[info.dtype])

    def as_numpy(self, array: Any) -> np.ndarray[Any, Any]:
        if array.is_cuda:
            raise ArrayError(f"the tensor is on {array.device}; move it with streamrt.arrays.to(tensor, 'cpu')")
        dtype = canonical(array.dtype)
        array = array.detach()
        if dtype not in DLPACK_CODES:
            shown: np.ndarray[Any, Any] = array.numpy()
            return shown
        bits: np.ndarray[Any, Any] = array.view(torch.uint16 if dtype == "bfloat16" else torch.uint8).numpy()
        try:
            return bits.view(numpy_dtype(dtype))
        except ArrayError:  # without ml_dtypes: the bits
            return bits

    def copied(self, array: Any, dtype: str | None = None) -> Any:
        wanted = array.dtype if dtype is None else _DTYPES[dtype]
        if self.device_of(array).kind == "host":
            return packed(self, self.as_numpy(array), self.describe(array), dtype, keep=array)
        return array.to(wanted, copy=True, memory_format=torch.contiguous_format)

    def upload(self, array: np.ndarray[Any, Any], device: Device) -> Any:
        dtype = canonical(array.dtype)
        self._check(dtype, device)
        return torch.from_numpy(array.view(storage_dtype(dtype))).view(_DTYPES[dtype]).to(str(device))

    def download(self, array: Any) -> np.ndarray[Any, Any]:
        return self.as_numpy(array.cpu())


def _number(stream: Stream) -> int:
    """torch's number of a stream, from which it knows its own."""
    number = stream.handle
    if number > 2:
        owner = stream.owner
        return owner.stream_id if isinstance(owner, torch.cuda.Stream) else number
    if number == 2:
        raise UnavailableError("torch does not support the per-thread default stream; use a stream of a pool")
    return 0
