"""Buffers in flight: memory that streams still use is not given back, however it was dropped.

A backend's pool frees to the stream that allocated, with no event: memory that another stream still reads is handed out
again (cupy#8068).  So every buffer is one record: the block, the stream that it was allocated on, and the streams that
waited for it or were declared with `use`.

Rules:

- A finaliser only appends the record to a queue: it may run anywhere, also inside an allocator.
- `drain` empties the queue: it records an event on every stream that used the buffer, as it stands *then*, and gives
  the block back when all are complete.  Memory used on its own stream only needs no event: it goes back in that order.
- What waits for events is bounded (`held_limit`).  Past it the owner stream waits for the oldest uses and the block
  goes back in the owner's order, so the peak does not depend on how far the host runs ahead (pytorch#147168).  The host
  backend frees at once and in no stream's order, so there the host runs what the uses need instead.
- A record that a graph capture takes marks nothing that runs.  Another thread may begin a capture at any time, so who
  records here looks afterwards where the record went (`record_outside`), and what was to wait for it comes again later.
- No user code and no driver call runs under `_lock`; `_draining` is only ever tried, never waited for.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from streamrt import forks
from streamrt.buffer import Buffer, Record, dead_records
from streamrt.device import Block, Device, StreamKey, backend_of, open_device
from streamrt.errors import CaptureError, DeviceError, PlacementError
from streamrt.event import Event
from streamrt.libraries import library_of
from streamrt.stream import Stream

FEW_BYTES = 64 * 1024
"""Up to here an allocation leaves what was dropped to a later one, unless there is much of it."""
MUCH = 8
"""So many things that were dropped or are kept, or so many questions whether there is much, are worth a `drain`."""
DEFAULT_HELD_LIMIT = 1 << 30
BOUND_EDGE = "memory.bound"


class _Held:
    """Somebody else's array that a stream uses: kept until nobody else refers to it and the uses are complete."""

    __slots__ = ("nbytes", "object", "owner", "uses")

    def __init__(self, value: object, nbytes: int, owner: Stream | None) -> None:
        self.object: object = value
        self.nbytes = nbytes
        self.owner = owner
        self.uses: dict[StreamKey, Stream] = {}


@dataclass(slots=True)
class _Pending:
    """Something that goes back when its events are complete; `owner` is the stream in whose order it may go earlier.

    `streams` says of each event where it was recorded, None where it is not known.
    """

    number: int
    events: list[Event]
    streams: list[Stream | None]
    keep: object
    nbytes: int
    owner: Stream | None
    record: Record | None


@dataclass(frozen=True, slots=True)
class MemoryStatistics:
    """What the runtime holds, in bytes unless said otherwise.

    `live`: in buffers that were not given back yet; `buffers`: how many these are; `peak`: the most that `live` was;
    `held`: dropped, but still used by a stream; `held_arrays`: how many arrays of others are kept for a stream;
    `snapshots`: in snapshots; `bounded`: how often the bound made an owner wait.
    """

    live: int
    buffers: int
    peak: int
    held: int
    held_arrays: int
    snapshots: int
    bounded: int


_lock = threading.Lock()
_draining = threading.Lock()
forks.renew(sys.modules[__name__], _lock=threading.Lock, _draining=threading.Lock)
_pending: dict[tuple[Any, ...], deque[_Pending]] = {}
_held: dict[int, _Held] = {}
_left: deque[tuple[object, Stream]] = deque()
_live: dict[int, Record] = {}
_numbers = iter(range(sys.maxsize))
_live_bytes = _peak_bytes = _held_bytes = _snapshot_bytes = _new_bytes = 0
_bounded = _drains = _noted = _asked = 0
_held_limit = DEFAULT_HELD_LIMIT


def _references(held: _Held) -> int:
    return sys.getrefcount(held.object)


_ALONE = _references(_Held(object(), 0, None))  # what an object shows that only its `_Held` refers to


def set_held_limit(nbytes: int) -> int:
    """Sets how many dropped bytes may wait for streams; returns the limit before.  Does not touch the device."""
    global _held_limit
    if nbytes < 0:
        raise ValueError(f"held_limit={nbytes} is negative")
    previous, _held_limit = _held_limit, nbytes
    return previous


def allocate(device: Device | str, nbytes: int, stream: Stream | None = None) -> Buffer:
    """Memory on a device, usable at once on `stream` and elsewhere after it; `cpu` takes no stream.

    Does not block the host on a GPU, except where the driver does; on the host backend it may run what the uses of
    dropped buffers need, past `held_limit`.  Raises `PlacementError` when the stream is of another device,
    `ExhaustedError` or `MemoryError` where there is no room.
    """
    return allocate_on(open_device(device), nbytes, stream, snapshot=False)


def allocate_on(device: Device, nbytes: int, stream: Stream | None, *, snapshot: bool) -> Buffer:
    """As `allocate`, on a device that is open; a snapshot is counted as one until the memory is given back."""
    make_room(nbytes)
    if device.has_streams and (stream is None or stream.device is not device):
        raise PlacementError(f"memory of {device} is allocated on a stream of {device}, not on {stream!r}")
    try:
        block = _take(device, nbytes, stream)
    except MemoryError:
        drain(everything=True, bound=True)  # what was left to a later allocation is room for this one
        try:
            block = _take(device, nbytes, stream)
        except MemoryError as error:
            raise MemoryError(f"{device} has no {nbytes} bytes left: {error}; release arrays") from error
    stream = stream if device.has_streams else None
    return _keep(block, device, stream, snapshot=snapshot)


def _take(device: Device, nbytes: int, stream: Stream | None) -> Block:
    if stream is None or not device.has_streams:  # the backend's, which is reused: a first touch costs more than a copy
        return backend_of("host").allocate_pinned(nbytes)
    return device.backend.allocate(device.index, nbytes, stream.handle)


def make_room(nbytes: int) -> None:
    """So much memory is about to be taken: a `drain` before, if it is worth one."""
    if nbytes > FEW_BYTES or much_to_drain():
        drain(bound=True)


def much_to_drain() -> bool:
    """Whether a `drain` is worth it now: each asks the driver several times, and whoever allocates little, records a
    value or fetches one comes often.

    It is where enough was dropped since the last one, or enough is to be held; and now and then where anything is kept
    at all, so that nothing is kept for long, of any size.  Does not touch the device.
    """
    global _asked
    if not (dead_records or _held or _pending or _left):
        return False
    _asked += 1
    return (
        _asked >= MUCH
        or _noted + len(dead_records) >= MUCH
        or _held_bytes + MUCH * FEW_BYTES > _held_limit
        or bool(_left)
    )


def adopt(block: Block, device: Device, stream: Stream | None = None, *, snapshot: bool = False) -> Buffer:
    """Makes a buffer of memory that somebody else gave: dropped once nobody uses it, and the block with it.

    `device` says whose array it is, `stream` on which it may be used at once.  Does not touch the device.
    """
    return _keep(block, device, stream, snapshot=snapshot)


def part(whole: Buffer, offset: int, nbytes: int) -> Buffer:
    """A buffer over a part of another, for an array of its own: uses of it are noted as of any buffer.

    The whole is kept as long as any part.  Does not touch the device.
    """
    block = Block(whole.address + offset, nbytes, whole, in_order=whole.block.in_order)
    return _keep(block, whole.device, whole.stream, snapshot=False)


def _keep(block: Block, device: Device, stream: Stream | None, *, snapshot: bool) -> Buffer:
    global _live_bytes, _peak_bytes, _snapshot_bytes
    record = Record(block, device, stream, snapshot=snapshot)
    with _lock:
        before = _live.get(block.address)
        if before is not None:  # the same memory, which a peer lent twice: a use of one is a use of the other
            record.uses = before.uses
        _live[block.address] = record
        _live_bytes += block.nbytes
        if _live_bytes > _peak_bytes:
            _peak_bytes = _live_bytes
        if snapshot:
            _snapshot_bytes += block.nbytes
    return Buffer(record)


def snapshot_bytes() -> int:
    """How many bytes snapshots hold; what was dropped and not drained counts.  Does not touch the device."""
    return _snapshot_bytes


def use(array: Any, stream: Stream, *, owner: Stream | None = None) -> None:
    """Keeps the memory of an array until what `stream` does with it is complete, also after the array is dropped.

    Counts all work that is enqueued on `stream` up to the moment when the array's end is noticed, after its last
    reference is gone.  Works for a `Buffer` and for any array of a library; there the runtime refers to the
    array itself, so what is on `stream` through a *view* wants a `use` of the view.  `owner` is the stream on which the
    library allocated it: past `held_limit` that stream waits for the use.  Does not block the host, but for arrays
    with no `owner` past that limit.  Raises `TypeError` for what is no array, and for what is no stream.  (cupy#8068;
    `Tensor.record_stream` is torch's form of it.)
    """
    if not isinstance(stream, Stream):
        raise TypeError(f"{stream!r} is no Stream; write use(array, stream), with a lease its .stream")
    if isinstance(array, Buffer):
        array.use(stream)
        return
    library = library_of(array)
    if library is None:
        name = type(array).__name__
        raise TypeError(f"{name} is no array of a loaded library; write use(array, stream) for each array by itself")
    info = library.describe(array)
    record = _live.get(info.address)
    if record is not None:
        record.uses[stream.key] = stream
        return
    hold(array, stream, nbytes=info.nbytes, owner=owner)
    drain(bound=True, may_synchronize=True)


def hold(value: object, stream: Stream, *, nbytes: int = 0, owner: Stream | None = None) -> None:
    """Keeps any object alive until it is referred to nowhere else and `stream` has done what is on it then.

    Does not touch the device.
    """
    global _new_bytes, _noted
    with _lock:
        held = _held.get(id(value))
        if held is None:
            held = _held[id(value)] = _Held(value, nbytes, owner)
            _new_bytes += nbytes
            _noted += 1
        held.uses[stream.key] = stream


def hold_until(values: Iterable[object], event: Event, stream: Stream) -> None:
    """Keeps objects alive until `event`, just recorded on `stream`, is complete.  Does not touch the device."""
    kept = list(values)
    if kept:
        _add_pending(_Pending(next(_numbers), [event], [stream], kept, 0, None, None), (stream.key,))


def leave(value: object, stream: Stream, _left: deque[tuple[object, Stream]] = _left) -> None:
    """Keeps an object alive until `stream` has done what is on it at the next `drain`.  For finalisers: it only appends
    to a queue, which is bound here, for globals go first when the process ends.  Does not touch the device."""
    _left.append((value, stream))


def record_outside(stream: Stream) -> Event | None:
    """Enqueues on `stream` a record; None where the stream captures a graph, which would have it or has taken it.

    Does not block the host.  Raises `DeviceError`.
    """
    captures = stream.device.backend.captures
    if captures.of(stream.key) is not None:
        return None
    event = stream.record()
    return None if event.handle in captures.events or stream.capturing else event  # the driver knows others' captures


def buffer_uses(address: int, stream: Stream) -> bool:
    """Notes that `stream` uses the runtime's buffer that starts at `address`; False if there is none.

    Does not touch the device.
    """
    record = _live.get(address)
    if record is None:
        return False
    record.uses[stream.key] = stream
    return True


def memory_uses(address: int, stream: Stream) -> bool:
    """`buffer_uses` of the buffer that an address lies in, as a view's does.  Does not touch the device."""
    if buffer_uses(address, stream):
        return True
    with _lock:
        records = list(_live.values())
    for record in records:
        block = record.block
        if block.address < address < block.address + block.nbytes:
            record.uses[stream.key] = stream
            return True
    return False


def drain(*, everything: bool = False, bound: bool = False, may_synchronize: bool = False) -> None:
    """Gives back what was dropped and is no longer used.  Called at allocations and by whoever has a moment.

    `everything` looks at all arrays of others at once, not at a share of them.  `bound` holds `held_limit`, see the
    module's rules; `may_synchronize` holds it also for arrays whose owner stream is not known.  Enqueues, on each
    stream that used what was dropped, a record of an event.  Does not block the host, except as the bound demands.
    """
    global _asked, _noted
    if not (dead_records or _held or _pending or _left) or not _draining.acquire(blocking=False):
        return  # someone drains already, perhaps a frame of this thread whose enqueueing ran user code
    try:
        noted, _noted, _asked = _noted, 0, 0
        for _ in range(len(dead_records)):
            record = dead_records.popleft()
            try:
                _retire(record)
            except BaseException:  # Ctrl-C above all, while a stream is asked: the next drain has it again
                dead_records.append(record)
                raise
        if _held:
            for held in _abandoned(everything, noted):
                if not _wait_for(list(held.uses.values()), held.object, held.nbytes, held.owner, None):
                    _hold_again(held)
        for _ in range(len(_left)):
            value, stream = _left.popleft()
            if not _wait_for([stream], value, 0, None, None):
                _left.append((value, stream))
        if _pending:
            _collect()
        if bound and _held_bytes > _held_limit:
            _bound(may_synchronize)
    finally:
        _draining.release()


def _abandoned(everything: bool, noted: int) -> list[_Held]:
    """The arrays that nobody else refers to any more, taken out of the table.

    Asking all of them costs as much as there are, so it is done once in as many drains as a quarter of them (or as many
    things that were `noted` before these), or when much memory has come in since.
    """
    global _drains, _new_bytes
    _drains += max(1, noted)
    if not everything and _drains * 4 < len(_held) and _new_bytes * 4 < _held_limit:
        return []
    _drains = _new_bytes = 0
    with _lock:
        found = [held for held in _held.values() if _references(held) <= _ALONE]
        for held in found:
            del _held[id(held.object)]
    return found


def _hold_again(held: _Held) -> None:
    with _lock:
        newer = _held.setdefault(id(held.object), held)
        newer.uses.update(held.uses)


def _retire(record: Record) -> None:
    """Gives a dropped buffer's memory back, at once where no stream can still use it."""
    block, own, uses, ready = record.block, record.stream, record.uses, record.ready
    if record.snapshot and ready is not None and not uses and not block.in_order:
        # Nobody but the runtime knows a snapshot, so on its own stream there is only the copy into it.
        pending = _Pending(next(_numbers), [ready], [own], block, block.nbytes, None, record)
        if not _complete(pending):
            _add_pending(pending, ("snapshot", None if own is None else own.key))
            return
    elif uses or (own is not None and not block.in_order):
        streams = list(uses.values())
        if own is not None:
            streams = [stream for stream in streams if stream.key != own.key]
            if not block.in_order:
                streams.append(own)
        busy = []
        for stream in streams:
            try:
                if not stream.query():  # asking costs less than a record and a later query
                    busy.append(stream)
            except CaptureError:
                dead_records.append(record)  # a record inside a capture would mark nothing outside it: later
                return
            except DeviceError:
                continue  # a failed stream runs nothing any more, so it uses nothing
        if busy:
            owner = own if block.in_order or record.device.kind == "host" else None
            if not _wait_for(busy, block, block.nbytes, owner, record):
                dead_records.append(record)
            return
    with _lock:
        _uncount(record)


def _wait_for(streams: list[Stream], keep: object, nbytes: int, owner: Stream | None, record: Record | None) -> bool:
    """Keeps something until the streams have done what is on them; False, and nothing is kept, where one captures."""
    events: list[Event] = []
    on: list[Stream | None] = []
    for stream in streams:
        try:
            event = record_outside(stream)
        except DeviceError:
            continue  # a failed stream runs nothing any more, so it uses nothing
        if event is None:
            return False
        events.append(event)
        on.append(stream)
    if events:
        pending = _Pending(next(_numbers), events, on, keep, nbytes, owner, record)
        _add_pending(pending, tuple(stream.key for stream in on if stream is not None))
    elif record is not None:
        with _lock:
            _uncount(record)
    return True


def _add_pending(pending: _Pending, key: tuple[Any, ...]) -> None:
    global _held_bytes, _noted
    key = (pending.nbytes > 0, pending.owner is not None, *key)  # what the bound cannot send back early is kept apart
    with _lock:
        queue = _pending.get(key)
        if queue is None:
            queue = _pending[key] = deque()
        queue.append(pending)
        _held_bytes += pending.nbytes
        _noted += 1


def _complete(pending: _Pending) -> bool:
    for at, event in enumerate(pending.events):
        try:
            if not event.query():
                return False
        except CaptureError:
            _record_again(pending, at)
            return False
        except DeviceError:
            return True  # a failed device runs nothing any more
    return True


def _record_again(pending: _Pending, at: int) -> None:
    """An event turned out to be part of a graph: it is replaced, once its stream captures no more."""
    stream = pending.streams[at]
    try:
        event = None if stream is None else record_outside(stream)
    except DeviceError:
        return  # the next query says so too
    if event is not None:
        pending.events[at] = event


def _collect() -> None:
    """Gives back what is complete: one stream's events complete in order, so only the heads are asked."""
    for key, queue in list(_pending.items()):
        while queue and _complete(queue[0]):
            _give_back(queue.popleft())
        if not queue:
            with _lock:
                if not queue:
                    del _pending[key]


def _bound(may_synchronize: bool) -> None:
    """Past the limit, makes the oldest go back now, ordered; what no order can be given to during a capture waits."""
    global _bounded
    passed: set[int] = set()
    while _held_bytes > _held_limit:
        queues = [
            queue
            for queue in list(_pending.values())
            if queue
            and queue[0].nbytes
            and (may_synchronize or queue[0].owner is not None)
            and queue[0].number not in passed
        ]
        if not queues:
            return
        queue = min(queues, key=lambda queue: queue[0].number)
        oldest = queue[0]
        try:
            for event in oldest.events:
                with contextlib.suppress(DeviceError):  # a failed device uses nothing
                    _order_behind(event, oldest.owner)
        except CaptureError:
            passed.add(oldest.number)
            continue
        _bounded += 1
        _give_back(queue.popleft())


def _order_behind(event: Event, owner: Stream | None) -> None:
    """Raises `CaptureError` where the event marks nothing that runs, or the owner captures."""
    if event.device.kind == "host":
        event.require()
    elif owner is None:
        event.synchronize()
    elif owner.capturing:
        raise CaptureError("a graph cannot wait for the uses of a buffer")
    else:
        owner.wait(event, edge=BOUND_EDGE)


def _give_back(pending: _Pending) -> None:
    """Drops what was kept, with no lock held: the block's finaliser runs the backend's own code."""
    global _held_bytes
    with _lock:
        _held_bytes -= pending.nbytes
        if pending.record is not None:
            _uncount(pending.record)
    pending.keep = None


def _uncount(record: Record) -> None:
    """Under the lock: a buffer's memory is about to go back."""
    global _live_bytes, _snapshot_bytes
    block = record.block
    if _live.get(block.address) is record:
        del _live[block.address]
    _live_bytes -= block.nbytes
    if record.snapshot:
        _snapshot_bytes -= block.nbytes


def statistics() -> MemoryStatistics:
    """What the runtime holds now, after a `drain`, so that a leak test sees what is really held.

    Does not block the host.
    """
    drain(everything=True)
    with _lock:
        held = len(_held) + sum(one.record is None for queue in _pending.values() for one in queue)
        return MemoryStatistics(
            live=_live_bytes,
            buffers=len(_live),
            peak=_peak_bytes,
            held=_held_bytes,
            held_arrays=held,
            snapshots=_snapshot_bytes,
            bounded=_bounded,
        )


def reset_peak() -> None:
    """Lets `statistics().peak` begin anew at what is live now.  Does not touch the device."""
    global _peak_bytes
    with _lock:
        _peak_bytes = _live_bytes
