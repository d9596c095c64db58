"""A message's value, taken apart for the wire and put together again.

The body is a msgpack array ``[arrays, skeleton]``: the skeleton is the codec's, an array is described as
``[dtype, shape, buffer, source device, bytes]``.  Small arrays travel inside the body (`INLINE_BYTES`), with the target
device behind the bytes where it is none of ordinary memory; those of devices only if their bytes are there soon
(`transport.inlined`).  All others are snapshots or lent arrays whose bytes go by a channel, one `BufferHeader` each, or
one for several small ones, whose offset in it stands in place of the target (`transport.packs`).

Preparing happens on the caller's thread, before anything is sent: every check of types, devices, dtypes and layouts is
here, so that bad input costs nothing but its own error.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgpack
import numpy as np

from streamrt import arrays as array_tools
from streamrt import memory
from streamrt.device import CPU, Device, parse_device
from streamrt.errors import ArrayError, PlacementError
from streamrt.libraries.dtypes import canonical
from streamrt.libraries.host_memory import place as host_place
from transport import codec
from transport.channels import SHARED_MEMORY, Source
from transport.channels.shared_memory import exported
from transport.channels.waits import spoiled
from transport.device_map import DeviceMap
from transport.errors import CodecError, DeviceMapError, PeerLostError
from transport.events import BufferHeader
from transport.inlined import HOLD_LOOKS, MOST_LATE, Fetched, Late, settle
from transport.inlined import MOST as MOST_FETCHED
from transport.lend import LendAt, lend
from transport.limits import STAGING
from transport.packs import Apart, pack

INLINE_BYTES = 64 * 1024
"""Of an array: up to here a buffer of its own costs more than the copies through msgpack."""
INLINE_TOTAL_BYTES = 1 << 20
"""Of those of one message; past it only the smallest travel inside."""
SMALLEST_BYTES = 2048
"""Up to here an array travels inside the body in any case, and one of a device may, whatever else goes with it."""
KNOWN_BODY_BYTES = 512
"""Bodies of calls whose arrays go apart are remembered up to here."""
MAX_DIMENSIONS = 64  # NumPy's own limit


@dataclass(slots=True)
class Prepared:
    """A value ready to be sent: `body`, and for each buffer its header and its snapshot (or the lent array's).

    `fetched`: bytes of a device's arrays stand in the body.  `late`: they are to, are not there yet, and it is what
    makes the body then.
    """

    body: bytes
    headers: tuple[BufferHeader, ...]
    snapshots: tuple[Source, ...]
    first_kind: str | None
    fetched: bool = False
    late: Late | None = None


def prepare(
    value: object,
    device_map: DeviceMap,
    place: Callable[[Device], Device],
    *,
    channel_of: Callable[[Device, Device, int], str],
    copy: bool | None = True,
    detach: bool = False,
    allow_pickle: bool = False,
    looks: int = 0,
    plain: Device = CPU,
    root: codec.Names = "value",
    room: Callable[[int], None] | None = None,
    unshared: Collection[int] = (),
    allocate_at: memory.Allocate | None = None,
    lend_at: LendAt | None = None,
    hold: bool = False,
) -> Prepared:
    """Encodes a value and takes the snapshots of its arrays.

    Enqueues on the current stream of each array's library and device a copy (none with ``copy=False``).  Does not block
    the host, but for ordinary memory, which is copied at once (with ``copy=None``, for a caller that waits, it is
    lent).  `place` maps a device of ours to one of the peer's, or raises; `channel_of` says how so many bytes go from
    one to the other; `plain` is the device that ordinary memory counts as; `root` names the value in errors.  `room`,
    where it is given, is asked for that many bytes and blocks the host until there is room, in place of the limit on
    snapshots: so a function's thread waits with its result, of which the arrays in `unshared` (by `id`) are lent.
    With ``copy=False`` `lend_at` lets the peer read an array's own memory; `allocate_at` gives memory that the peer
    can open: what it finds room for, and is not read where it lies, is copied there, lent or not.  With
    `looks`, small arrays of devices go in the body if their bytes are there after as many looks at them, which take
    some microseconds each.  With `hold` a few of them do in any case where nothing goes apart, after some looks: what
    is not there then is left to `Prepared.late`.  Raises `CodecError`, `ArrayError`, `DeviceMapError`,
    `ExhaustedError`, `PeerLostError`; then nothing was sent and nothing is held.
    """
    encoded = codec.encode(value, array_tools.is_array, allow_pickle=allow_pickle, root=root)
    if not encoded.arrays:
        return Prepared(msgpack.packb([(), encoded.body]), (), (), None)
    first_kind: str | None = None
    metas: list[tuple[Any, ...]] = []
    apart: list[Apart] = []
    soon: list[Apart] = []
    inline = plain == CPU and device_map.plain
    room_inside = INLINE_TOTAL_BYTES
    for number, given in enumerate(encoded.arrays):
        bulk = number in encoded.bulk
        try:
            if inline and type(given) is np.ndarray and _goes_inside(given.nbytes, room_inside):
                meta = _inline(given)
                if meta is not None:
                    room_inside -= given.nbytes
                    first_kind = first_kind or "numpy"
                    metas.append(meta)
                    continue
            array = array_tools.resolve(given, detach=detach)
            info = array_tools.describe(array)
            source = plain if info.device == CPU else info.device
            target = CPU if bulk else place(source)
            if info.device.has_streams and spoiled(info.address):
                raise PeerLostError("its bytes never came, for the peer that it is from was lost before")
        except (ArrayError, DeviceMapError, PeerLostError) as error:
            where = codec.place_of(given, value, array_tools.is_array, allow_pickle=allow_pickle, root=root)
            codec.add_place(error, where)
            raise
        if not bulk:
            first_kind = first_kind or info.library
        if info.device == CPU and target == CPU and _goes_inside(info.nbytes, room_inside):
            room_inside -= info.nbytes
            metas.append((info.dtype, info.shape, -1, str(source), array_tools.host_bytes(array)))
            continue
        channel = channel_of(source, target, info.nbytes)
        one = Apart(len(metas), array, info, BufferHeader(info.nbytes, str(target), channel, str(source)))
        small = (
            (channel == STAGING or (channel == SHARED_MEMORY and copy is not False))
            and info.device.has_streams
            and 0 < info.nbytes <= INLINE_BYTES
        )
        metas.append(())  # `apart` or `soon` says what
        (soon if (looks or hold) and small and len(soon) < MOST_FETCHED else apart).append(one)
    if soon and (apart or len(soon) > MOST_LATE or sum(one.info.nbytes for one in soon) > INLINE_BYTES):
        # A buffer for all costs less than a copy of each, but for the smallest.
        apart = [*apart, *(one for one in soon if one.info.nbytes > SMALLEST_BYTES)]
        soon = [one for one in soon if one.info.nbytes <= SMALLEST_BYTES]
    hold = hold and not apart and len(soon) <= MOST_LATE and len(encoded.body) <= INLINE_BYTES and room_inside >= 0
    if hold:
        looks = max(looks, HOLD_LOOKS)
    elif not looks:
        apart, soon = sorted([*apart, *soon], key=operator.attrgetter("number")), []
    if not apart and not soon:
        return Prepared(msgpack.packb([metas, encoded.body]), (), (), first_kind)
    fetching = [Fetched(one.array, one.info) for one in soon]
    contents = settle(fetching, looks)
    if hold and None in contents:
        places = [one.number for one in soon]  # and not the arrays: they are the user's, and end on other threads
        for one in soon:
            metas[one.number] = _fetched_meta(one, b"")
        body_of = functools.partial(_late_body, metas, places, encoded.body)
        return Prepared(b"", (), (), first_kind, late=Late(fetching, body_of))
    fetched = any(content is not None for content in contents)
    for one, content in zip(soon, contents, strict=True):
        if content is None:
            apart.append(one)
        else:
            metas[one.number] = _fetched_meta(one, content)
    if len(apart) > 1 and copy is not False:
        apart, packs = pack(apart, channel_of)
    else:
        packs = []
    for buffer, one in enumerate(apart):
        metas[one.number] = (one.info.dtype, one.info.shape, buffer, one.header.source, None)
    for buffer, together in enumerate(packs, len(apart)):
        for one, offset in zip(together.members, together.offsets, strict=True):
            metas[one.number] = (one.info.dtype, one.info.shape, buffer, one.header.source, None, offset)
    body = msgpack.packb([metas, encoded.body])
    if not apart and not packs:
        return Prepared(body, (), (), first_kind, fetched)
    chosen, infos = [one.array for one in apart], [one.info for one in apart]
    headers = [one.header for one in apart] + [together.header for together in packs]
    snapshots: list[Source]
    shared = any(header.channel == SHARED_MEMORY for header in headers)
    if not shared:
        allocate_at = lend_at = None
    if room is not None:
        room(sum(header.nbytes for header in headers))
        snapshots = [*lend(chosen, infos, only=unshared, limit=math.inf, allocate_at=allocate_at)]
    elif copy:
        snapshots = [*memory.snapshot(chosen, allocate_at=allocate_at, infos=infos)]
    else:
        lend_at = None if copy is None else lend_at
        snapshots = [*lend(chosen, infos, plain_only=copy is None, allocate_at=allocate_at, lend_at=lend_at)]
    snapshots += [together.snapshot(None if room is None else math.inf, allocate_at) for together in packs]
    placed = _by_place(headers, snapshots) if shared else tuple(headers)
    return Prepared(body, placed, tuple(snapshots), first_kind, fetched)


def _fetched_meta(one: Apart, content: bytes) -> tuple[Any, ...]:
    target = () if one.header.device == "cpu" else (one.header.device,)
    return (one.info.dtype, one.info.shape, -1, one.header.source, content, *target)


def _late_body(
    metas: list[tuple[Any, ...]], places: Sequence[int], skeleton: bytes, contents: Sequence[bytes]
) -> bytes:
    for place, content in zip(places, contents, strict=True):
        dtype, shape, buffer, source, _, *target = metas[place]
        metas[place] = (dtype, shape, buffer, source, content, *target)
    return bytes(msgpack.packb([metas, skeleton]))


def _goes_inside(nbytes: int, room: int) -> bool:
    return nbytes <= SMALLEST_BYTES or (nbytes <= INLINE_BYTES and nbytes <= room)


def _by_place(headers: Sequence[BufferHeader], snapshots: Sequence[Source]) -> tuple[BufferHeader, ...]:
    """The headers, with another channel for what was to be shared and has found no room there."""
    chosen = []
    for header, shared in zip(headers, exported(snapshots), strict=True):
        staged = header.channel == SHARED_MEMORY and not shared
        chosen.append(replace(header, channel=STAGING) if staged else header)
    return tuple(chosen)


def _inline(array: np.ndarray[Any, Any]) -> tuple[Any, ...] | None:
    """The description of a small NumPy array with its bytes in it, None if it is not in ordinary memory."""
    dtype = array.dtype
    if not dtype.isnative or dtype.hasobject or dtype.names is not None:
        return None
    own = array.base is None and array.flags.owndata  # NumPy's own memory, which is asked for faster than whose it is
    if not own and host_place(array.ctypes.data) != CPU:
        return None
    return canonical(dtype), array.shape, -1, "cpu", array.tobytes()


@dataclass(slots=True)
class ArrayMeta:
    """One array as the body describes it, checked: `buffer` is -1 for one whose bytes are in the body, `target` the
    device on which these are to be, `offset` where it begins in a buffer that it shares."""

    dtype: str
    shape: tuple[int, ...]
    buffer: int
    source: str
    inline: bytes | None
    nbytes: int
    target: Device = CPU
    offset: int | None = None


def read_body(body: bytes | memoryview, headers: Sequence[BufferHeader]) -> tuple[Sequence[ArrayMeta], bytes]:
    """Reads and checks a body that came from the wire.  Raises `CodecError`.  Does not touch the device."""
    sizes = tuple([header.nbytes for header in headers])
    if sizes and len(body) <= KNOWN_BODY_BYTES:
        return _known_body(bytes(body), sizes)
    return _read_body(body, sizes)


@functools.lru_cache(maxsize=256)
def _known_body(body: bytes, sizes: tuple[int, ...]) -> tuple[tuple[ArrayMeta, ...], bytes]:
    """A body that holds no bytes of arrays says the same in every call with arguments of the same kind."""
    metas, skeleton = _read_body(body, sizes)
    return tuple(metas), skeleton


def _read_body(body: bytes | memoryview, sizes: Sequence[int]) -> tuple[list[ArrayMeta], bytes]:
    try:
        metas, skeleton = msgpack.unpackb(body, max_array_len=1 << 17, max_map_len=0, use_list=True)
        parsed = [_read_meta(meta, sizes) for meta in metas]
    except CodecError:
        raise
    except (ValueError, TypeError, msgpack.exceptions.UnpackException) as error:
        raise CodecError(f"the peer sent a malformed message body: {error}") from error
    if not isinstance(skeleton, bytes):
        raise CodecError("the peer sent a malformed message body: no skeleton")
    return parsed, skeleton


def _read_meta(meta: Any, sizes: Sequence[int]) -> ArrayMeta:
    dtype, shape, buffer, source, inline, *rest = meta
    if not isinstance(dtype, str) or not isinstance(source, str) or len(shape) > MAX_DIMENSIONS:
        raise CodecError("the peer sent a malformed array description")
    for extent in shape:
        if not isinstance(extent, int) or isinstance(extent, bool) or not 0 <= extent < 1 << 62:
            raise CodecError(f"the peer sent an array of shape {shape!r}")
    nbytes = math.prod(shape) * array_tools.itemsize(dtype)
    if inline is None:
        if not isinstance(buffer, int) or not 0 <= buffer < len(sizes):
            raise CodecError(f"the peer named buffer {buffer!r} of {len(sizes)}")
        if rest:
            offset = _read_offset(rest, nbytes, sizes[buffer])
            return ArrayMeta(dtype, tuple(shape), buffer, source, None, nbytes, offset=offset)
        held = sizes[buffer]
    else:
        held = len(inline) if isinstance(inline, bytes) else -1
    if held != nbytes:
        raise CodecError(f"the peer sent {held} bytes for an array of {dtype}{list(shape)}, which has {nbytes}")
    buffer = -1 if inline is not None else buffer
    return ArrayMeta(dtype, tuple(shape), buffer, source, inline, nbytes, _read_target(rest, inline))


def _read_offset(rest: list[Any], nbytes: int, held: int) -> int:
    """Where an array of `nbytes` begins in a buffer of `held` that it shares."""
    offset = rest[0]
    if len(rest) != 1 or type(offset) is not int or offset < 0 or offset % memory.ALIGNMENT or offset + nbytes > held:
        raise CodecError(f"the peer put an array of {nbytes} bytes at {rest!r} in a buffer of {held}")
    return offset


def _read_target(target: list[Any], inline: bytes | None) -> Device:
    if not target:
        return CPU
    try:
        (name,) = target
        device = parse_device(name) if isinstance(name, str) else CPU
    except (ValueError, PlacementError) as error:
        raise CodecError(f"the peer sent an array for no device: {error}") from error
    if inline is None or not device.has_streams:
        raise CodecError(f"the peer sent an array for {target!r} in a way that there is none")
    return device


def rebuild(
    metas: Sequence[ArrayMeta],
    skeleton: bytes,
    buffers: Sequence[Any],
    kind: Callable[[Device], str],
    *,
    inlined: Sequence[Any] = (),
    allow_pickle: bool = False,
) -> Any:
    """Wraps the received memory as arrays of the wanted kind and decodes the value.

    `inlined` is the memory of those that came in the body for devices, in their order.  The streams on which the memory
    was filled must be current.  Does not block the host.
    """
    arrays: list[Any] = []
    placed = iter(inlined)
    for meta in metas:
        if meta.inline is not None and meta.target == CPU:
            arrays.append(array_tools.from_host_bytes(meta.inline, meta.shape, meta.dtype, kind(CPU)))
            continue
        buffer = next(placed) if meta.inline is not None else buffers[meta.buffer]
        if buffer is None:
            raise PlacementError(f"buffer {meta.buffer} was never received")
        if meta.offset is not None:
            buffer = memory.part(buffer.holder(), meta.offset, meta.nbytes)
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


def check_holds(metas: Sequence[ArrayMeta], headers: Sequence[BufferHeader], kind: Callable[[Device], str]) -> None:
    """Raises `ArrayError` where the wanted kind cannot hold a dtype.  Does not touch the device."""
    for meta in metas:
        device = meta.target if meta.buffer < 0 else parse_device(headers[meta.buffer].device)
        array_tools.check_holds(kind(device), meta.dtype, device)


def kind_on(wanted: str | None, device: Device) -> str:
    """The kind of array for a device: the wanted one where it can live there, else CuPy on a GPU, NumPy elsewhere."""
    plain = "cupy" if device.kind == "cuda" else "numpy"
    if wanted is None or (wanted in ("numpy", "cupy", "numba") and wanted != plain and device.kind != "cuda"):
        return plain
    if wanted == "numpy" and device.kind == "cuda":
        return plain
    return wanted
