"""Any array in, the wanted kind out: NumPy, CuPy, torch, JAX and numba arrays.

Rules:

- A kind is asked for (``arrays="torch"``); where it is not, it is CuPy on a GPU and NumPy on the host, never what
  happens to be installed.
- What a target cannot hold is an `ArrayError` before anything is enqueued; what it cannot *share* is copied.
- Memory that nobody may write (JAX's, a read-only NumPy array's) is shown as read-only, or copied for a library that
  has no read-only arrays.
- Copies run on current streams.  On ``cpu`` there are none: what is there is ready, and to copy there blocks the host.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from streamrt.device import CPU, Device, open_device, opened_devices, parse_device
from streamrt.errors import ArrayError, CaptureError, PlacementError
from streamrt.guard import current_stream
from streamrt.libraries import ArrayInfo, Library, library, library_of
from streamrt.libraries.dtypes import canonical, count, itemsize, numpy_dtype
from streamrt.libraries.host_memory import enqueue_upload, packed
from streamrt.libraries.nesting import find_arrays, register_container
from streamrt.moves import move
from streamrt.stream import Stream

__all__ = [
    "array",
    "check_holds",
    "convert",
    "default_kind",
    "describe",
    "device_of",
    "empty",
    "find_arrays",
    "from_host_bytes",
    "host_bytes",
    "is_array",
    "itemsize",
    "register_container",
    "resolve",
    "to",
    "wrap",
]

ENTER_EDGE = "arrays.enter"
EXIT_EDGE = "arrays.exit"


def is_array(value: object) -> bool:
    """Whether the value is an array of a loaded library.  Does not touch the device."""
    return library_of(value) is not None


def _library(value: object) -> Library:
    found = library_of(value)
    if found is None:
        raise ArrayError(f"{type(value).__name__} is no array of a loaded library; make one with streamrt.array")
    return found


def describe(array: Any, *, detach: bool = False) -> ArrayInfo:
    """What the array is and where: `ArrayInfo`.  Does not touch the device.

    Raises `ArrayError` for what cannot travel (requires grad and no `detach`, object or structured dtypes, other byte
    orders, sharded arrays), naming the remedy.
    """
    owner = _library(array)
    if detach and owner.name == "torch" and array.requires_grad:
        array = array.detach()
    return owner.describe(array)


def device_of(array: Any) -> Device:
    """Where the array is, whatever else is wrong with it.  Does not touch the device.

    An array without elements in host memory may be on ``cpu`` whatever it was made on: it has no address.
    """
    return _library(array).device_of(array)


def resolve(array: Any, *, detach: bool = False) -> Any:
    """The array with nothing left that only its library knows: torch's conjugate and negative bits are worked out and,
    with `detach`, the gradient history dropped.  Mostly the array itself.

    Enqueues on the current stream where that takes a copy.  Raises `ArrayError` where it requires grad.
    """
    return _library(array).resolve(array, detach=detach)


def default_kind(device: Device) -> str:
    """``"cupy"`` on a GPU, ``"numpy"`` on the host.  Does not touch the device."""
    return "cupy" if device.kind == "cuda" else "numpy"


def check_holds(arrays: str, dtype: str, device: Device) -> None:
    """Raises `ArrayError`, with the remedy, if the library cannot hold the dtype on the device.

    Does not touch the device.
    """
    reason = library(arrays).refusal(dtype, device)
    if reason is not None:
        raise ArrayError(reason)


def _place(device: Device | str | int, dtype: str, arrays: str | None) -> tuple[Device, Library]:
    opened = open_device(device)
    target = library(arrays or default_kind(opened))
    reason = target.refusal(dtype, opened)
    if reason is not None:
        raise ArrayError(reason)
    return opened, target


def _shape(shape: int | tuple[int, ...] | list[int]) -> tuple[int, ...]:
    lengths = (shape,) if isinstance(shape, int) else tuple(map(int, shape))
    if min(lengths, default=0) < 0:
        raise ArrayError(f"shape {lengths} has a negative length")
    return lengths


def empty(
    shape: int | tuple[int, ...] | list[int],
    dtype: Any = "float32",
    device: Device | str | int = "auto",
    arrays: str | None = None,
) -> Any:
    """A C-contiguous array whose contents are not set; it is on `device` also as a view or as another kind's alias.

    Usable at once on the current stream of the device.  Does not block the host.  Raises `ArrayError`,
    `PlacementError`, `UnavailableError`.
    """
    name = canonical(dtype)
    opened, target = _place(device, name, arrays)
    return target.empty(_shape(shape), name, opened)


def wrap(
    address: int,
    nbytes: int,
    shape: tuple[int, ...],
    dtype: Any,
    device: Device | str,
    holder: object,
    arrays: str | None = None,
) -> Any:
    """A C-contiguous array over memory that somebody owns; `holder` lives as long as any alias of the array does.

    A stream that is ordered after the memory's contents must be current.  Does not block the host.  Raises `ArrayError`
    for a dtype that the kind cannot hold, or if the shape does not fill `nbytes`.
    """
    name = canonical(dtype)
    opened, target = _place(device, name, arrays)
    shape = _shape(shape)
    wanted = count(shape) * itemsize(name)
    if wanted != nbytes:
        raise ArrayError(f"an array of {name}{list(shape)} has {wanted} bytes, not {nbytes}")
    return target.wrap(address, nbytes, shape, name, opened, holder)


def array(obj: Any, device: Device | str | int = "auto", dtype: Any = None, arrays: str | None = None) -> Any:
    """A copy of `obj` (an array of any library, numbers, nested lists) on a device, of the kind and dtype wanted.

    Enqueues on current streams.  Blocks the host for the way from a GPU to ordinary memory.  Raises `ArrayError` for
    what the kind cannot hold, `CaptureError` for a way from or to ordinary memory while a graph is captured.
    """
    if not is_array(obj):
        obj = np.array(obj, dtype=None if dtype is None else numpy_dtype(canonical(dtype)))
    source = _library(obj)
    info = source.describe(obj)
    wanted = info.dtype if dtype is None else canonical(dtype)
    target, kind = _place(device, wanted, arrays)
    if info.device == target:
        if target.kind != "cuda":
            return packed(kind, source.as_numpy(obj), info, wanted, keep=obj)
        return convert(source.copied(obj, wanted), kind.name, copy=None)
    if wanted != info.dtype:
        obj = source.copied(obj, wanted)
    return _moved(source, obj, source.describe(obj), target, kind)


def to(array: Any, device: Device | str | int, *, detach: bool = False) -> Any:
    """The array on `device`: itself if it is there, else a copy, of the same kind where that kind can be there.

    Enqueues on the current streams of the devices (edges "arrays.enter", "arrays.exit"); the array may be changed on
    its own current stream right after.  Blocks the host for the way to ``cpu``, where what is there is ready.  Raises
    `CaptureError` for a way from or to ``cpu`` while a graph is captured.
    """
    source = _library(array)
    target = open_device(parse_device(device))
    if source.device_of(array) == target:
        return array
    array = source.resolve(array, detach=detach)
    info = source.describe(array)
    kind = source if source.holds(info.dtype, target) else library(default_kind(target))
    check_holds(kind.name, info.dtype, target)
    return _moved(source, array, info, target, kind)


def _moved(source: Library, array: Any, info: ArrayInfo, target: Device, kind: Library) -> Any:
    if target.kind == info.device.kind and target.has_streams:
        return _moved_between(source, source.contiguous(array), info, target, kind)
    for device in (info.device, target):
        if device in opened_devices() and current_stream(device).capturing:
            raise CaptureError(
                f"{device} captures a graph, and a way between it and ordinary memory cannot be part of one: it passes "
                "through memory that a replay would find changed; copy before the capture or after a replay"
            )
    if info.device.kind == "cuda":
        plain = source.download(array)
    else:
        if info.device.kind == "host":
            current_stream(info.device).record().require()
        plain = source.as_numpy(array)
    if target.kind == "cuda":
        return kind.upload(plain, target)
    if target.kind == "host":
        made = library("numpy").empty(info.shape, info.dtype, target)
        enqueue_upload(target, made, plain)
        return _shared(library("numpy"), made, kind)
    if info.device.kind == "cuda" and kind.name == "numpy":
        return plain
    return packed(kind, plain, info._replace(device=CPU))


def _moved_between(source: Library, array: Any, info: ArrayInfo, target: Device, kind: Library) -> Any:
    """Between two devices of a kind, on the source's current stream: what comes after it may change the source.

    The target's stream is fenced in, since the new memory is usable on it alone, and fenced out.
    """
    here, there = _stream(source, info.device), _stream(kind, target)
    address = source.describe(array).address
    block = target.backend.allocate(target.index, info.nbytes, there.handle)
    source.join(array, here)
    here.wait(there, edge=ENTER_EDGE)
    if info.nbytes:
        if target.kind == "host":
            keep = (array, block)
            here.launch(_copy_bytes, block.address, address, info.nbytes, keep)
        else:
            here.copy(block.address, address, info.nbytes)
    there.wait(here, edge=EXIT_EDGE)
    return kind.wrap(block.address, info.nbytes, info.shape, info.dtype, target, block)


def _copy_bytes(destination: int, source: int, nbytes: int, keep: object) -> None:
    """Runs in a queue of the host backend, which holds `keep` until then."""
    move(destination, source, nbytes)


def _stream(owner: Library, device: Device) -> Stream:
    return owner.current_stream(device) or current_stream(device)


def _shared(source: Library, array: Any, kind: Library) -> Any:
    return array if kind is source else kind.adopt(source, array, source.describe(array))


def convert(array: Any, arrays: str, *, copy: bool | None = None, detach: bool = False) -> Any:
    """The array as one of the library `arrays`, on the same device, sharing its memory where that is possible.

    `copy=None` copies where the target cannot hold the layout (JAX: holes, unaligned; torch: reversed), and where the
    array is read-only and the target has no such arrays; `copy=True` always; `copy=False` never: it shares read-only
    memory as writable, at your risk, and raises `ArrayError` where sharing is impossible.  JAX takes the memory for
    immutable: do not write the source any more while the JAX array lives.

    Enqueues on the target's current stream a wait for the source's (DLPack, always with an explicit stream), or a copy.
    Does not block the host, but for JAX arrays on the CPU.  Raises `ArrayError` for what the target cannot hold (64-bit
    types without ``jax_enable_x64``, requires grad without `detach`), and where it cannot hold memory of the device.
    """
    if not (copy is None or copy is True or copy is False):
        raise ArrayError(f"copy={copy!r}: True copies always, False never, None where it has to be")
    source, target = _library(array), library(arrays)
    if source is target and not copy:
        return source.resolve(array, detach=True) if detach else array
    array = source.resolve(array, detach=detach)
    info = source.describe(array)
    check_holds(arrays, info.dtype, info.device)
    readonly = info.readonly and not target.keeps_readonly
    if target.accepts(info) and not copy and (copy is False or not readonly):
        return array if source is target else target.adopt(source, array, info)
    if copy is False:
        raise ArrayError(f"{arrays} cannot share this layout (strides {info.strides}); leave out copy=False")
    if info.device.kind != "cuda":
        return packed(target, source.as_numpy(array), info, keep=array)
    if readonly and target.accepts(info):  # the copy is made where it will be written
        return target.copied(target.adopt(source, array, info))
    array = source.copied(array)
    return _shared(source, array, target)


def host_bytes(array: Any) -> bytes:
    """The elements of an array in host memory, in C order.  Blocks the host until a virtual device's are ready.

    Raises `PlacementError` for an array on a GPU.
    """
    source = _library(array)
    device = source.device_of(array)
    if device.kind == "cuda":
        raise PlacementError(f"the array is on {device}; move it with streamrt.arrays.to(array, 'cpu') first")
    if device.kind == "host":
        current_stream(device).record().require()
    return source.as_numpy(array).tobytes()


def from_host_bytes(data: bytes | memoryview, shape: tuple[int, ...], dtype: Any, arrays: str = "numpy") -> Any:
    """A new writable array on ``cpu`` with these elements, in C order.  Raises `ArrayError`.

    Does not touch the device.
    """
    name = canonical(dtype)
    nbytes = memoryview(data).nbytes
    if count(shape) * itemsize(name) != nbytes:
        raise ArrayError(f"{nbytes} bytes are no array of {name}{list(shape)}")
    if arrays == "numpy":  # the usual case, and a small one: see transport's messages
        return np.ndarray(shape, numpy_dtype(name), bytearray(data))
    check_holds(arrays, name, CPU)
    plain = np.frombuffer(data, np.uint8)
    info = ArrayInfo("numpy", CPU, 0, plain.shape, None, "uint8", 1, plain.nbytes, True)
    block = packed(library("numpy"), plain, info)
    return library(arrays).wrap(block.ctypes.data, plain.nbytes, tuple(shape), name, CPU, block)
