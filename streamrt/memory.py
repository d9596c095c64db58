"""Memory across streams: buffers in flight, `use`, and snapshots of arguments.

A *snapshot* is a copy of the visible bytes of an array, C-contiguous, as of the call in stream order: it is enqueued on
the stream on which the array's own library works, so whatever that stream does to the array afterwards does not show in
it (pytorch#34885), and the host does not wait.  Arrays in ordinary memory are copied by the host at once.

Every array gets its own buffer, except small ones of one message, which share one: no peer is given memory that holds
anything else.  The same array twice in one call is copied once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

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
    reset_peak,
    set_held_limit,
    statistics,
    use,
)
from streamrt.device import Block, Device
from streamrt.errors import ArrayError, CaptureError, ExhaustedError, PlacementError
from streamrt.event import Event, event_pool
from streamrt.guard import current_stream
from streamrt.kernels import Copy, copy_many
from streamrt.libraries import ArrayInfo, Library, library_of, packed_at
from streamrt.libraries.host_memory import view, wait_until_computed
from streamrt.stream import Stream

__all__ = [
    "Buffer",
    "MemoryStatistics",
    "Snapshot",
    "allocate",
    "buffer_uses",
    "drain",
    "fetch",
    "hold",
    "hold_until",
    "reset_peak",
    "set_held_limit",
    "set_snapshot_limit",
    "snapshot",
    "statistics",
    "use",
]

DEFAULT_SNAPSHOT_LIMIT = 1 << 30
SMALL_BYTES = 64 * 1024
ALIGNMENT = 256
COPY_EDGE = "snapshot.copy"

_snapshot_limit = DEFAULT_SNAPSHOT_LIMIT


@dataclass(frozen=True, slots=True)
class Snapshot:
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


@dataclass(frozen=True, slots=True)
class _Source:
    """One array to be copied: how, and on which stream (None: by the host)."""

    array: Any
    info: ArrayInfo
    library: Library
    stream: Stream | None


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
    for source in sources:
        if source.stream is not None and source.stream.capturing:
            raise CaptureError(
                f"{source.stream!r} captures a graph, and a snapshot cannot be part of one; send after it"
            )
    unique: dict[tuple[Any, ...], int] = {}
    which = [unique.setdefault(_identity(source.info), number) for number, source in enumerate(sources)]
    chosen = {number: sources[number] for number in unique.values()}
    _check_room(sum(source.info.nbytes for source in chosen.values()), _snapshot_limit if limit is None else limit)
    made: dict[int, Snapshot] = {}
    groups: dict[Stream | None, list[int]] = {}
    for number, source in chosen.items():
        groups.setdefault(source.stream, []).append(number)
    for stream, numbers in groups.items():
        copies = _copy_group(stream, [chosen[number] for number in numbers], allocate_at)
        made.update(zip(numbers, copies, strict=True))
    return [made[number] for number in which]


def fetch(array: Any, info: ArrayInfo, address: int, holder: object) -> Event:
    """Enqueues on the array's current stream a copy of its visible bytes, C-contiguous, to pinned memory at `address`;
    returns the record behind it.  `info` describes the array, `holder` keeps the pinned memory.

    Both are kept here until the copy has run.  Does not block the host.  Raises `CaptureError`, `ArrayError`,
    `PlacementError` for an array of ``cpu``: then nothing was enqueued.
    """
    source = _source(array, info)
    stream = source.stream
    if stream is None:
        raise PlacementError("an array of cpu needs no fetching")
    if stream.capturing:
        raise CaptureError(f"{stream!r} captures a graph, and a call cannot be part of one; call after it")
    if COPY_EDGE in hooks.dropped:
        stream = Stream(stream.device)
    batch: list[Copy] = []
    kept = _enqueue(source, address, stream, batch)
    return _copied(stream, batch, [kept, holder])


def _copied(stream: Stream, batch: list[Copy], kept: list[object]) -> Event:
    """Enqueues the copies that were put off, and the record behind all; holds what they read until then."""
    copy_many(stream, batch)
    event = stream.record(event_pool(stream.device).lease())
    hold_until(kept, event, stream)
    return event


def _source(array: Any, info: ArrayInfo | None = None) -> _Source:
    library = library_of(array)
    if library is None:
        raise ArrayError(f"{type(array).__name__} is no array of a library that is loaded; convert it to one")
    if info is None:
        info = library.describe(array)
    stream = (library.current_stream(info.device) or current_stream(info.device)) if info.device.has_streams else None
    return _Source(array, info, library, stream)


def _identity(info: ArrayInfo) -> tuple[Any, ...]:
    return (info.device, info.address, info.shape, info.strides, info.dtype)


def _check_room(nbytes: int, limit: float) -> None:
    if buffers.snapshot_bytes() + nbytes <= limit:
        return
    drain(everything=True)
    held = buffers.snapshot_bytes()
    if held + nbytes > limit:
        raise ExhaustedError(
            f"a snapshot of {nbytes} bytes beside {held} bytes of earlier ones is over snapshot_limit={limit}; wait "
            "for earlier sends, raise the limit with set_snapshot_limit, or lend the arrays with copy=False"
        )


def _copy_group(stream: Stream | None, sources: list[_Source], allocate_at: Allocate | None) -> list[Snapshot]:
    """Copies arrays of one stream: the small ones into one buffer, each of the others into its own."""
    if stream is not None and COPY_EDGE in hooks.dropped:
        stream = Stream(stream.device)  # the edge is the order of the array's own stream; a test takes it away
    device = sources[0].info.device
    given: list[Block | None] = [
        None if allocate_at is None or not source.info.nbytes else allocate_at(device, source.info.nbytes)
        for source in sources
    ]
    offsets, small = [], 0
    for source, block in zip(sources, given, strict=True):
        offsets.append(small)
        if block is None and source.info.nbytes <= SMALL_BYTES:
            small += -(-source.info.nbytes // ALIGNMENT) * ALIGNMENT
    shared = buffers.allocate_snapshot(device, small, stream) if small else None
    placed = []
    for source, offset, block in zip(sources, offsets, given, strict=True):
        nbytes = source.info.nbytes
        if block is not None:
            buffer = buffers.adopt(block, device, stream, snapshot=True)
            address = buffer.address
        elif shared is not None and nbytes <= SMALL_BYTES:
            buffer, address = shared, shared.address + offset
        else:
            buffer = buffers.allocate_snapshot(device, nbytes, stream)
            address = buffer.address
        placed.append((buffer, packed_at(source.info, address)))
    batch: list[Copy] = []
    kept: list[object] = []
    for source, (_, info) in zip(sources, placed, strict=True):
        if not info.nbytes:
            continue
        if stream is None:
            _copy_now(source, info.address)
        else:
            kept.append(_enqueue(source, info.address, stream, batch))
    event = None
    if stream is not None:
        event = _copied(stream, batch, kept)
        for buffer, _ in placed:
            buffer.ready = event
    return [Snapshot(buffer, info, event) for buffer, info in placed]


def _copy_now(source: _Source, destination: int) -> None:
    wait_until_computed(source.array)
    np.copyto(_target(source.info, destination), _visible(source.info))


def join(library: Library, array: Any, info: ArrayInfo, stream: Stream) -> None:
    """Enqueues on `stream`, which stands for the current one of the array's library, what that one does not know: a
    wait for what an array of a library without streams waits on.  Does not block the host."""
    if library.current_stream(info.device) is None and library.name != "numpy":
        library.join(array, stream)


def _enqueue(source: _Source, destination: int, stream: Stream, batch: list[Copy]) -> object:
    """Enqueues on `stream` the copy of one array, or adds it to `batch`; returns what must live until it has run."""
    info, array = source.info, source.array
    join(source.library, array, info, stream)
    if info.strides is None:
        _enqueue_bytes(stream, destination, info.address, info.nbytes, batch)
        return array
    if info.device.kind == "host":
        target, visible = _target(info, destination), _visible(info)
        stream.launch(np.copyto, target, visible, reads=(visible,), writes=(target,))
        return array
    with info.device.backend.activate(info.device.index):
        packed = source.library.contiguous(array)  # freed to the stream that it was made on: this one
    _enqueue_bytes(stream, destination, source.library.describe(packed).address, info.nbytes, batch)
    return (array, packed)


def _enqueue_bytes(stream: Stream, destination: int, address: int, nbytes: int, batch: list[Copy]) -> None:
    if nbytes <= SMALL_BYTES:
        batch.append((destination, address, nbytes))
    else:
        stream.copy(destination, address, nbytes)


def _storage(info: ArrayInfo) -> np.dtype[Any]:
    """Bytes are copied, not numbers: any dtype of the right size, NaNs and all."""
    return np.dtype("c16" if info.itemsize == 16 else f"u{info.itemsize}")


def _target(info: ArrayInfo, address: int) -> npt.NDArray[Any]:
    return view(address, info.shape, _storage(info), None)


def _visible(info: ArrayInfo) -> npt.NDArray[Any]:
    """What an array in host memory shows, of any layout: reversed and broadcast ones too."""
    return view(info.address, info.shape, _storage(info), None, info.strides)
