"""A message's value, taken apart for the wire and put together again.

The body is a msgpack array ``[arrays, skeleton]``: the skeleton is the codec's, an array is described as
``[dtype, shape, buffer, source device, bytes]``.  Small arrays in ordinary memory travel inside the body
(`INLINE_BYTES`); all others are snapshots or lent arrays whose bytes go by a channel, one `BufferHeader` each.

Preparing happens on the caller's thread, before anything is sent: every check of types, devices, dtypes and layouts is
here, so that bad input costs nothing but its own error.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgpack

from streamrt import arrays as array_tools
from streamrt import memory
from streamrt.device import CPU, Device, parse_device
from streamrt.errors import PlacementError
from streamrt.libraries import ArrayInfo
from transport import codec
from transport.channels import Source, choose
from transport.errors import CodecError
from transport.events import BufferHeader
from transport.lend import lend

INLINE_BYTES = 2048  # below this a message of its own costs more than the copy through msgpack
MAX_DIMENSIONS = 64  # NumPy's own limit
_ITEM_SIZES = {"bool": 1, "bfloat16": 2, "complex64": 8, "complex128": 16}


@dataclass(frozen=True, slots=True)
class Prepared:
    """A value ready to be sent: `body`, and for each buffer its header and its snapshot (or the lent array's)."""

    body: bytes
    headers: tuple[BufferHeader, ...]
    snapshots: tuple[Source, ...]
    first_kind: str | None
    devices: tuple[Device, ...]


def prepare(
    value: object,
    place: Callable[[Device], Device],
    *,
    local: Mapping[str, object],
    remote: Mapping[str, object],
    copy: bool = True,
    detach: bool = False,
    allow_pickle: bool = False,
    locate: Callable[[ArrayInfo], Device] | None = None,
    root: str | Sequence[str] = "value",
) -> Prepared:
    """Encodes a value and takes the snapshots of its arrays.

    Enqueues on the current stream of each array's library and device a copy (none with ``copy=False``).  Does not block
    the host, but for ordinary memory, which is copied at once.  `place` maps a device of ours to one of the peer's;
    `root` names the value in errors.
    Raises `CodecError`, `ArrayError`, `DeviceMapError`, `ExhaustedError`; then nothing was sent and nothing is held.
    """
    encoded = codec.encode(value, array_tools.is_array, allow_pickle=allow_pickle, root=root)
    encoded.arrays[:] = [array_tools.resolve(array, detach=detach) for array in encoded.arrays]
    described = [array_tools.describe(array) for array in encoded.arrays]
    sources = [locate(info) if locate is not None else info.device for info in described]
    targets = [CPU if number in encoded.bulk else place(source) for number, source in enumerate(sources)]
    metas: list[list[Any]] = []
    outgoing: list[int] = []
    for number, (info, source, target) in enumerate(zip(described, sources, targets, strict=True)):
        meta: list[Any] = [info.dtype, list(info.shape), -1, str(source), None]
        if info.device == CPU and target == CPU and info.nbytes <= INLINE_BYTES:
            meta[4] = _inline_bytes(encoded.arrays[number], info)
        else:
            meta[2] = len(outgoing)
            outgoing.append(number)
        metas.append(meta)
    body = msgpack.packb([metas, encoded.body])
    first_kind = next((info.library for number, info in enumerate(described) if number not in encoded.bulk), None)
    if not outgoing:
        return Prepared(body, (), (), first_kind, ())
    chosen = [encoded.arrays[number] for number in outgoing]
    snapshots: Sequence[Source] = memory.snapshot(chosen) if copy else lend(chosen)
    headers = tuple(
        BufferHeader(
            nbytes=described[number].nbytes,
            device=str(targets[number]),
            channel=choose(sources[number], targets[number], local, remote),
            source=str(sources[number]),
        )
        for number in outgoing
    )
    devices = sorted({described[number].device for number in outgoing if described[number].device.has_streams})
    return Prepared(
        body=body,
        headers=headers,
        snapshots=tuple(snapshots),
        first_kind=first_kind,
        devices=tuple(devices),
    )


def _inline_bytes(array: Any, info: ArrayInfo) -> bytes:
    """The bytes of a small array in ordinary memory, in C order."""
    if info.strides is None and info.nbytes:
        return ctypes.string_at(info.address, info.nbytes)
    return array_tools.host_bytes(array)


@dataclass(frozen=True, slots=True)
class ArrayMeta:
    """One array as the body describes it, checked: `buffer` is -1 for one whose bytes are in the body."""

    dtype: str
    shape: tuple[int, ...]
    buffer: int
    source: str
    inline: bytes | None
    nbytes: int


def read_body(body: bytes | memoryview, headers: Sequence[BufferHeader]) -> tuple[list[ArrayMeta], bytes]:
    """Reads and checks a body that came from the wire.  Raises `CodecError`.  Does not touch the device."""
    try:
        metas, skeleton = msgpack.unpackb(body, max_array_len=1 << 17, max_map_len=0, use_list=True)
        parsed = [_read_meta(meta, headers) for meta in metas]
    except CodecError:
        raise
    except (ValueError, TypeError, msgpack.exceptions.UnpackException) as error:
        raise CodecError(f"the peer sent a malformed message body: {error}") from error
    if not isinstance(skeleton, bytes):
        raise CodecError("the peer sent a malformed message body: no skeleton")
    return parsed, skeleton


def _read_meta(meta: Any, headers: Sequence[BufferHeader]) -> ArrayMeta:
    dtype, shape, buffer, source, inline = meta
    if not isinstance(dtype, str) or not isinstance(source, str) or len(shape) > MAX_DIMENSIONS:
        raise CodecError("the peer sent a malformed array description")
    if not all(isinstance(extent, int) and not isinstance(extent, bool) and 0 <= extent < 1 << 62 for extent in shape):
        raise CodecError(f"the peer sent an array of shape {shape!r}")
    nbytes = math.prod(shape) * array_tools.itemsize(dtype)
    if inline is None:
        if not isinstance(buffer, int) or not 0 <= buffer < len(headers):
            raise CodecError(f"the peer named buffer {buffer!r} of {len(headers)}")
        held = headers[buffer].nbytes
    else:
        held = len(inline) if isinstance(inline, bytes) else -1
    if held != nbytes:
        raise CodecError(f"the peer sent {held} bytes for an array of {dtype}{list(shape)}, which has {nbytes}")
    return ArrayMeta(dtype, tuple(shape), -1 if inline is not None else buffer, source, inline, nbytes)


def rebuild(
    metas: Sequence[ArrayMeta],
    skeleton: bytes,
    buffers: Sequence[Any],
    kind: Callable[[Device], str],
    *,
    allow_pickle: bool = False,
) -> Any:
    """Wraps the received memory as arrays of the wanted kind and decodes the value.

    The streams on which the memory was filled must be current.  Does not block the host.
    """
    arrays: list[Any] = []
    for meta in metas:
        if meta.inline is not None:
            arrays.append(array_tools.from_host_bytes(meta.inline, meta.shape, meta.dtype, kind(CPU)))
            continue
        buffer = buffers[meta.buffer]
        if buffer is None:
            raise PlacementError(f"buffer {meta.buffer} was never received")
        arrays.append(
            array_tools.wrap(
                buffer.address,
                meta.nbytes,
                meta.shape,
                meta.dtype,
                buffer.device,
                buffer.holder(),
                kind(buffer.device),
            )
        )
    return codec.decode(skeleton, arrays, allow_pickle=allow_pickle)


def check_holds(metas: Sequence[ArrayMeta], devices: Sequence[str], kind: Callable[[Device], str]) -> None:
    """Raises `ArrayError` where the wanted kind cannot hold a dtype.  Does not touch the device."""
    for meta in metas:
        device = CPU if meta.buffer < 0 else parse_device(devices[meta.buffer])
        array_tools.check_holds(kind(device), meta.dtype, device)
