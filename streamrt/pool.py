"""Stream pools: leases on a few long-lived streams.

Rules:

- Pool streams are non-blocking and are never destroyed: an allocator keeps memory by stream handle, and a recycled
  handle would inherit memory that the dead stream's queue still uses (cupy#5264).
- A release records an event; a lease prefers a stream whose release event is complete: a *clean* stream.  That is the
  second position of the TensorPipe RFC on pools; round-robin sharing, as PyTorch's pool does it, is the first.
- Where there is none, another stream is made, but only up to `CLEAN_STREAMS`: allocators keep memory by stream, so each
  stream that works on large arrays costs their temporaries once more.  From then on the one that was released first is
  given although it is busy, as long as nobody holds it.
- Aliasing is visible (pytorch#173729): `StreamLease.shared` says so, statistics count it, and ``exclusive=True`` gives
  a stream that nobody else holds, or fails.
- A stream that is capturing a graph is not leased (pytorch#114320).
- Callers and callees have separate pools, so that neither starves the other.

Nothing is created in steady state: streams, and one release event each, are made up to `size` and kept.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from dataclasses import dataclass
from typing import Literal, Self

from streamrt import forks
from streamrt.device import Device, open_device
from streamrt.errors import DeviceError, ExhaustedError, PlacementError
from streamrt.event import Event, EventPool, EventStatistics, event_pool
from streamrt.stream import Stream

__all__ = [
    "EventPool",
    "EventStatistics",
    "PoolStatistics",
    "StreamLease",
    "StreamPool",
    "event_pool",
    "pooled_streams",
    "stream_pool",
]

Exhausted = Literal["share", "grow", "fail"]
Role = Literal["caller", "callee"]

DEFAULT_SIZE = 32  # streams per pool, as PyTorch's; a GPU runs at most 128 grids at once
CLEAN_STREAMS = 8  # made for the sake of a clean one; more are made, up to the size, only if all are held
SCAN_LIMIT = 8  # free streams that one lease asks whether they are clean, so that its cost is bounded
GROWTH_LIMIT = 1024  # a pool that grows past this is leaking leases

_immortal: list[Stream] = []


class _Slot:
    """One stream of a pool: who holds it, and the event of its last release."""

    __slots__ = ("done", "exclusive", "holders", "stream")

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.done = Event(stream.device)
        self.holders = 0
        self.exclusive = False

    def mark(self) -> None:
        """Enqueues the record of a release; a record inside a capture would mark nothing outside it."""
        try:
            if not self.stream.capturing:
                self.stream.record(self.done)
        except DeviceError:
            pass  # the next lease's query meets the failure and says so


@dataclass(frozen=True, slots=True)
class PoolStatistics:
    """What a pool has done.

    `size`: its bound; `created`: streams made; `leased`: leases held now; `leases`: leases given so far; `shared`: of
    those, on a stream that another lease held; `busy_shared`: leases on a stream that was not known to be clean.
    """

    size: int
    created: int
    leased: int
    leases: int
    shared: int
    busy_shared: int


class StreamLease:
    """The use of a pool's stream until `release` (or the end of the ``with``).

    `stream` is the stream; `shared` says that another lease held it when this one was given.
    """

    __slots__ = ("__weakref__", "_pool", "_slot", "shared", "stream")

    def __init__(self, pool: StreamPool, slot: _Slot, shared: bool) -> None:
        """Made by `StreamPool.lease`.  Does not touch the device."""
        self._pool = pool
        self._slot: _Slot | None = slot
        self.stream = slot.stream
        self.shared = shared

    def release(self) -> None:
        """Enqueues on the stream a record of its release event, and gives it back.  Idempotent, from any thread."""
        slot, self._slot = self._slot, None
        if slot is not None:
            slot.mark()
            self._pool._returned.append(slot)

    @property
    def released(self) -> bool:
        """Whether `release` was called.  Does not touch the device."""
        return self._slot is None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()

    def __repr__(self) -> str:
        return f"<StreamLease {self.stream!r}{' shared' if self.shared else ''}{' released' if self.released else ''}>"

    def __del__(self) -> None:
        slot = getattr(self, "_slot", None)
        if slot is not None:  # forgotten: the next lease takes it back, since a finaliser may not touch the device
            self._pool._forgotten.append(slot)


class StreamPool:
    """A device's pool of `size` streams.  Thread-safe.

    `exhausted` says what a lease does when every stream is held: ``"share"`` takes them in turn, ``"grow"`` makes
    another (also when the free ones are busy, so that a lease is always clean), ``"fail"`` raises `ExhaustedError`.
    """

    def __init__(
        self, device: Device | str, size: int = DEFAULT_SIZE, exhausted: Exhausted = "share", *, priority: int = 0
    ) -> None:
        """An empty pool; streams are made when first needed.  Does not block the host once the device is open."""
        self.device = open_device(device)
        if not self.device.has_streams:
            raise PlacementError("cpu has no streams; make the pool on 'host:0' or 'cuda:0'")
        if size < 1:
            raise ValueError(f"a pool of {size} streams is not possible; ask for 1 or more")
        if exhausted not in ("share", "grow", "fail"):
            raise ValueError(f"exhausted={exhausted!r} is not known; use 'share', 'grow' or 'fail'")
        self.size, self.exhausted, self.priority = size, exhausted, priority
        self._lock = threading.Lock()
        forks.renew(self, _lock=threading.Lock)
        self._free: deque[_Slot] = deque()  # oldest release first
        self._held: deque[_Slot] = deque()  # in the order in which they will be shared
        self._returned: deque[_Slot] = deque()  # appended to without the lock, so that finalisers may release
        self._forgotten: deque[_Slot] = deque()
        self._created = self._leased = self._leases = self._shared = self._busy_shared = 0

    def lease(self, *, exclusive: bool = False) -> StreamLease:
        """A stream of the pool, a clean one if there is one.  Does not block the host.

        `exclusive` asks for a stream that no other lease holds or will get.  Raises `ExhaustedError` when it cannot be
        had, `DeviceError` when the device has failed.
        """
        with self._lock:
            if self._returned or self._forgotten:
                self._collect()
            slot, busy = self._take_free()
            if slot is None:
                slot, busy = self._take_held(exclusive), True
            shared = slot.holders > 0
            slot.holders += 1
            slot.exclusive = exclusive
            self._leased += 1
            self._leases += 1
            self._shared += shared
            self._busy_shared += busy
        return StreamLease(self, slot, shared)

    def _take_free(self) -> tuple[_Slot | None, bool]:
        """A free slot and whether it is busy: a clean one, else a new one, else the one that was released first."""
        busy: _Slot | None = None
        for slot in tuple(self._free)[:SCAN_LIMIT]:
            try:
                if slot.stream.capturing:
                    continue
                if slot.done.query():
                    return self._hold(slot), False
            except DeviceError:
                self._free.remove(slot)  # a failed stream of the host backend; a failed GPU refuses the next one too
                self._created -= 1
                continue
            busy = busy or slot
        room = self.size if busy is None else min(self.size, CLEAN_STREAMS)
        if self._created < room or (self.exhausted == "grow" and self._created < GROWTH_LIMIT):
            return self._create(), False
        return (None, False) if busy is None else (self._hold(busy), True)

    def _hold(self, slot: _Slot) -> _Slot:
        self._free.remove(slot)
        self._held.append(slot)
        return slot

    def _take_held(self, exclusive: bool) -> _Slot:
        where = f"all {self._created} streams of the pool of {self.device} are leased"
        if self.exhausted == "grow":
            raise ExhaustedError(f"{where}, and a pool does not grow past {GROWTH_LIMIT}; release some leases")
        if self.exhausted == "fail" or exclusive:
            raise ExhaustedError(f"{where}; release one, or make the pool larger than size={self.size}")
        for slot in self._held:
            if not slot.exclusive and not slot.stream.capturing:
                self._held.remove(slot)
                self._held.append(slot)
                return slot
        raise ExhaustedError(f"{where} exclusively or capturing; release one, or make size={self.size} larger")

    def _create(self) -> _Slot:
        slot = _Slot(_lasting(Stream(self.device, priority=self.priority)))
        self._created += 1
        self._held.append(slot)
        return slot

    def _collect(self) -> None:
        """Takes back what was released since the last call; under the lock."""
        while self._forgotten:
            slot = self._forgotten.popleft()
            slot.mark()
            self._returned.append(slot)
        while self._returned:
            slot = self._returned.popleft()
            self._leased -= 1
            slot.holders -= 1
            if not slot.holders:
                slot.exclusive = False
                self._held.remove(slot)
                self._free.append(slot)

    def statistics(self) -> PoolStatistics:
        """What the pool has done so far.  Does not touch the device."""
        with self._lock:
            self._collect()
            return PoolStatistics(
                size=self.size,
                created=self._created,
                leased=self._leased,
                leases=self._leases,
                shared=self._shared,
                busy_shared=self._busy_shared,
            )

    def __repr__(self) -> str:
        return f"<StreamPool {self.device} {self._leased} leases on {self._created} of {self.size}, {self.exhausted}>"


def lasting_stream(device: Device) -> tuple[Stream, Event]:
    """A stream that no pool lends, with an event; kept for as long as the process, as those of the pools.

    For who keeps a stream to himself.  Does not block the host once the device is open.
    """
    return _lasting(Stream(device)), Event(device)


def _lasting(stream: Stream) -> Stream:
    _immortal.append(stream)
    stream.natives = {}
    return stream


def pooled_streams() -> int:
    """How many streams live as long as the process, all pools' among them; each has an event.

    Does not touch the device.
    """
    return len(_immortal)


_pools: dict[tuple[Device, str], StreamPool] = {}
_lock = threading.Lock()
forks.renew(sys.modules[__name__], _lock=threading.Lock)


def stream_pool(device: Device, role: Role = "caller") -> StreamPool:
    """The device's pool for callers or for callees, one of each for the process.  Does not block the host once open."""
    pool = _pools.get((device, role))
    if pool is None:
        if role not in ("caller", "callee"):
            raise ValueError(f"role={role!r} is not known; use 'caller' or 'callee'")
        opened = open_device(device)
        with _lock:
            pool = _pools.setdefault((opened, role), StreamPool(opened))
    return pool
