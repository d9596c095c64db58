"""Memory across streams: buffers in flight, `use`, and snapshots of arguments.

A *snapshot* is a copy of the visible bytes of an array, C-contiguous, as of the call in stream order: it is enqueued on
the stream on which the array's own library works, so whatever that stream does to the array afterwards does not show in
it (pytorch#34885), and the host does not wait.  Arrays in ordinary memory are copied by the host at once.

Every array gets its own buffer, except small ones of one message, which share one: no peer is given memory that holds
anything else.  The same array twice in one call is copied once, but where a peer opens the memory: there each has its
own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from streamrt import buffers, hooks
from streamrt.buffer import Buffer
from streamrt.buffers import (
    MemoryStatistics,
    allocate,
    buffer_uses,
    drain,
    hold,
    hold_until,
    part,
    reset_peak,
    set_held_limit,
    statistics,
    use,
)
from streamrt.device import Block, Device, StreamKey
from streamrt.errors import ArrayError, CaptureError, ExhaustedError, PlacementError
from streamrt.event import Event
from streamrt.guard import current_stream
from streamrt.kernels import Copy, copy_many
from streamrt.libraries import ArrayInfo, Library, library_of, packed_at
from streamrt.libraries.host_memory import view, wait_until_computed
from streamrt.moves import move
from streamrt.stream import Stream

__all__ = [
    "Buffer",
    "Fetch",
    "MemoryStatistics",
    "Snapshot",
    "allocate",
    "buffer_uses",
    "copy_to",
    "drain",
    "fetch",
    "hold",
    "hold_until",
    "layout",
    "part",
    "reset_peak",
    "set_held_limit",
    "set_snapshot_limit",
    "snapshot",
    "snapshot_together",
    "statistics",
    "use",
]

DEFAULT_SNAPSHOT_LIMIT = 1 << 30
SMALL_BYTES = 64 * 1024
ALIGNMENT = 256
COPY_EDGE = "snapshot.copy"

_snapshot_limit = DEFAULT_SNAPSHOT_LIMIT


class Snapshot(NamedTuple):
    """One array's bytes as of the call.

    `info` describes the copy (C-contiguous, its own address, in `buffer`); `event` is complete when the copy has run,
    None where it has run already (`cpu`).  Dropping the snapshot gives the memory back once nobody uses it.
    """

    buffer: Buffer
    info: ArrayInfo
    event: Event | None

    @property
    def nbytes(self) -> int:
        """How many bytes.  Does not touch the device."""
        return self.info.nbytes

    def host_view(self) -> memoryview:
        """The bytes, for ordinary memory and the host backend.  Does not touch the device: the caller has waited."""
        start = self.info.address - self.buffer.address
        return self.buffer.host_view()[start : start + self.info.nbytes]


@dataclass(slots=True)
class _Source:
    """One array to be copied: how, on which stream (None: by the host), and where to."""

    array: Any
    info: ArrayInfo
    library: Library
    stream: Stream | None
    joins: bool  # the stream does not know yet what the array waits on
    buffer: Buffer = field(init=False)
    offset: int = 0  # in the buffer
    shot: Snapshot = field(init=False)


def set_snapshot_limit(nbytes: int) -> int:
    """Sets how many bytes snapshots may hold in all; returns the limit before.  Does not touch the device."""
    global _snapshot_limit
    if nbytes < 0:
        raise ValueError(f"snapshot_limit={nbytes} is negative")
    previous, _snapshot_limit = _snapshot_limit, nbytes
    return previous


Allocate = Callable[[Device, int], "Block | None"]
"""Gives the memory for one array's snapshot on its device, or None, and then the backend gives it."""


def snapshot(
    arrays: Sequence[Any],
    *,
    limit: float | None = None,
    allocate_at: Allocate | None = None,
    infos: Sequence[ArrayInfo] | None = None,
) -> list[Snapshot]:
    """Copies the visible bytes of arrays, C-contiguous, as of the call in stream order; one `Snapshot` for each.

    Enqueues the copies on each array's current stream (its library's, of the calling thread); arrays of ``cpu`` are
    copied by the host before it returns.  Does not block the host otherwise.

    `limit` is what all snapshots of the process may hold, in bytes (the process's `snapshot_limit` by default).
    `allocate_at` is asked for the memory of each array, before anything is enqueued; where it has none, small arrays of
    one stream share a buffer.  `infos` describes the arrays, for who knows that already.  Raises
    `ExhaustedError` past it, `CaptureError` while a graph is captured, `ArrayError` for what cannot be copied: then
    nothing was enqueued.
    """
    sources = list(map(_source, arrays)) if infos is None else list(map(_source, arrays, infos))
    unique: dict[tuple[Any, ...], _Source] = {}
    groups: dict[StreamKey | None, list[_Source]] = {}
    nbytes = 0
    for number, source in enumerate(sources):
        info, stream = source.info, source.stream
        if allocate_at is None and len(sources) > 1:
            first = unique.setdefault((info.device, info.address, info.shape, info.strides, info.dtype), source)
            if first is not source:
                sources[number] = first
                continue
        nbytes += info.nbytes
        key = None if stream is None else stream.key
        if key in groups:
            groups[key].append(source)
            continue
        if stream is not None and stream.capturing:
            raise CaptureError(f"{stream!r} captures a graph, and a snapshot cannot be part of one; send after it")
        groups[key] = [source]
    _check_limit(nbytes, limit)
    for group in groups.values():
        _copy_group(group, allocate_at)
    return [source.shot for source in sources]


def layout(infos: Iterable[ArrayInfo]) -> tuple[list[int], int]:
    """Where each array begins in one buffer for all of them, and that buffer's bytes.  Does not touch the device."""
    offsets, end = [], 0
    for info in infos:
        offsets.append(end)
        end += -(-info.nbytes // ALIGNMENT) * ALIGNMENT
    return offsets, end


def snapshot_together(
    arrays: Sequence[Any],
    infos: Sequence[ArrayInfo],
    *,
    limit: float | None = None,
    allocate_at: Allocate | None = None,
) -> Snapshot:
    """`snapshot` of arrays of one library and device, one after the other in one buffer (see `layout`), as its bytes.

    Enqueues the copies on their current stream, with one record behind all.  Does not block the host.  Raises as
    `snapshot`, and `PlacementError` for ordinary memory.
    """
    sources = list(map(_source, arrays, infos))
    stream, device = sources[0].stream, infos[0].device
    if stream is None:
        raise PlacementError("arrays of cpu are copied one by one")
    if stream.capturing:
        raise CaptureError(f"{stream!r} captures a graph, and a snapshot cannot be part of one; send after it")
    offsets, nbytes = layout(infos)
    _check_limit(nbytes, limit)
    if COPY_EDGE in hooks.dropped:
        stream = Stream(stream.device)
    block = None if allocate_at is None else _given(allocate_at, device, nbytes)
    if block is None:
        buffer = buffers.allocate_on(device, nbytes, stream, snapshot=True)
    else:
        buffer = buffers.adopt(block, device, stream, snapshot=True)
    for source, offset in zip(sources, offsets, strict=True):
        source.buffer, source.offset = buffer, offset
    if sum([info.nbytes for info in infos]) < nbytes:  # what lies between them goes along: not what was there before
        stream.zero(buffer.address, nbytes)
    event = buffer.ready = _copy_on(stream, sources)
    whole = ArrayInfo(infos[0].library, device, buffer.address, (nbytes,), None, "uint8", 1, nbytes, False)
    return Snapshot(buffer, whole, event)


class Fetch(NamedTuple):
    """A copy to pinned memory that is enqueued on `stream`, with the record behind it; `source` is what it reads.

    Whoever has it keeps the source and the pinned memory until the `event` is complete, or gives them to `hold_until`.
    """

    event: Event
    stream: Stream
    source: object


def fetch(array: Any, info: ArrayInfo, address: int) -> Fetch:
    """Enqueues on the array's current stream a copy of its visible bytes, C-contiguous, to pinned memory at `address`;
    `info` describes the array.

    Does not block the host.  Raises `CaptureError`, `ArrayError`, and `PlacementError` for an array of ``cpu``; then
    nothing was enqueued.
    """
    source = _source(array, info)
    stream = source.stream
    if stream is None:
        raise PlacementError("an array of cpu needs no fetching")
    if stream.capturing:
        raise CaptureError(f"{stream!r} captures a graph, and a call cannot be part of one; call after it")
    if buffers.much_to_drain():  # who only fetches allocates nothing, and its pinned memory is to come back
        drain()
    if COPY_EDGE in hooks.dropped:
        stream = Stream(stream.device)
    batch: list[Copy] = []
    kept = _enqueue(source, address, stream, batch)
    copy_many(stream, batch)
    return Fetch(stream.record(), stream, kept)


def copy_to(array: Any, info: ArrayInfo, address: int, stream: Stream) -> object:
    """Enqueues on `stream`, current for the array's device, a copy of its visible bytes, C-contiguous, to an address of
    the same device, behind what the array is known to wait on; `info` describes it.

    Returns what must live until the copy has run.  Does not block the host.  Raises `ArrayError` for what is no array.
    """
    library = library_of(array)
    if library is None:
        raise ArrayError(f"{type(array).__name__} is no array of a library that is loaded; convert it to one")
    array = library.resolve(array, detach=True)
    library.join(array, stream)
    batch: list[Copy] = []
    kept = _enqueue(_Source(array, info, library, stream, joins=False), address, stream, batch)
    if info.strides is not None and library.name == "numba":
        library.join(array, stream)  # it was made contiguous on numba's own stream
    copy_many(stream, batch)
    return kept


def _source(array: Any, info: ArrayInfo | None = None) -> _Source:
    library = library_of(array)
    if library is None:
        raise ArrayError(f"{type(array).__name__} is no array of a library that is loaded; convert it to one")
    if info is None:
        info = library.describe(array)
    device = info.device
    if not device.has_streams:
        return _Source(array, info, library, None, joins=False)
    stream = library.current_stream(device)
    joins = stream is None and library.name != "numpy"
    return _Source(array, info, library, stream or current_stream(device), joins)


def _check_limit(nbytes: int, limit: float | None) -> None:
    if limit is None:
        limit = _snapshot_limit
    if buffers.snapshot_bytes() + nbytes <= limit:
        return
    drain(everything=True)
    held = buffers.snapshot_bytes()
    if held + nbytes > limit:
        beside, wait = (f" beside {held} bytes of earlier ones", "wait for earlier sends, ") if held else ("", "")
        raise ExhaustedError(
            f"a snapshot of {nbytes} bytes{beside} is over snapshot_limit={limit}; {wait}raise the limit with "
            "streamrt.set_snapshot_limit, or lend the arrays with copy=False"
        )


def _copy_group(sources: list[_Source], allocate_at: Allocate | None) -> None:
    """Copies arrays of one stream."""
    stream = sources[0].stream
    if stream is not None and COPY_EDGE in hooks.dropped:
        stream = Stream(stream.device)  # the edge is the order of the array's own stream; a test takes it away
    _place(sources, stream, allocate_at)
    if stream is None:
        event = None
        for source in sources:
            if source.info.nbytes:
                _copy_now(source, source.buffer.address + source.offset)
    else:
        event = _copy_on(stream, sources)
    for source in sources:
        buffer = source.buffer
        if event is not None:
            buffer.ready = event
        source.shot = Snapshot(buffer, packed_at(source.info, buffer.address + source.offset), event)


def _copy_on(stream: Stream, sources: Sequence[_Source]) -> Event:
    """Enqueues the copies of all to their places, and the record behind them; holds what they read until then."""
    batch: list[Copy] = []
    kept = [
        _enqueue(source, source.buffer.address + source.offset, stream, batch)
        for source in sources
        if source.info.nbytes
    ]
    copy_many(stream, batch)
    event = stream.record()
    hold_until(kept, event, stream)
    return event


def _place(sources: list[_Source], stream: Stream | None, allocate_at: Allocate | None) -> None:
    """Takes the memory: what is given, one buffer for all other small arrays, and its own for each that is left."""
    device = sources[0].info.device
    small: list[_Source] = []
    for source in sources:
        nbytes = source.info.nbytes
        block = _given(allocate_at, device, nbytes) if allocate_at is not None and nbytes else None
        if block is not None:
            source.buffer = buffers.adopt(block, device, stream, snapshot=True)
        elif nbytes > SMALL_BYTES:
            source.buffer = buffers.allocate_on(device, nbytes, stream, snapshot=True)
        else:
            small.append(source)
    if small:
        offsets, nbytes = layout([source.info for source in small])
        shared = buffers.allocate_on(device, nbytes, stream, snapshot=True)
        for source, offset in zip(small, offsets, strict=True):
            source.buffer, source.offset = shared, offset


def _given(allocate_at: Allocate, device: Device, nbytes: int) -> Block | None:
    buffers.make_room(nbytes)
    return allocate_at(device, nbytes)


def _copy_now(source: _Source, destination: int) -> None:
    wait_until_computed(source.array)
    info = source.info
    if info.strides is None:
        move(destination, info.address, info.nbytes)
    else:
        np.copyto(_target(info, destination), _visible(info))


def join(library: Library, array: Any, info: ArrayInfo, stream: Stream) -> None:
    """Enqueues on `stream`, which stands for the current one of the array's library, what that one does not know: a
    wait for what an array of a library without streams waits on.  Does not block the host."""
    if library.current_stream(info.device) is None and library.name != "numpy":
        library.join(array, stream)


def _enqueue(source: _Source, destination: int, stream: Stream, batch: list[Copy]) -> object:
    """Adds the copy of one array to `batch`, and enqueues on `stream` what must come before; on the host backend it
    enqueues the whole copy where that is not contiguous.  Returns what must live until it has run."""
    info, array = source.info, source.array
    if source.joins:
        source.library.join(array, stream)
    if info.strides is None:
        batch.append((destination, info.address, info.nbytes))
        return array
    if info.device.kind == "host":
        target, visible = _target(info, destination), _visible(info)
        stream.launch(np.copyto, target, visible, reads=(visible,), writes=(target,))
        return array
    with info.device.backend.activate(info.device.index):
        packed = source.library.contiguous(array)  # freed to the stream that it was made on: this one
    batch.append((destination, source.library.describe(packed).address, info.nbytes))
    return (array, packed)


def _storage(info: ArrayInfo) -> np.dtype[Any]:
    """Bytes are copied, not numbers: any dtype of the right size, NaNs and all."""
    return np.dtype("c16" if info.itemsize == 16 else f"u{info.itemsize}")


def _target(info: ArrayInfo, address: int) -> npt.NDArray[Any]:
    return view(address, info.shape, _storage(info), None)


def _visible(info: ArrayInfo) -> npt.NDArray[Any]:
    """What an array in host memory shows, of any layout: reversed and broadcast ones too."""
    return view(info.address, info.shape, _storage(info), None, info.strides)
